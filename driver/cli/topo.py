# SPDX-License-Identifier: Apache-2.0
"""`nearfield topo`: how the devices of a machine reach each other."""

from __future__ import annotations

from typing import Any

import click

from discovery import codec, matrix, model, nccltopo, paths
from discovery.address import PciAddress
from driver.cli import output, parameters, source


@click.command(
    "topo",
    help="""Show how GPUs, NICs and NVMe controllers of this machine are wired.

    The matrix is the one of `nvidia-smi topo -m`, with the NVMe controllers below it, read from sysfs and NVML; it works without
    a GPU and without the NVIDIA driver. Odd things found on the way are listed below it. What --overlay gives is marked with a *.

    With -o nccl-xml it is written as NCCL reads it from the file that NCCL_TOPO_FILE names.""",
    epilog="""\b
    Examples:
      nearfield topo
      nearfield topo --mock gb200-tray
      nearfield topo -o json | jq '.paths[] | select(.class == "PIX")'
      nearfield topo --overlay ndv4-topo.xml
      nearfield topo -o nccl-xml > topo.xml
    """,
)
@parameters.add(*source.OPTIONS)
@output.option(
    formats=(*output.USUAL, output.Format.NCCL_XML),
    help_text="A table for people, JSON or YAML for programs, a topology file for NCCL.",
)
def command(output_format: output.Format, **values: str | None) -> None:
    """Print the matrix, the document Topology, or a NCCL topology."""
    parsed = source.parse(values)
    snapshot = source.take_snapshot(parsed, source.read_config(parsed))
    match output_format:
        case output.Format.TABLE:
            _write_tables(snapshot)
        case output.Format.NCCL_XML:
            output.write_text(nccltopo.build(snapshot))
            for finding in snapshot.findings:  # the form has no place for them
                if finding.severity is model.Severity.ERROR:
                    click.echo(f"{finding.severity}: {output.clean(f'{finding.subject}: {finding.message}')}", err=True)
        case _:
            output.write_document(build_document(snapshot), output_format)


def build_document(snapshot: model.Snapshot) -> dict[str, object]:
    """The document Topology (docs/output.md)."""
    whole = codec.to_json(snapshot)
    return output.document(
        "Topology",
        {
            "origin": whole["origin"],
            "host": whole["host"],
            **({"nvidiaDriver": whole["nvidiaDriver"]} if "nvidiaDriver" in whole else {}),
            "numaNodes": whole.get("numaNodes", []),
            "bridges": [_flat(bridge) for bridge in whole.get("bridges", [])],
            "gpus": [_flat(device) for device in whole.get("gpus", [])],
            "nics": [_flat(device) for device in whole.get("nics", [])],
            "nvswitches": whole.get("nvswitches", []),
            "nvmes": [_flat(device) for device in whole.get("nvmes", [])],
            "paths": [
                {
                    "a": str(path.a),
                    "b": str(path.b),
                    "class": path.path_class.value,
                    "nvlinks": path.nvlinks,
                    **({} if path.direct is None else {"direct": path.direct}),
                }
                for path in paths.between_all(snapshot)
            ],
            "findings": whole.get("findings", []),
        },
    )


def _flat(device: dict[str, Any]) -> dict[str, Any]:
    """A device with the facts of its PCI function beside its own, the address first."""
    return {**device["pci"], **{key: value for key, value in device.items() if key != "pci"}}


def _write_tables(snapshot: model.Snapshot) -> None:
    built = matrix.build(snapshot)
    if not snapshot.gpus:
        output.write_line("There is no NVIDIA GPU on this machine.")
    if built.labels:
        if not snapshot.gpus:
            output.write_line()
        output.write_table(
            ("", *built.labels, "CPU Affinity", "NUMA Affinity"),
            [
                (
                    row.label,
                    *row.paths,
                    matrix.ranges(row.pci.cpus or ()) or output.MISSING,
                    matrix.node(row.pci) or output.MISSING,
                )
                for row in built.rows
            ],
        )
        output.write_line()
        output.write_line("Legend:")
        for cell, meaning in matrix.LEGEND:
            output.write_line(f"  {cell:<5} {meaning}")
    rails = {nic.address: nic.rail for nic in snapshot.nics if nic.rail_source is model.Provenance.OVERLAY}
    given = {row.pci.address: _given(row.pci, rails.get(row.pci.address)) for row in built.rows}
    if built.labels and any(given.values()):
        output.write_line(f"  {matrix.GIVEN:<5} {matrix.GIVEN_MEANING}")
    management = {nic.address for nic in snapshot.nics if nic.management}
    if built.rows:
        output.write_line()
        output.write_line("Devices:")
    for row in built.rows:
        route = ", default route" if row.pci.address in management else ""
        output.write_line(
            f"  {row.label:<6} {row.pci.address}  {row.description}{route}{_marked(given[row.pci.address])}"
        )
    output.write_findings(snapshot.findings)


def _given(pci: model.PciFunction, rail: int | None) -> tuple[str, ...]:
    """What a person said about a device."""
    return (
        *((f"NUMA node {pci.numa_node}",) if pci.numa_source is model.Provenance.OVERLAY else ()),
        *((f"switch {_switches(pci.switches)}",) if pci.switch_source is model.Provenance.OVERLAY else ()),
        *((f"rail {rail}",) if rail is not None else ()),
    )


def _switches(groups: tuple[PciAddress, ...]) -> str:
    return " in ".join(map(str, groups))


def _marked(given: tuple[str, ...]) -> str:
    return f"  {matrix.GIVEN} {', '.join(given)}" if given else ""
