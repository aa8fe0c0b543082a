# SPDX-License-Identifier: Apache-2.0
"""The paths between all devices of a Snapshot. Pure.

They follow from the places of the devices and are quadratic in their number, so a Snapshot does not carry them: they are
worked out where somebody looks at them.
"""

from __future__ import annotations

from discovery import findings, model, nvlink, topology


def between_all(snapshot: model.Snapshot) -> tuple[model.Path, ...]:
    """The path of every pair of GPUs, NICs and NVMe controllers, ordered by address; see `model.Path`."""
    return topology.paths(
        topology.endpoints(snapshot.gpus, snapshot.nics, snapshot.nvmes),
        {bridge.pci.address: bridge for bridge in snapshot.bridges},
        nvlink.wiring(snapshot.gpus, findings.Findings()).active,
    )
