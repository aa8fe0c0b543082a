# SPDX-License-Identifier: Apache-2.0
"""The page /topology: the machine as a person wants to see it, in one HTML document without a script or a foreign resource.

Every text from hardware, claims or files is escaped here; a picture comes from `discovery.draw`, which escapes its own.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from discovery import matrix, model
from driver import values
from driver.observe import partitions, sharers
from driver.version import VERSION

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; --near: #1a7f3744; --far: #cf222e33; --self: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.soft { color: var(--soft); } div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem .2rem 0; text-align: left; white-space: nowrap; }
table.matrix td, table.matrix th { padding: .2rem .5rem; text-align: center; }
td.nv, td.pix, td.pxb { background: var(--near); } td.sys, td.unknown { background: var(--far); }
td.self { background: var(--self); } td.text { white-space: normal; }
b.error { color: #cf222e; } b.warning { color: #9a6700; }
@media (prefers-color-scheme: dark) { b.error { color: #ff7b72; } b.warning { color: #d29922; } }
div.bar { display: flex; min-width: 30rem; } div.bar span { flex: 1 1 0; border: 1px solid var(--line); padding: 0 .3rem; }
span.ours, span.static { background: var(--near); } span.foreign { background: var(--far); } span.stranded { background: var(--self); }
svg { max-width: 100%; height: auto; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content-Security-Policy of the page: even text that somehow got through as markup would load and run nothing."""

_CELL_CLASSES = {"PIX": "pix", "PXB": "pxb", "SYS": "sys", matrix.SELF: "self", matrix.UNKNOWN: "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClaim:
    """A claim in the record, as the page shows it."""

    claim: values.ClaimRef
    state: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the page shows. `snapshot` is None before the first probe; `picture` is an SVG document or empty.

    `reasons`: what /readyz has to say. `publish_findings`: what was odd about publishing the snapshot. `record_error`: why
    there are no claims to show.
    """

    node_name: str
    snapshot: model.Snapshot | None
    read_at: float | None
    ready: bool
    reasons: tuple[str, ...] = ()
    claims: tuple[PreparedClaim, ...] = ()
    publish_findings: tuple[model.Finding, ...] = ()
    record_error: str | None = None
    picture: str = ""
    sharing: partitions.Sharing = field(default_factory=partitions.Sharing)
    shared: tuple[sharers.Shared, ...] = ()
    seen: tuple[sharers.Seen, ...] = ()


def render(view: View) -> str:
    """The page."""
    parts = [
        f"<h1>Node {_text(view.node_name)}</h1>",
        f'<p class="soft">{_text(_headline(view))}</p>',
        _readiness(view),
    ]
    if view.snapshot is not None:
        parts += [
            f'<div class="wide">{view.picture}</div>' if view.picture else "",
            *_matrix(matrix.build(view.snapshot)),
            *_gpus(view.snapshot, view.claims),
            *_divided(view.snapshot, view.sharing, view.claims),
            *_shared(view),
            *_nics(view.snapshot),
            *_findings((*view.snapshot.findings, *view.publish_findings)),
        ]
    parts += _claims(view)
    title = f"{_text(view.node_name)} - Nearfield"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def _headline(view: View) -> str:
    snapshot = view.snapshot
    if snapshot is None:
        return f"Nearfield {VERSION}. The hardware has not been read yet."
    machine = " ".join(part for part in (snapshot.host.vendor, snapshot.host.product) if part) or "Machine unknown"
    driver = f"NVIDIA driver {snapshot.nvidia_driver.version}" if snapshot.nvidia_driver else "no NVIDIA driver"
    replayed = ", replayed from a recording" if snapshot.origin is model.Origin.RECORDING else ""
    read = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.read_at)) if view.read_at is not None else "never"
    return f"{machine}{replayed}; {driver}; Nearfield {VERSION}; last read {read}."


def _readiness(view: View) -> str:
    words = "<b>Ready</b>" if view.ready else '<b class="error">Not ready</b>'
    items = "".join(f"<li>{_text(reason)}</li>" for reason in view.reasons)
    return f"<p>{words}</p>" + (f"<ul>{items}</ul>" if items else "")


def _matrix(built: matrix.Matrix) -> list[str]:
    if not built.labels:
        return []
    head = "".join(f"<th>{label}</th>" for label in ("", *built.labels, "CPUs", "NUMA"))
    rows = [
        f'<tr><th title="{row.pci.address} {_text(row.description)}">{row.label}</th>'
        + "".join(f'<td class="{_cell_class(cell)}">{_text(cell)}</td>' for cell in row.paths)
        + f"<td>{_text(matrix.ranges(row.pci.cpus or ()))}</td><td>{_known(matrix.node(row.pci))}</td></tr>"
        for row in built.rows
    ]
    given = ((matrix.GIVEN, matrix.GIVEN_MEANING),) if any(matrix.is_given(row.pci) for row in built.rows) else ()
    legend = "; ".join(f"{cell}: {meaning}" for cell, meaning in (*matrix.LEGEND, *given))
    return [
        "<h2>Paths</h2>",
        f'<div class="wide"><table class="matrix"><tr>{head}</tr>{"".join(rows)}</table></div>',
        f'<p class="soft">{_text(legend)}.</p>',
    ]


def _gpus(snapshot: model.Snapshot, claims: Sequence[PreparedClaim]) -> list[str]:
    if not snapshot.gpus:
        return ["<h2>GPUs</h2>", "<p>There is no NVIDIA GPU on this machine.</p>"]
    holders = _holders(claims)
    rows = []
    for index, gpu in enumerate(snapshot.gpus):
        device = values.gpu_device_name(gpu.address)
        nic = gpu.nic
        rows.append(
            (
                f"GPU{index}",
                device,
                gpu.product,
                gpu.state if gpu.state_reason is None else f"{gpu.state}: {gpu.state_reason}",
                gpu.pci.pcie_root,
                matrix.switch(gpu.pci),
                gpu.groups.nvlink_domain,
                gpu.groups.aligned_pair,
                gpu.groups.aligned_quad,
                f"{nic.name or nic.address} ({nic.distance})" if nic else None,
                ", ".join(holders.get(device, ())) or None,
            )
        )
    columns = ("", "Device", "Product", "State", "Root", "Switch", "NVLink domain", "Pair", "Quad", "NIC", "Claims")
    return ["<h2>GPUs</h2>", _table(columns, rows)]


def _holders(claims: Iterable[PreparedClaim]) -> dict[str, list[str]]:
    """The claims that have each device."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        for device in dict.fromkeys(claim.devices):
            found.setdefault(device, []).append(_ref(claim.claim))
    return found


def _divided(snapshot: model.Snapshot, sharing: partitions.Sharing, claims: Sequence[PreparedClaim]) -> list[str]:
    held = _holders(claims)
    rows = []
    for gpu in snapshot.gpus:
        there = partitions.instances(gpu, sharing=sharing, held=held)
        left = partitions.left(gpu, sharing=sharing, held=held)
        if not there and left is None:
            continue
        stranded = left.stranded if left is not None else frozenset()
        cells: list[str] = []
        seen: partitions.Instance | None = None
        for number, entry in enumerate(partitions.slots(gpu, there)):
            if entry is None:
                cells.append(
                    f'<span class="stranded">{number}</span>' if number in stranded else f"<span>{number}</span>"
                )
            elif entry is not seen:
                told = ", ".join(held.get(entry.device, ())) or str(entry.origin)
                cells.append(
                    f'<span class="{entry.origin}" style="flex-grow:{entry.placement.size}" title="{_text(told)}">'
                    f"{_text(entry.profile)}</span>"
                )
            seen = entry
        rows.append(
            f"<tr><td>{values.gpu_device_name(gpu.address)}</td><td>{sharing.policy(gpu).mode}</td>"
            f'<td><div class="bar">{"".join(cells)}</div></td></tr>'
        )
    if not rows:
        return []
    head = "<tr><th>Device</th><th>Mode</th><th>Memory slices</th></tr>"
    return ["<h2>MIG</h2>", f'<div class="wide"><table>{head}{"".join(rows)}</table></div>']


def _shared(view: View) -> list[str]:
    if not view.shared:
        return []
    bars, rows = [], []
    for device in view.shared:
        cells = [
            f'<span class="ours" style="flex-grow:{use.memory}" title="{_text(_ref(use.claim))}">'
            f"{_text(_size(use.memory))}</span>"
            for use in device.uses
        ]
        memory = device.memory
        left = (("free", memory.free), ("stranded", memory.stranded))
        cells += [
            f'<span class="{name}" style="flex-grow:{amount}" title="{name}">{_text(_size(amount))}</span>'
            for name, amount in left
            if amount
        ]
        by = device.enforcement
        bars.append(
            f"<tr><td>{_text(device.device)}</td><td>{by.memory}</td><td>{by.compute}</td>"
            f'<td><div class="bar">{"".join(cells)}</div></td><td>{_text(_compute(device))}</td>'
            f"<td>{device.sharers} of {device.terms.sharers}</td></tr>"
        )
        rows += [
            (
                _ref(use.claim),
                device.device,
                _size(use.memory),
                _size(use.memory_limit),
                _seen(view.seen, use),
                None if use.compute is None else f"{use.compute} %",
                None if use.compute_limit is None else f"{use.compute_limit} %",
            )
            for use in device.uses
        ]
    names = ("Device", "Memory by", "Compute by", "Memory", "Compute", "Sharers")
    head = "".join(f"<th>{name}</th>" for name in names)
    columns = ("Claim", "Device", "Memory", "Limit", "Its pods used", "Compute", "Limit")
    return [
        "<h2>Shares</h2>",
        f'<div class="wide"><table><tr>{head}</tr>{"".join(bars)}</table></div>',
        _table(columns, rows) if rows else "",
    ]


def _compute(device: sharers.Shared) -> str:
    compute = device.compute
    return "turns" if compute is None else f"{compute.given} of {compute.value} %, {compute.free} % free"


def _seen(seen: Sequence[sharers.Seen], use: sharers.Use) -> str | None:
    """What the pods of a claim used of a device, when they were last looked at."""
    of_claim = [entry for entry in seen if entry.device == use.device and use.claim.uid in entry.claims]
    return ", ".join(
        f"{_size(entry.used)} of {_size(entry.limit) or 'no limit'} (pod {entry.pod_uid})"
        for entry in of_claim
        if entry.used is not None
    )


def _size(amount: int | None) -> str:
    return "" if amount is None else f"{amount / (1 << 30):.1f} GiB"


def _ref(claim: values.ClaimRef) -> str:
    return f"{claim.namespace}/{claim.name}"


def _nics(snapshot: model.Snapshot) -> list[str]:
    if not snapshot.nics:
        return []
    rows = [
        (
            f"NIC{index}",
            nic.address,
            ", ".join(device.name for device in nic.rdma_devices),
            ", ".join(
                f"{interface.name} ({interface.operstate})" if interface.operstate else interface.name
                for interface in nic.interfaces
            ),
            nic.pci.pcie_root,
            matrix.switch(nic.pci),
            matrix.rail(nic),
        )
        for index, nic in enumerate(snapshot.nics)
    ]
    return ["<h2>NICs</h2>", _table(("", "Address", "RDMA", "Interfaces", "Root", "Switch", "Rail"), rows)]


def _findings(findings: Sequence[model.Finding]) -> list[str]:
    if not findings:
        return []
    rows = "".join(
        f'<tr><td><b class="{finding.severity}">{finding.severity}</b></td><td>{_text(finding.subject)}</td>'
        f'<td class="text">{_text(finding.message)}</td><td>{_text(finding.code)}</td></tr>'
        for finding in findings
    )
    return ["<h2>Findings</h2>", f'<div class="wide"><table>{rows}</table></div>']


def _claims(view: View) -> list[str]:
    if view.record_error is not None:
        return ["<h2>Claims</h2>", f'<p><b class="error">{_text(view.record_error)}</b></p>']
    if not view.claims:
        return ["<h2>Claims</h2>", "<p>No claim is prepared.</p>"]
    rows = [
        (claim.claim.namespace, claim.claim.name, claim.claim.uid, claim.state, ", ".join(claim.devices))
        for claim in view.claims
    ]
    return ["<h2>Claims</h2>", _table(("Namespace", "Name", "UID", "State", "Devices"), rows)]


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_known(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell_class(cell: str) -> str:
    return "nv" if cell.startswith("NV") else _CELL_CLASSES.get(cell, "")


def _known(value: object) -> str:
    """A value, or nothing where it is unknown."""
    return "" if value is None else _text(str(value))


def _text(text: str) -> str:
    return html.escape(text, quote=True)
