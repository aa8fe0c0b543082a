# SPDX-License-Identifier: Apache-2.0
"""Odd NUMA nodes: the ones that nobody tells are tested through the probe; here the one that is told of everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import findings, locality, model
from tests.fakes import wiring
from tests.fakes.wiring import at

NODES = (model.NumaNode(node=0, cpus=(0,)), model.NumaNode(node=1, cpus=(1,)), model.NumaNode(node=2, cpus=()))


def machine(*gpus: model.PciFunction, nodes: tuple[model.NumaNode, ...] = NODES, nic_numa: int = 0) -> model.Snapshot:
    return model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(),
        numa_nodes=nodes,
        gpus=tuple(wiring.gpu(pci.address, pci=pci) for pci in gpus),
        nics=(model.Nic(pci=wiring.function(at(9), numa=nic_numa)),),
    )


def codes(snapshot: model.Snapshot) -> list[str]:
    found = findings.Findings()
    locality.note_alike(snapshot, found)
    return [finding.code for finding in found.result()]


A, B = wiring.function(at(1), root="pci0000:00"), wiring.function(at(2), root="pci0000:80")


def test_one_node_for_everything_is_said() -> None:
    assert codes(machine(A, B)) == ["numa-alike"]


@pytest.mark.parametrize(
    "snapshot",
    [
        machine(A, replace(B, host_bridge=A.host_bridge)),
        machine(A, replace(B, numa_node=1)),
        machine(A, B, nic_numa=1),
        machine(A, replace(B, numa_node=None, numa_source=None)),
        machine(A, replace(B, numa_source=model.Provenance.OVERLAY)),
        machine(A, B, nodes=(NODES[0], NODES[2])),
        machine(A),
        machine(),
    ],
    ids=[
        "one bridge",
        "two nodes",
        "another node of a NIC",
        "unknown",
        "by a person",
        "no other CPUs",
        "one GPU",
        "none",
    ],
)
def test_otherwise_it_is_not(snapshot: model.Snapshot) -> None:
    assert codes(snapshot) == []
