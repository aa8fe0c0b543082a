# SPDX-License-Identifier: Apache-2.0
"""A Snapshot as a picture: sockets and NUMA nodes, in them host bridges, in them PCIe switches, in them devices. Pure.

What an overlay gave is marked with a *. Its groups stand around host bridges: a virtual machine shows one for each device.

The picture is one SVG element without scripts, styles or foreign resources, so it can stand inside a page or alone. Its
text takes the colour of its surroundings. Every text from hardware is escaped, and cut where it would leave its box; the
tooltip of a device has it whole.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from discovery import model
from discovery.address import PciAddress

_PAD = 8
_TITLE = 18
_LETTER = 6.6
"""Width of a letter of the small font; monospaced, so that text can be measured."""

_CARD = (158, 60)
_PANEL_WIDTH = 820
_COLOURS = ("#2da44e", "#0969da", "#bf3989", "#bc4c00", "#8250df", "#1b7c83", "#9a6700", "#cf222e")
"""One for each NVLink domain, in their order, then again."""

_GIVEN = "*"
_GREY = "#8c959f"
_RED = "#cf222e"


@dataclass(frozen=True, slots=True)
class _Box:
    """Something with a size that can be drawn at a place."""

    width: int
    height: int
    draw: Callable[[int, int], list[str]]


def svg(snapshot: model.Snapshot) -> str:
    """The picture of a machine."""
    domains = sorted({gpu.groups.nvlink_domain for gpu in snapshot.gpus if gpu.groups.nvlink_domain is not None})
    colours = {domain: _COLOURS[index % len(_COLOURS)] for index, domain in enumerate(domains)}
    cards = [
        *((gpu.pci, _gpu(gpu, colours)) for gpu in snapshot.gpus),
        *((pci, _card(pci, "NVSwitch", str(pci.address), "", colour=_GREY)) for pci in snapshot.nvswitches),
        *((nic.pci, _nic(nic)) for nic in snapshot.nics if nic.pci.physical_function is None),
        *((nvme.pci, _nvme(nvme)) for nvme in snapshot.nvmes if nvme.pci.physical_function is None),
    ]
    panels = [_panel(snapshot, node, members) for node, members in _by_node(cards)]
    legend = [_legend(snapshot, domain, colours[domain]) for domain in domains]
    nothing = [] if cards else [_line("no GPU, NIC or NVMe controller on this machine")]
    note = [_line(f"{_GIVEN} given by an overlay or the configuration file")] if _has_given(snapshot) else []
    whole = _container(_name(snapshot), [*panels, *legend, *note, *nothing], width=2 * _PANEL_WIDTH + 3 * _PAD)
    body = "".join(whole.draw(1, 1))
    width, height = whole.width + 2, whole.height + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{_text(_name(snapshot))}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" font-family="ui-monospace, monospace" font-size="11" '
        f'fill="currentColor">{body}</svg>'
    )


def _has_given(snapshot: model.Snapshot) -> bool:
    functions = [
        *(gpu.pci for gpu in snapshot.gpus),
        *snapshot.nvswitches,
        *(nic.pci for nic in snapshot.nics),
        *(nvme.pci for nvme in snapshot.nvmes),
    ]
    sources = {source for pci in functions for source in (pci.numa_source, pci.switch_source)}
    return model.Provenance.OVERLAY in sources | {nic.rail_source for nic in snapshot.nics}


_Cards = Sequence[tuple[model.PciFunction, _Box]]


def _by_node(cards: _Cards) -> list[tuple[int | None, _Cards]]:
    """The cards of each NUMA node in order, those of an unknown one last."""
    nodes = sorted({pci.numa_node for pci, _ in cards if pci.numa_node is not None})
    ordered: list[int | None] = [*nodes, *([None] if any(pci.numa_node is None for pci, _ in cards) else [])]
    return [(node, [card for card in cards if card[0].numa_node == node]) for node in ordered]


def _panel(snapshot: model.Snapshot, node: int | None, cards: _Cards) -> _Box:
    inner = _in_groups(cards, ())
    if node is None:
        return _container("NUMA node unknown", inner, width=_PANEL_WIDTH)
    given = any(pci.numa_source is model.Provenance.OVERLAY for pci, _ in cards)
    sockets = sorted({pci.cpu_socket for pci, _ in cards if pci.cpu_socket is not None})
    about = next((known for known in snapshot.numa_nodes if known.node == node), None)
    parts = [f"socket {socket}" for socket in sockets] + [f"NUMA node {node}{_GIVEN if given else ''}"]
    if about is not None:
        parts.append(f"{len(about.cpus)} CPUs" if about.cpus else "no CPUs")
        if about.memory_bytes is not None:
            parts.append(f"{about.memory_bytes >> 30} GiB")
    return _container(" · ".join(parts), inner, width=_PANEL_WIDTH)


def _in_groups(cards: _Cards, above: tuple[PciAddress, ...]) -> list[_Box]:
    """What is in the groups of an overlay `above` (outermost first): further groups, each with its own, and host bridges."""
    depth = len(above)

    def further(pci: model.PciFunction) -> PciAddress | None:
        grouped = pci.switch_source is model.Provenance.OVERLAY and len(pci.switches) > depth
        return pci.switches[-depth - 1] if grouped else None

    groups = sorted({group for pci, _ in cards if (group := further(pci)) is not None})
    here = [card for card in cards if further(card[0]) is None]
    bridges = sorted({pci.host_bridge or "" for pci, _ in here}, key=lambda name: (len(name), name))
    return [
        *(
            _container(
                f"switch {group}{_GIVEN}",
                _in_groups([card for card in cards if further(card[0]) == group], (*above, group)),
            )
            for group in groups
        ),
        *(
            _container(
                name or "place unknown", _below([card for card in here if (card[0].host_bridge or "") == name], ())
            )
            for name in bridges
        ),
    ]


def _below(cards: _Cards, above: tuple[PciAddress, ...]) -> list[_Box]:
    """What hangs below the switches `above` (outermost first): further switches, each with its own, and devices."""
    depth = len(above)
    here = [box for pci, box in cards if len(_shown(pci)) == depth]
    inner = sorted({_shown(pci)[-depth - 1] for pci, _ in cards if len(_shown(pci)) > depth})
    switches = [
        _container(
            f"switch {upstream}",
            _below(
                [card for card in cards if len(_shown(card[0])) > depth and _shown(card[0])[-depth - 1] == upstream],
                (*above, upstream),
            ),
        )
        for upstream in inner
    ]
    return [*switches, *here]


def _shown(pci: model.PciFunction) -> tuple[PciAddress, ...]:
    """The switches that sysfs shows."""
    return () if pci.switch_source is model.Provenance.OVERLAY else pci.switches


def _gpu(gpu: model.Gpu, colours: dict[PciAddress, str]) -> _Box:
    ready = gpu.state is model.GpuState.READY
    domain = gpu.groups.nvlink_domain
    colour = _RED if not ready else _GREY if domain is None else colours[domain]
    about = gpu.product or "NVIDIA GPU"
    if not ready:
        last = str(gpu.state)
    elif gpu.nic is None:
        last = "no NIC"
    else:
        last = f"{gpu.nic.distance} {gpu.nic.name or gpu.nic.address}"
    name = "GPU" if gpu.minor is None else f"GPU {gpu.minor}"
    told = [gpu.state_reason, gpu.uuid, None if gpu.memory_bytes is None else f"{gpu.memory_bytes >> 20} MiB"]
    if gpu.nvlinks:
        told.append(f"{sum(link.active for link in gpu.nvlinks)} of {len(gpu.nvlinks)} NVLinks active")
    return _card(
        gpu.pci, f"{name} {gpu.address}", about.removeprefix("NVIDIA "), last, colour=colour, filled=ready, told=told
    )


def _nic(nic: model.Nic) -> _Box:
    names = [device.name for device in nic.rdma_devices] + [interface.name for interface in nic.interfaces]
    given = _GIVEN if nic.rail_source is model.Provenance.OVERLAY else ""
    rail = "" if nic.rail is None else f"rail {nic.rail}{given}"
    states = [f"{port.link_layer} {port.state}" for device in nic.rdma_devices for port in device.ports]
    if nic.data_direct is not None:
        states.append(f"Data Direct {nic.data_direct.address}")
    return _card(nic.pci, f"NIC {nic.address}", " ".join(names), rail, colour=_GREY, told=states)


def _nvme(nvme: model.Nvme) -> _Box:
    return _card(nvme.pci, f"NVMe {nvme.address}", " ".join(nvme.controllers), "", colour=_GREY)


def _card(
    pci: model.PciFunction,
    title: str,
    second: str,
    third: str,
    *,
    colour: str,
    filled: bool = False,
    told: Iterable[str | None] = (),
) -> _Box:
    width, height = _CARD
    tooltip = [title, second, third, *told, None if pci.driver is None else f"driver {pci.driver}"]
    link = pci.link
    if link is not None and link.current_width is not None:
        tooltip.append(f"PCIe x{link.current_width} of x{link.max_width or '?'}")
    if pci.numa_source is model.Provenance.OVERLAY:
        tooltip.append(f"NUMA node {pci.numa_node} from the overlay")
    if pci.switch_source is model.Provenance.OVERLAY:
        tooltip.append(f"switch {' in '.join(map(str, pci.switches))} from the overlay")

    def draw(x: int, y: int) -> list[str]:
        frame = (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour if filled else "none"}" '
            f'fill-opacity="0.15" stroke="{colour}" stroke-width="{2 if filled else 1}"/>'
        )
        lines = [f"<g><title>{_text(chr(10).join(part for part in tooltip if part))}</title>", frame]
        for row, (text, weight) in enumerate(((title, "bold"), (second, "normal"), (third, "normal"))):
            lines.append(_words(text, x + 7, y + 16 + 17 * row, width - 12, weight=weight))
        return [*lines, "</g>"]

    return _Box(width, height, draw)


def _legend(snapshot: model.Snapshot, domain: PciAddress, colour: str) -> _Box:
    members = [gpu for gpu in snapshot.gpus if gpu.groups.nvlink_domain == domain]
    kinds = {link.remote_kind for gpu in members for link in gpu.nvlinks if link.active}
    over = "over NVSwitches" if model.RemoteKind.SWITCH in kinds else "direct"
    cliques = len({gpu.groups.nvlink_clique for gpu in members})
    text = (
        f"NVLink domain {domain}: {len(members)} GPUs, {over}, {cliques} all-to-all group{'s' if cliques > 1 else ''}"
    )
    line = _line(text)

    def draw(x: int, y: int) -> list[str]:
        mark = f'<rect x="{x}" y="{y + 4}" width="10" height="10" rx="2" fill="{colour}"/>'
        return [mark, *line.draw(x + 16, y)]

    return _Box(line.width + 16, line.height, draw)


def _line(text: str) -> _Box:
    width = int(len(text) * _LETTER) + _PAD
    return _Box(width, _TITLE, lambda x, y: [_words(text, x, y + 13, width)])


def _container(title: str, inner: Sequence[_Box], *, width: int = _PANEL_WIDTH - 2 * _PAD) -> _Box:
    """A frame around boxes that stand in rows, as many in a row as `width` allows."""
    places: list[tuple[int, int, _Box]] = []
    x, y, row, widest = _PAD, _TITLE + _PAD, 0, 0
    for box in inner:
        if x > _PAD and x + box.width + _PAD > width:
            x, y, row = _PAD, y + row + _PAD, 0
        places.append((x, y, box))
        x += box.width + _PAD
        row = max(row, box.height)
        widest = max(widest, x)
    outer_width = max(widest, min(width, int(len(title) * _LETTER) + 2 * _PAD))
    outer_height = y + row + _PAD

    def draw(left: int, top: int) -> list[str]:
        frame = (
            f'<rect x="{left}" y="{top}" width="{outer_width}" height="{outer_height}" rx="6" fill="none" '
            f'stroke="{_GREY}" stroke-opacity="0.5"/>'
        )
        head = _words(title, left + _PAD, top + 15, outer_width - 2 * _PAD, weight="bold")
        return [frame, head, *(line for at, down, box in places for line in box.draw(left + at, top + down))]

    return _Box(outer_width, outer_height, draw)


def _words(text: str, x: int, y: int, width: int, *, weight: str = "normal") -> str:
    letters = max(int(width / _LETTER), 1)
    shown = text if len(text) <= letters else text[: letters - 1] + "…"
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{_text(shown)}</text>' if shown else ""


def _text(text: str) -> str:
    """Escaped, and without the control characters that XML has no way to write."""
    return html.escape("".join(letter for letter in text if letter >= " " or letter == "\n"))


def _name(snapshot: model.Snapshot) -> str:
    return " ".join(part for part in (snapshot.host.vendor, snapshot.host.product) if part) or "this machine"
