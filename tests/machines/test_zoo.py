# SPDX-License-Identifier: Apache-2.0
"""Every machine of the zoo, seen through the same probe as a real node.

- it is consistent: links lead somewhere, the prober finds no contradiction, NVML and sysfs agree
- it is the machine it claims to be: the published facts, as this probe sees them
"""

from __future__ import annotations

import gzip
import posixpath
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import model, options, paths, probe, sysfs
from discovery.address import parse
from discovery.errors import DocumentError
from discovery.mock import library, recording, render, zoo
from discovery.mock.recording import Tree


class Seen(dict[str, model.Snapshot]):
    """What the prober sees of each machine, looked at when first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> model.Snapshot:
        tree = render.render(zoo.load(name), self._factory.mktemp(name))
        machine = probe.Machine(
            files=sysfs.Sysfs(sys=tree.sys, proc=tree.proc),
            dev=tree.dev,
            library=library.Library(tree.directory),
            origin=model.Origin.RECORDING,
            options=options.ProbeOptions(),
            clock=lambda: 0.0,
        )
        try:
            return self.setdefault(name, machine.probe())
        finally:
            machine.close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory)


ALL = pytest.mark.parametrize("name", zoo.names())


@ALL
def test_every_link_of_a_machine_leads_to_something_recorded(name: str) -> None:
    files = zoo.load(name).files
    tree = Tree(files)
    directories = {posixpath.dirname(path) for path in files}
    directories |= {above for path in directories for above in _above(path)}
    dangling = {
        path: tree.resolve(path)
        for path, entry in files.items()
        if isinstance(entry, recording.Link) and tree.resolve(path) not in directories | files.keys()
    }
    assert dangling == {}


def _above(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


@ALL
def test_the_prober_finds_no_contradiction(name: str, seen: Seen) -> None:
    findings = seen[name].findings
    assert [finding for finding in findings if finding.severity is model.Severity.ERROR] == []
    unexpected = {finding.code for finding in findings} - {"numa-unknown"}
    assert unexpected == set()


@ALL
def test_every_gpu_is_ready_and_complete(name: str, seen: Seen) -> None:
    for gpu in seen[name].gpus:
        assert gpu.state is model.GpuState.READY
        facts = (gpu.uuid, gpu.product, gpu.memory_bytes, gpu.minor, gpu.multiprocessors, gpu.architecture)
        assert None not in facts
        assert gpu.compute_capability is not None
    minors = [gpu.minor for gpu in seen[name].gpus]
    assert sorted(number for number in minors if number is not None) == list(range(len(minors)))


@ALL
def test_nvml_and_sysfs_name_the_same_hardware(name: str) -> None:
    machine = zoo.load(name)
    assert machine.nvml is not None
    tree = Tree(machine.files)
    for gpu in machine.nvml.gpus:
        here = tree.function(gpu.pci)
        ids = [
            int(tree.text(f"{here}/{file}") or "0", 16)
            for file in ("vendor", "device", "subsystem_vendor", "subsystem_device")
        ]
        assert [
            gpu.pci_device_id & 0xFFFF,
            gpu.pci_device_id >> 16,
            gpu.pci_subsystem_id & 0xFFFF,
            gpu.pci_subsystem_id >> 16,
        ] == ids
        assert f"GPU UUID:      \t {gpu.uuid}\n" in str(machine.files[f"proc/driver/nvidia/gpus/{gpu.pci}/information"])
        assert f"dev/nvidia{gpu.minor}" in machine.files
        assert tree.text(f"{here}/current_link_width") == (None if gpu.pcie is None else str(gpu.pcie.width))


@ALL
def test_distances_between_nodes_are_the_same_both_ways(name: str, seen: Seen) -> None:
    nodes = {node.node: node.distances for node in seen[name].numa_nodes}
    for a, row in nodes.items():
        assert row.keys() == nodes.keys()
        assert row[a] == 10
        assert all(nodes[b][a] == distance for b, distance in row.items())


@ALL
def test_a_machine_reads_back_from_a_file(name: str, tmp_path: Path) -> None:
    machine = zoo.load(name)
    packed, plain, described = tmp_path / "m.json.gz", tmp_path / "m.json", tmp_path / "m.yaml"
    packed.write_bytes(gzip.compress(recording.dump(machine)))
    plain.write_bytes(recording.dump(machine))
    described.write_text(zoo.text(name))
    assert zoo.load(str(packed)) == zoo.load(str(plain)) == zoo.load(str(described)) == machine


@ALL
def test_a_machine_says_what_it_is(name: str) -> None:
    assert zoo.describe(name)
    assert "apiVersion: mock.nearfield.dev/v1alpha1" in zoo.text(name)


def test_the_zoo_names_its_machines() -> None:
    assert zoo.names() == ("dgx-h100", "gb200-tray", "l40s-8-pcie", "workstation-rtx")
    for ask in (zoo.load, zoo.describe, zoo.text):
        with pytest.raises(DocumentError, match="dgx-h100, gb200-tray"):
            ask("dgx-h1000")


def _paths(snapshot: model.Snapshot) -> dict[frozenset[str], model.Path]:
    return {frozenset((str(path.a), str(path.b))): path for path in paths.between_all(snapshot)}


def test_dgx_h100(seen: Seen) -> None:
    """DGX H100/H200 User Guide, network modules; `nvidia-smi topo -m` of such systems: PXB to the own NIC, NV18 to all."""
    machine = seen["dgx-h100"]
    gpus = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
    nics = ["18", "40", "4f", "5e", "9a", "c0", "ce", "dc"]
    rdma = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    interfaces = ["ibp24s0", "ibp64s0", "ibp79s0", "ibp94s0", "ibp154s0", "ibp192s0", "ibp206s0", "ibp220s0"]
    assert [str(gpu.address) for gpu in machine.gpus] == [f"0000:{bus}:00.0" for bus in gpus]
    assert [gpu.pci.numa_node for gpu in machine.gpus] == [0] * 4 + [1] * 4
    by_address = {str(nic.address): nic for nic in machine.nics}
    for bus, device, interface in zip(nics, rdma, interfaces, strict=True):
        nic = by_address[f"0000:{bus}:00.0"]
        assert (nic.name, nic.interfaces[0].name) == (device, interface)
        assert nic.rdma_devices[0].ports[0].rate_mbps == 400_000
    known = _paths(machine)
    for gpu_bus, nic_bus in zip(gpus, nics, strict=True):
        path = known[frozenset((f"0000:{gpu_bus}:00.0", f"0000:{nic_bus}:00.0"))]
        assert path.path_class is model.PathClass.PXB
    between = [known[frozenset((f"0000:{a}:00.0", f"0000:{b}:00.0"))] for a in gpus for b in gpus if a < b]
    assert {path.nvlinks for path in between} == {18}
    assert Counter(path.path_class for path in between) == {model.PathClass.NODE: 12, model.PathClass.SYS: 16}
    assert len(machine.nvswitches) == 4
    assert len({nic.address for nic in machine.nics if nic.rdma_devices}) == 8 + 2 * 2
    assert len(machine.nvmes) == 10
    assert [len(cpus) for cpus in machine.host.sockets.values()] == [112, 112]
    assert {gpu.groups.nvlink_domain for gpu in machine.gpus} == {parse("0000:1b:00.0")}
    assert {link.remote_kind for gpu in machine.gpus for link in gpu.nvlinks} == {model.RemoteKind.SWITCH}


def test_l40s_8_pcie(seen: Seen) -> None:
    machine = seen["l40s-8-pcie"]
    assert {gpu.product for gpu in machine.gpus} == {"NVIDIA L40S"}
    assert len(machine.gpus) == 8
    assert all(gpu.nvlinks == () and gpu.fabric is None and gpu.mig_mode is None for gpu in machine.gpus)
    assert {gpu.multiprocessors for gpu in machine.gpus} == {142}
    classes = Counter(
        path.path_class
        for path in paths.between_all(machine)
        if {path.a, path.b} <= {gpu.address for gpu in machine.gpus}
    )
    assert classes == {model.PathClass.PIX: 4, model.PathClass.NODE: 8, model.PathClass.SYS: 16}
    assert [gpu.nic.distance for gpu in machine.gpus if gpu.nic] == [model.PathClass.PIX] * 8


def test_gb200_tray(seen: Seen) -> None:
    """GPUs alone in their PCI domains, their memory as NUMA nodes, NVLinks to switches outside, a completed fabric."""
    machine = seen["gb200-tray"]
    assert [str(gpu.address) for gpu in machine.gpus] == [
        f"{domain}:01:00.0" for domain in ("0008", "0009", "0018", "0019")
    ]
    assert [gpu.pci.numa_node for gpu in machine.gpus] == [0, 0, 1, 1]
    assert [gpu.pci.switches for gpu in machine.gpus] == [()] * 4
    assert [node.node for node in machine.numa_nodes] == list(range(34))
    with_memory = [node.node for node in machine.numa_nodes if node.memory_bytes and not node.cpus]
    assert with_memory == [2, 10, 18, 26]
    assert machine.numa_nodes[0].distances[2] == 80
    assert machine.numa_nodes[0].distances[18] == 120
    assert machine.numa_nodes[2].distances[3] == 11
    for gpu in machine.gpus:
        assert [link.remote for link in gpu.nvlinks] == [None] * 18
        assert {(link.version, link.remote_kind, link.active) for link in gpu.nvlinks} == {
            (5, model.RemoteKind.SWITCH, True)
        }
        assert gpu.fabric is not None
        assert (gpu.fabric.state, gpu.fabric.clique_id) == ("completed", 32766)
    assert len({gpu.fabric.cluster_uuid for gpu in machine.gpus if gpu.fabric}) == 1
    assert machine.nvswitches == ()
    rdma = [nic for nic in machine.nics if nic.rdma_devices and nic.rdma_devices[0].ports[0].link_layer == "InfiniBand"]
    assert [str(nic.address) for nic in rdma] == [f"{domain}:03:00.0" for domain in ("0000", "0002", "0010", "0012")]
    assert machine.host.memory_bytes == (489935 + 489795) << 20


def test_workstation_rtx(seen: Seen) -> None:
    machine = seen["workstation-rtx"]
    (gpu,) = machine.gpus
    assert gpu.product == "NVIDIA RTX 6000 Ada Generation"
    assert (gpu.pci.numa_node, gpu.pci.cpus, gpu.pci.iommu_group) == (None, None, None)
    assert {path.path_class for path in paths.between_all(machine)} == {model.PathClass.PHB}
    assert {finding.code for finding in machine.findings} == {"numa-unknown"}
