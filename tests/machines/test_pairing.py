# SPDX-License-Identifier: Apache-2.0
"""GPUs and NICs of real machines: what stays when a NIC is gone, and which ways are direct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from discovery import findings, model, options, paths, probe
from discovery.address import PciAddress, parse

Seen = Mapping[str, model.Snapshot]


def without(snapshot: model.Snapshot, nic: PciAddress) -> Mapping[PciAddress, model.NicPairing | None]:
    """The pairings of a machine from whose bus a NIC is gone."""
    left = replace(snapshot, nics=tuple(own for own in snapshot.nics if own.address != nic))
    return {gpu.address: gpu.nic for gpu in probe.annotate(left, options.ProbeOptions(), findings.Findings()).gpus}


@pytest.mark.parametrize("bus", ["18", "40", "4f", "5e", "9a", "c0", "ce", "dc"])
def test_a_dgx_h100_that_lost_a_nic_gives_its_gpu_a_fast_one_and_leaves_the_others_alone(seen: Seen, bus: str) -> None:
    machine, gone = seen["dgx-h100"], parse(f"0000:{bus}:00.0")
    now = without(machine, gone)
    for gpu in machine.gpus:
        assert gpu.nic is not None
        other = now[gpu.address]
        assert other is not None
        if gpu.nic.address != gone:
            assert (other.address, other.distance) == (gpu.nic.address, gpu.nic.distance)
            continue
        (card,) = [nic for nic in machine.nics if nic.address == other.address]
        assert card.pci.link is not None
        assert card.pci.link.max_width == 16  # not the port of the mainboard, which is as near


def directly(snapshot: model.Snapshot, a: str, b: str) -> bool | None:
    (path,) = [path for path in paths.between_all(snapshot) if {str(path.a), str(path.b)} == {a, b}]
    return path.direct


def test_ways_that_stay_below_a_host_bridge(seen: Seen) -> None:
    machine = seen["dgx-h100"]
    assert directly(machine, "0000:18:00.0", "0000:1b:00.0") is True
    assert directly(machine, "0000:1b:00.0", "0000:43:00.0") is False
    assert {gpu.nic.direct for gpu in machine.gpus if gpu.nic} == {True}


def test_a_data_direct_function_is_direct_where_its_nic_is_not(seen: Seen) -> None:
    """The ports of GB300 redirect, as with an IOMMU, but those above its DMA functions do not."""
    machine = seen["gb300-tray"]
    for gpu in machine.gpus:
        assert gpu.nic is not None
        assert gpu.nic.data_direct is not None
        assert directly(machine, str(gpu.address), str(gpu.nic.address)) is False
        assert (gpu.nic.distance, gpu.nic.direct) == (model.PathClass.PXB, True)
