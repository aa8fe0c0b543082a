# SPDX-License-Identifier: Apache-2.0
"""`nearfield devices`: the devices of a machine as claims see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from discovery import matrix, model
from discovery.address import PciAddress
from driver.cli import divided, offer, output, parameters, source
from driver.publish import attributes, devices, wire

if TYPE_CHECKING:
    from driver.observe import sharers
    from driver.prepare import ledger
    from driver.sharing import rules

MIG_COLUMNS = (("PROFILE", attributes.PROFILE),)
"""Shown where a MIG instance is."""

COLUMNS: tuple[tuple[str, str], ...] = (
    ("PRODUCT", attributes.PRODUCT_NAME),
    *MIG_COLUMNS,
    ("MEMORY", ""),
    ("NUMA", attributes.NUMA_NODE),
    ("ROOT", attributes.PCIE_ROOT),
    ("SWITCH", attributes.PCIE_SWITCH),
    ("NVLINK", attributes.NVLINK_DOMAIN),
    ("PAIR", attributes.ALIGNED_PAIR),
    ("QUAD", attributes.ALIGNED_QUAD),
    ("NIC", attributes.NIC),
    ("DISTANCE", attributes.NIC_DISTANCE),
    ("RAIL", attributes.RAIL),
)
"""What the table shows: heading and attribute; MEMORY is the capacity."""


@click.command(
    "devices",
    help="""Show the devices that would be published.

    In the order in which they would be offered: the scheduler takes the first that fit. What keeps a GPU from being offered
    is listed below. NUMA nodes, switches and rails that a person gave are marked with a *. Of a GPU that is or may be divided
    by MIG a bar shows its memory slices; every place for an instance is listed with -o json only. Of one that is handed out in
    shares a bar shows its memory.""",
    epilog="""\b
    Examples:
      nearfield devices
      nearfield devices --mock dgx-h100 -o json | jq '.items[].attributes.alignedPair.string'
    """,
)
@parameters.add(*source.OPTIONS, "mps-dir", "cgroup-root")
@output.option()
def command(output_format: output.Format, **values: str | None) -> None:
    """List the devices."""
    parsed = source.parse(values, "mps-dir", "cgroup-root")
    agent = source.read_config(parsed)
    snapshot = source.take_snapshot(parsed, agent)
    entries = source.prepared(parsed)
    held = source.held(entries)
    resolved = offer.shared(snapshot, parsed, agent)
    policies = resolved.policies
    offered, reason, findings = offer.offered(offer.build(snapshot, parsed, agent, resolved=resolved, ours=held or ()))
    parted = divided.divided(snapshot, policies=policies, held=held)
    shares = _Shares(snapshot, policies, entries)
    if output_format is not output.Format.TABLE:
        items = [
            {"address": str(device.address), **wire.device_to_json(device, driver_name=parsed["driver_name"])}
            for device in offered
        ]
        more: dict[str, object] = {"divided": [divided.item(gpu) for gpu in parted]} if parted else {}
        if items_of_shares := shares.items():
            more["shared"] = items_of_shares
        output.write_document({**output.items("DeviceList", items), **more}, output_format)
        return
    shown = [device for device in offered if attributes.UUID in device.attributes]
    if offered:
        given = _given(snapshot)
        columns = [column for column in COLUMNS if column not in MIG_COLUMNS or _has(shown, column[1])]
        output.write_table(
            ("DEVICE", *(head for head, _ in columns)),
            [_row(device, columns, given[device.address]) for device in shown],
        )
        if any(given[device.address] for device in shown):
            output.write_line()
            output.write_line(
                f"{matrix.GIVEN} given by a person, as is what follows from it: pair, quad, NIC and distance"
            )
    elif reason is not None:
        output.write_line(reason + ".")
    else:
        output.write_line("There is no NVIDIA GPU on this machine.")
    if parted:
        output.write_line()
        output.write_table(divided.COLUMNS, [divided.row(gpu) for gpu in parted])
        output.write_line(divided.LEGEND)
        if len(shown) < len(offered):
            output.write_line(f"{len(offered) - len(shown)} places for MIG instances are offered; -o json lists them")
    shares.write()
    output.write_findings((*snapshot.findings, *findings))


class _Shares:
    """The devices that are shared; nothing that takes long is imported where there is none."""

    def __init__(
        self,
        snapshot: model.Snapshot,
        policies: Mapping[PciAddress, rules.Policy],
        entries: Sequence[ledger.Entry] | None,
    ) -> None:
        self._known = entries is not None
        self._found: tuple[sharers.Shared, ...] = ()
        if any(policy.shares for policy in policies.values()):
            from driver.observe import sharers

            self._found = sharers.shared(snapshot, policies=policies, used=sharers.uses(entries or ()))

    def items(self) -> list[dict[str, object]]:
        """For programs."""
        if not self._found:
            return []
        from driver.cli import shared

        return [shared.item(device, known=self._known) for device in self._found]

    def write(self) -> None:
        """For people."""
        if not self._found:
            return
        from driver.cli import shared

        output.write_line()
        output.write_table(shared.COLUMNS, [shared.row(device, known=self._known) for device in self._found])
        output.write_line(shared.LEGEND)


def _has(shown: Sequence[devices.Device], name: str) -> bool:
    return any(name in device.attributes for device in shown)


def _row(device: devices.Device, columns: Sequence[tuple[str, str]], given: frozenset[str]) -> tuple[str, ...]:
    cells = [
        _spell(device.attributes.get(name)) + (matrix.GIVEN if name in given else "")
        if name
        else output.size(device.capacity[attributes.MEMORY])
        for _, name in columns
    ]
    return (device.name, *cells)


def _given(snapshot: model.Snapshot) -> dict[PciAddress, frozenset[str]]:
    """The attributes of each GPU that a person gave."""
    rails = {nic.address: nic.rail_source for nic in snapshot.nics}
    sources = {
        gpu.address: {
            attributes.NUMA_NODE: gpu.pci.numa_source,
            attributes.PCIE_SWITCH: gpu.pci.switch_source,
            attributes.RAIL: rails.get(gpu.nic.address) if gpu.nic is not None else None,
        }
        for gpu in snapshot.gpus
    }
    return {
        address: frozenset(name for name, source in of_gpu.items() if source is model.Provenance.OVERLAY)
        for address, of_gpu in sources.items()
    }


def _spell(value: devices.AttributeValue | None) -> str:
    match value:
        case None:
            return output.MISSING
        case tuple():
            return ",".join(map(str, value))
        case devices.Version(text):
            return text
        case _:
            return str(value)
