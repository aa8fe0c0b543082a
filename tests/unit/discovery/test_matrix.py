# SPDX-License-Identifier: Apache-2.0
"""The matrix of paths.

- labels in order, GPUs before NICs; NVLink before the path class; unknown is said; both halves agree
- how an NVMe controller reaches GPUs and NICs stands below them
- a NIC is described by its RDMA devices and interfaces, a sick GPU by its state
- virtual functions stand with their physical one
- CPU lists in the kernel's spelling
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from discovery import address, matrix, model

A, B, C, D, E = (address.parse(f"0000:{bus:02x}:00.0") for bus in range(1, 6))


def function(place: address.PciAddress, *, root: str = "pci0000:00", numa: int | None = None) -> model.PciFunction:
    return model.PciFunction(
        address=place,
        vendor_id=0x10DE,
        device_id=0x2330,
        class_code=0x030200,
        host_bridge=address.HostBridge(root),
        numa_node=numa,
    )


def gpu(place: address.PciAddress, state: model.GpuState = model.GpuState.READY) -> model.Gpu:
    return model.Gpu(pci=function(place), state=state, product="NVIDIA H100")


def snapshot(**parts: tuple[object, ...]) -> model.Snapshot:
    return model.Snapshot(origin=model.Origin.RECORDING, taken_at=0, host=model.Host(), **parts)  # type: ignore[arg-type]


def test_gpus_and_nics_against_each_other() -> None:
    links = tuple(model.NvLink(link=link, active=True, remote=B) for link in range(2))
    back = tuple(model.NvLink(link=link, active=True, remote=A) for link in range(2))
    first = model.Gpu(pci=function(A, numa=0), state=model.GpuState.READY, product="NVIDIA H100", nvlinks=links)
    other = model.Gpu(pci=function(B, root="pci0000:80", numa=1), state=model.GpuState.READY, nvlinks=back)
    third = model.Gpu(pci=function(D, root="pci0000:c0"), state=model.GpuState.VFIO, product="NVIDIA H100")
    built = matrix.build(snapshot(gpus=(first, other, third), nics=(model.Nic(pci=function(C, numa=0)),)))
    assert built.labels == ("GPU0", "GPU1", "GPU2", "NIC0")
    assert [row.paths for row in built.rows] == [
        ("X", "NV2", "?", "PHB"),
        ("NV2", "X", "?", "SYS"),
        ("?", "?", "X", "?"),
        ("PHB", "SYS", "?", "X"),
    ]
    assert [row.description for row in built.rows] == [
        "NVIDIA H100", "NVIDIA device 2330", "NVIDIA H100 (vfio)", "device 10de:2330",
    ]  # fmt: skip


def test_nvme_controllers_stand_below_and_have_no_columns() -> None:
    nvmes = (
        model.Nvme(pci=function(B, numa=0), controllers=("nvme0",)),
        model.Nvme(pci=function(D, root="pci0000:80")),
        model.Nvme(pci=replace(function(E), physical_function=D)),
    )
    near = model.Gpu(pci=function(A, numa=0), state=model.GpuState.READY)
    built = matrix.build(
        snapshot(gpus=(near,), nics=(model.Nic(pci=function(C, root="pci0000:40", numa=0)),), nvmes=nvmes)
    )
    assert built.labels == ("GPU0", "NIC0")
    assert [(row.label, row.paths, row.description) for row in built.rows[2:]] == [
        ("NVMe0", ("PHB", "NODE"), "nvme0"),
        ("NVMe1", ("?", "?"), "device 10de:2330, 1 virtual function"),
    ]


def test_a_machine_without_devices_has_an_empty_matrix() -> None:
    assert matrix.build(snapshot()) == matrix.Matrix(labels=(), rows=())


def test_a_nic_is_described_by_its_names() -> None:
    nic = model.Nic(
        pci=function(C),
        rdma_devices=(model.RdmaDevice(name="mlx5_0"),),
        interfaces=(model.NetworkInterface(name="ens1"), model.NetworkInterface(name="ens1")),
    )
    (row,) = matrix.build(snapshot(nics=(nic,))).rows
    assert (row.label, row.description) == ("NIC0", "mlx5_0, ens1")


def test_a_nic_says_where_its_data_direct_function_is_and_whom_that_is_near() -> None:
    nic = model.Nic(pci=function(C), data_direct=function(D))
    pairing = model.NicPairing(address=C, distance=model.PathClass.PXB, data_direct=D)
    rows = matrix.build(snapshot(gpus=(gpu(A), replace(gpu(B), nic=pairing)), nics=(nic,))).rows
    assert rows[2].description == "device 10de:2330, Data Direct 0000:04:00.0 (PXB to GPU1)"
    (row,) = matrix.build(snapshot(nics=(nic,))).rows
    assert row.description == "device 10de:2330, Data Direct 0000:04:00.0"


def test_virtual_functions_stand_with_their_physical_one() -> None:
    def virtual(place: address.PciAddress, physical: address.PciAddress) -> model.Nic:
        return model.Nic(pci=replace(function(place), physical_function=physical))

    elsewhere = address.parse("0000:aa:00.0")
    nics = (model.Nic(pci=function(A)), virtual(B, A), virtual(C, elsewhere))
    built = matrix.build(snapshot(nics=nics))
    assert [(row.label, row.pci.address, row.paths) for row in built.rows] == [
        ("NIC0", A, ("X", "PHB")),
        ("NIC1", C, ("PHB", "X")),
    ]
    assert built.rows[0].description == "device 10de:2330, 1 virtual function"


def test_the_legend_explains_every_cell() -> None:
    spelt = {cell for cell, _ in matrix.LEGEND}
    assert spelt == {"X", "NV#", "?", *(set(model.PathClass) - {model.PathClass.UNKNOWN})}


def test_what_a_person_said_of_a_place_is_marked() -> None:
    pci = replace(function(A, numa=3), switch=B, switches=(B,))
    assert (matrix.node(pci), matrix.switch(pci), matrix.is_given(pci)) == ("3", str(B), False)
    source = model.Provenance.OVERLAY
    assert matrix.node(replace(pci, numa_source=source)) == "3*"
    assert matrix.switch(replace(pci, switch_source=source)) == f"{B}*"
    assert matrix.is_given(replace(pci, switch_source=source))
    nic = model.Nic(pci=pci, rail=2)
    assert (matrix.rail(nic), matrix.rail(replace(nic, rail_source=source)), matrix.rail(model.Nic(pci=pci))) == (
        "2",
        "2*",
        None,
    )
    nowhere = function(A)
    assert (matrix.node(nowhere), matrix.switch(nowhere), matrix.is_given(nowhere)) == (None, None, False)


def test_ranges() -> None:
    assert matrix.ranges([]) == ""
    assert matrix.ranges([5]) == "5"
    assert matrix.ranges([3, 1, 2, 8, 10, 11]) == "1-3,8,10-11"


@given(st.sets(st.integers(0, 300)))
def test_ranges_lose_no_cpu(cpus: set[int]) -> None:
    read: set[int] = set()
    for part in filter(None, matrix.ranges(cpus).split(",")):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == cpus
