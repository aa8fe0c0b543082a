# SPDX-License-Identifier: Apache-2.0
"""From a Snapshot to devices.

Aspects: the whole device of a complete GPU; keys that are unknown; descriptions that are; versions; long strings; list
forms; addresses without a standard spelling; who is not offered; the number of attributes. For their order see test_ordering.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from discovery.address import HostBridge, PciAddress
from driver.publish import attributes, devices, limits, slices, wanted
from tests.fakes import publishing

OPTIONS = publishing.OPTIONS
ALL_LISTS = replace(OPTIONS, numa_list=True, pcie_switches=True)

NIC = model.NicPairing(address=publishing.at(0x18), distance=model.PathClass.PIX, name="mlx5_0", rail=0)
COMPLETE = publishing.gpu(
    0x1B,
    pci={
        "switch": publishing.at(0x19),
        "switches": (publishing.at(0x19), publishing.at(0x15)),
        "cpu_socket": 0,
        "pcie_root": HostBridge("pci0000:15"),
    },
    fabric=model.Fabric(state="completed", cluster_uuid="3f1c9a52-0000-4000-8000-000000000001", clique_id=7),
    groups=model.GpuGroups(
        nvlink_domain=publishing.at(0x1B),
        nvlink_clique=publishing.at(0x1B),
        aligned_pair=publishing.at(0x1B),
        aligned_quad=publishing.at(0x1B),
    ),
    nic=NIC,
)


def only(snapshot: model.Snapshot, options: devices.PublishOptions = OPTIONS) -> devices.Device:
    (device,) = devices.build_devices(snapshot, options=options)
    return device


def test_a_complete_gpu_says_everything_of_itself() -> None:
    snapshot = publishing.snapshot(COMPLETE, nics=(model.Nic(pci=COMPLETE.pci),))
    assert only(snapshot) == devices.Device(
        name="gpu-0000-1b-00-0",
        address=publishing.at(0x1B),
        attributes={
            "alignedPair": "0000:1b:00.0",
            "alignedQuad": "0000:1b:00.0",
            "architecture": "Hopper",
            "computeEnforcement": "whole",
            "cpuSocket": 0,
            "cudaComputeCapability": devices.Version("9.0.0"),
            "cudaDriverVersion": devices.Version("13.0.0"),
            "driverVersion": devices.Version("580.65.6"),
            "fabricClique": "3f1c9a52-0000-4000-8000-000000000001.7",
            "memoryEnforcement": "whole",
            "nic": "mlx5_0",
            "nicDistance": "PIX",
            "nicPciBusID": "0000:18:00.0",
            "nvlinkClique": "0000:1b:00.0",
            "nvlinkDomain": "0000:1b:00.0",
            "pcieSwitch": "0000:19:00.0",
            "productName": "NVIDIA H100 80GB HBM3",
            "rail": 0,
            "resource.kubernetes.io/numaNode": 0,
            "resource.kubernetes.io/pciBusID": "0000:1b:00.0",
            "resource.kubernetes.io/pcieRoot": "pci0000:15",
            "type": "gpu",
            "uuid": "GPU-0000001b-0000-0000-0000-000000000000",
        },
        capacity={"compute": 100, "memory": 81559 << 20, "multiprocessors": 132},
    )


def test_at_most_28_of_the_32_attributes_and_capacities_are_used() -> None:
    device = only(publishing.snapshot(COMPLETE), ALL_LISTS)
    assert len(device.attributes) + len(device.capacity) <= 28
    assert attributes.PCIE_SWITCHES in device.attributes


def test_what_is_unknown_to_match_on_is_left_out_and_what_describes_is_there() -> None:
    bare = publishing.gpu(0x1B, pci={"numa_node": None, "pcie_root": None}, multiprocessors=None)
    device = only(publishing.snapshot(bare))
    assert set(device.attributes) == {*attributes.DESCRIPTIONS, attributes.PCI_BUS_ID}
    assert device.attributes["nicDistance"] == "NONE"
    assert set(device.capacity) == {"compute", "memory"}


def test_whether_its_nic_has_the_name_of_an_rdma_device() -> None:
    pci = replace(COMPLETE.pci, address=publishing.at(0x18))
    plain = model.Nic(pci=pci, interfaces=(model.NetworkInterface(name="eth0"),))
    rdma = replace(plain, rdma_devices=(model.RdmaDevice(name="mlx5_0"),))
    assert not only(publishing.snapshot(COMPLETE, nics=(plain,))).nic_is_rdma
    assert only(publishing.snapshot(COMPLETE, nics=(rdma,))).nic_is_rdma


def test_a_gpu_without_a_known_path_to_the_nics_is_at_an_unknown_distance() -> None:
    nic = model.Nic(pci=replace(COMPLETE.pci, address=publishing.at(0x18)))
    device = only(publishing.snapshot(publishing.gpu(0x1B), nics=(nic,)))
    assert device.attributes["nicDistance"] == "UNKNOWN"
    assert attributes.NIC_PCI_BUS_ID not in device.attributes


def test_an_unknown_architecture_is_no_reason_to_keep_a_gpu_back() -> None:
    device = only(publishing.snapshot(publishing.gpu(0x1B, architecture=None)))
    assert device.attributes["architecture"] == "UNKNOWN"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"compute_capability": None}, "cudaComputeCapability"),
        ({"memory_bytes": None}, "memory"),
        ({"uuid": None}, "uuid"),
        ({"product": ""}, "productName"),
    ],
)
def test_a_gpu_that_cannot_be_described_is_not_offered_and_the_reason_is_said(
    changes: dict[str, Any], name: str
) -> None:
    offer = devices.build_offer(
        publishing.snapshot(publishing.gpu(0x1B, **changes), publishing.gpu(0x43)), options=OPTIONS
    )
    assert publishing.names(offer.devices) == ["gpu-0000-43-00-0"]
    (finding,) = offer.findings
    assert (finding.code, finding.subject) == ("gpu-not-described", "0000:1b:00.0")
    assert name in finding.message


@pytest.mark.parametrize(
    "driver", [None, model.NvidiaDriver(version="580.65.06"), model.NvidiaDriver(version="x", cuda_version=(13, 0))]
)
def test_versions_of_the_driver_are_descriptions_too(driver: model.NvidiaDriver | None) -> None:
    assert devices.build_devices(publishing.snapshot(COMPLETE, nvidia_driver=driver), options=OPTIONS) == ()


@pytest.mark.parametrize("state", [state for state in model.GpuState if state is not model.GpuState.READY])
def test_a_gpu_that_is_not_ready_is_not_offered(state: model.GpuState) -> None:
    assert devices.build_devices(publishing.snapshot(publishing.gpu(0x1B, state=state)), options=OPTIONS) == ()


def test_a_gpu_in_mig_mode_is_not_a_whole_gpu() -> None:
    split = publishing.gpu(0x1B, mig_mode=model.MigMode(current=True, pending=True))
    offer = devices.build_offer(publishing.snapshot(split), options=OPTIONS)
    assert offer.devices == ()
    assert offer.findings[0].code == "mig-enabled"
    ready = publishing.gpu(0x1B, mig_mode=model.MigMode(current=False, pending=True))
    assert only(publishing.snapshot(ready)).name == "gpu-0000-1b-00-0"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.65.06", "580.65.6"),
        ("580.65", "580.65.0"),
        ("580", "580.0.0"),
        ("550.54.14.01", "550.54.14+01"),
        ("610.00-beta", "610.0.0+beta"),
        (" 580.65.06\n", "580.65.6"),
        ("580.65.06 (open)", "580.65.6+open"),
        ("", None),
        ("open", None),
        ("9" * 30, None),
        ("1.2.3." + "a" * 80, None),
    ],
)
def test_a_driver_version_becomes_a_strict_one(text: str, version: str | None) -> None:
    assert devices.semver(text) == (devices.Version(version) if version is not None else None)


def test_a_long_string_is_cut_between_characters_with_a_finding() -> None:
    offer = devices.build_offer(publishing.snapshot(publishing.gpu(0x1B, product="x" + "ä" * 40)), options=OPTIONS)
    assert offer.devices[0].attributes["productName"] == "x" + "ä" * 31
    assert [finding.code for finding in offer.findings] == ["attribute-cut"]


@given(st.text(max_size=100))
def test_whatever_is_cut_fits(text: str) -> None:
    assert len(devices.cut(text).encode()) <= 64


def test_a_domain_of_five_digits_has_no_standard_spelling() -> None:
    hidden = publishing.gpu(
        0x1B, pci={"address": PciAddress(0x10000, 0xE1, 0, 0), "pcie_root": HostBridge("pci10000:e0")}
    )
    device = only(publishing.snapshot(hidden))
    assert device.name == "gpu-10000-e1-00-0"
    assert attributes.PCI_BUS_ID not in device.attributes
    assert attributes.PCIE_ROOT not in device.attributes


@pytest.mark.parametrize("node", [-1, 1024])
def test_a_numa_node_that_cannot_be_is_left_out(node: int) -> None:
    device = only(publishing.snapshot(publishing.gpu(0x1B, pci={"numa_node": node})))
    assert attributes.NUMA_NODE not in device.attributes


@pytest.mark.parametrize(
    "fabric",
    [
        model.Fabric(state="in_progress", cluster_uuid="3f1c", clique_id=1),
        model.Fabric(state="completed", cluster_uuid="3f1c", clique_id=None),
        model.Fabric(state="completed", cluster_uuid=None, clique_id=1),
        model.Fabric(state="completed", cluster_uuid="00000000-0000-0000-0000-000000000000", clique_id=0),
    ],
)
def test_a_fabric_clique_exists_once_registration_is_completed(fabric: model.Fabric) -> None:
    device = only(publishing.snapshot(publishing.gpu(0x1B, fabric=fabric)))
    assert attributes.FABRIC_CLIQUE not in device.attributes


NODES = tuple(
    model.NumaNode(node=node, cpus=(node,) if node < 4 else (), distances=distances)
    for node, distances in enumerate(
        [
            {0: 10, 1: 12, 2: 12, 3: 32, 4: 12},
            {0: 12, 1: 10, 2: 32, 3: 32, 4: 32},
            {0: 12, 1: 32, 2: 10, 3: 12, 4: 32},
            {0: 32, 1: 32, 2: 12, 3: 10, 4: 32},
            {},
        ]
    )
)
"""Sockets: CPUs 0 and 1 on one, 2 and 3 on the other; node 4 has memory only."""


@pytest.mark.parametrize(("node", "near"), [(0, (0, 1, 4)), (1, (1, 0)), (2, (2, 3)), (4, (4,)), (9, (9,))])
def test_the_list_form_holds_the_nearest_nodes_of_the_socket(node: int, near: tuple[int, ...]) -> None:
    snapshot = publishing.snapshot(
        publishing.gpu(0x1B, pci={"numa_node": node}),
        numa_nodes=NODES,
        host=model.Host(sockets={0: (0, 1), 1: (2, 3)}),
    )
    assert only(snapshot, ALL_LISTS).attributes[attributes.NUMA_NODE] == near


def test_the_slices_of_a_made_up_node_pass_every_limit() -> None:
    place = slices.Place(driver_name="gpu.nearfield.dev", node_name="n1", node_uid="u")
    for options in (OPTIONS, ALL_LISTS):
        offered = devices.build_devices(
            publishing.snapshot(COMPLETE, publishing.gpu(1), publishing.gpu(2)), options=options
        )
        assert limits.violations(slices.build_slices(offered, place=place)) == ()


def test_a_node_without_gpus_offers_an_empty_pool_and_one_with_dead_ones_nothing() -> None:
    assert wanted.from_snapshot(publishing.snapshot(), options=OPTIONS) == wanted.Offering(
        offer=devices.Offer(devices=())
    )
    dead = publishing.gpu(0x1B, state=model.GpuState.NO_DRIVER, state_reason="no driver is bound to it")
    withheld = wanted.from_snapshot(publishing.snapshot(dead), options=OPTIONS)
    assert isinstance(withheld, wanted.Withheld)
    assert withheld.reason == (
        "None of the 1 NVIDIA GPUs of this node can be offered (1 no-driver): no driver is bound to it"
    )
    assert isinstance(wanted.from_snapshot(None, options=OPTIONS), wanted.Undecided)
