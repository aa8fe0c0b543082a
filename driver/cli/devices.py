# SPDX-License-Identifier: Apache-2.0
"""`nearfield devices`: the devices of a machine as claims see them."""

from __future__ import annotations

import click

from discovery import matrix, model
from discovery.address import PciAddress
from driver.cli import offer, output, parameters, source
from driver.publish import attributes, devices, wire

COLUMNS: tuple[tuple[str, str], ...] = (
    ("PRODUCT", attributes.PRODUCT_NAME),
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
    is listed below. NUMA nodes, switches and rails that a person gave are marked with a *.""",
    epilog="""\b
    Examples:
      nearfield devices
      nearfield devices --mock dgx-h100 -o json | jq '.items[].attributes.alignedPair.string'
    """,
)
@parameters.add(*source.OPTIONS)
@output.option()
def command(output_format: output.Format, **values: str | None) -> None:
    """List the devices."""
    parsed = source.parse(values)
    agent = source.read_config(parsed)
    snapshot = source.take_snapshot(parsed, agent)
    offered, reason, findings = offer.offered(offer.build(snapshot, parsed, agent))
    if output_format is not output.Format.TABLE:
        items = [
            {"address": str(device.address), **wire.device_to_json(device, driver_name=parsed["driver_name"])}
            for device in offered
        ]
        output.write_document(output.items("DeviceList", items), output_format)
        return
    if offered:
        given = _given(snapshot)
        output.write_table(
            ("DEVICE", *(head for head, _ in COLUMNS)), [_row(device, given[device.address]) for device in offered]
        )
        if any(given[device.address] for device in offered):
            output.write_line()
            output.write_line(
                f"{matrix.GIVEN} given by a person, as is what follows from it: pair, quad, NIC and distance"
            )
    elif reason is not None:
        output.write_line(reason + ".")
    else:
        output.write_line("There is no NVIDIA GPU on this machine.")
    output.write_findings((*snapshot.findings, *findings))


def _row(device: devices.Device, given: frozenset[str]) -> tuple[str, ...]:
    cells = [_spell(device.attributes.get(name)) + (matrix.GIVEN if name in given else "") for _, name in COLUMNS]
    cells[1] = output.size(device.capacity[attributes.MEMORY])
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
