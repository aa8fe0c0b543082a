# SPDX-License-Identifier: Apache-2.0
"""`nearfield topo`: how the devices of a machine reach each other."""

from __future__ import annotations

from typing import Any

import click

from discovery import codec, matrix, model, paths
from driver.cli import output, parameters, source


@click.command(
    "topo",
    help="""Show how GPUs and NICs of this machine are wired.

    The matrix is the one of `nvidia-smi topo -m`, read from sysfs and NVML; it works without a GPU and without the NVIDIA
    driver. Odd things found on the way are listed below it.""",
    epilog="""\b
    Examples:
      nearfield topo
      nearfield topo --mock gb200-tray
      nearfield topo -o json | jq '.paths[] | select(.class == "PIX")'
    """,
)
@parameters.add(*source.OPTIONS)
@output.option()
def command(output_format: output.Format, **values: str | None) -> None:
    """Print the matrix, or the document Topology."""
    parsed = source.parse(values)
    snapshot = source.take_snapshot(parsed, source.read_config(parsed))
    if output_format is output.Format.TABLE:
        _write_tables(snapshot)
    else:
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
    if built.rows:
        if not snapshot.gpus:
            output.write_line()
        output.write_table(
            ("", *built.labels, "CPU Affinity", "NUMA Affinity"),
            [
                (
                    row.label,
                    *row.paths,
                    matrix.ranges(row.pci.cpus or ()) or output.MISSING,
                    output.MISSING if row.pci.numa_node is None else str(row.pci.numa_node),
                )
                for row in built.rows
            ],
        )
        output.write_line()
        output.write_line("Legend:")
        for cell, meaning in matrix.LEGEND:
            output.write_line(f"  {cell:<5} {meaning}")
    devices = [(row.label, str(row.pci.address), row.description) for row in built.rows]
    devices += [
        (f"NVMe{index}", str(nvme.address), ", ".join(nvme.controllers) or output.MISSING)
        for index, nvme in enumerate(snapshot.nvmes)
    ]
    if devices:
        output.write_line()
        output.write_line("Devices:")
        for label, address, description in devices:
            output.write_line(f"  {label:<6} {address}  {description}")
    output.write_findings(snapshot.findings)
