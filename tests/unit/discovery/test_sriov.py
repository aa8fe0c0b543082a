# SPDX-License-Identifier: Apache-2.0
"""SR-IOV, from the description of a machine to what the probe makes of it.

- virtual functions have their places by offset and stride, and files as the kernel writes them
- those of a NIC are NICs that no GPU is paired with, and have no paths of their own; those of a GPU are for virtual machines
- descriptions that cannot be
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import model, paths
from discovery.address import parse
from discovery.errors import DocumentError
from discovery.mock import recording
from tests.fakes import mockmachine

PARTS = """\
products:
  nics:
    vf-nic:
      source: made up
      name: NIC with virtual functions
      pci: "15b3:1021"
      pcie: {generation: 5, width: 16}
      functions: [{link: Ethernet, rate: 200}, {link: Ethernet, rate: 200}]
      virtualFunctions: {pci: "15b3:101e", total: 8, offset: 2, stride: 2}
  gpus:
    vf-gpu:
      source: made up
      name: GPU with virtual functions
      pci: "10de:26b9"
      class: "030200"
      architecture: ada
      computeCapability: "8.9"
      memory: 46068MiB
      multiprocessors: 142
      cores: 18176
      powerLimitWatts: 350
      virtualFunctions: {total: 4, offset: 4}
"""
NIC = (
    "{nic: connectx-7-400g-ib}",
    "{nic: vf-nic, virtualFunctions: 2, functions: [{interface: eno1}, {interface: eno2}]}",
)
GPU = ("ports: [{gpu: nvidia-h100-sxm5-80gb}, {gpu", "ports: [{gpu: vf-gpu, virtualFunctions: 3}, {gpu")
NVLINK = ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}\n", PARTS)
FIRST = "0000:1a:00.0"


def probed(directory: Path, *changes: tuple[str, str]) -> model.Snapshot:
    return mockmachine.probed(mockmachine.rendered(directory, *changes))


def test_virtual_functions_have_places_and_files_as_the_kernel_gives_them() -> None:
    tree = recording.Tree(mockmachine.parsed(NIC, NVLINK).files)
    here = tree.function(FIRST)
    assert here is not None
    assert [tree.text(f"{here}/sriov_{name}") for name in ("totalvfs", "numvfs", "drivers_autoprobe")] == [
        "8",
        "2",
        "1",
    ]
    links = {name: tree.resolve(f"{here}/{name}") for name in ("virtfn0", "virtfn1", "virtfn2")}
    above = here.rpartition("/")[0]
    assert links == {"virtfn0": f"{above}/0000:1a:00.2", "virtfn1": f"{above}/0000:1a:00.4", "virtfn2": None}
    one = tree.function("0000:1a:00.4")
    assert one is not None
    assert tree.resolve(f"{one}/physfn") == here
    assert [tree.text(f"{one}/{name}") for name in ("vendor", "device", "class", "numa_node")] == [
        "0x15b3",
        "0x101e",
        "0x020000",
        "0",
    ]
    assert [tree.text(f"{one}/{name}") for name in ("max_link_width", "sriov_totalvfs")] == [None, None]
    assert tree.resolve("sys/class/net/enp26s0f0v1") == f"{one}/net/enp26s0f0v1"
    groups = {tree.resolve(f"{tree.function(f'0000:1a:00.{number}')}/iommu_group") for number in range(6)}
    assert None not in groups


def test_virtual_functions_of_a_nic_are_paired_with_nothing(tmp_path: Path) -> None:
    snapshot = probed(tmp_path / "node", NIC, NVLINK)
    of = {str(nic.address): nic.pci.physical_function for nic in snapshot.nics}
    assert of == {
        "0000:1a:00.0": None,
        "0000:1a:00.1": None,
        "0000:1a:00.2": parse("0000:1a:00.0"),
        "0000:1a:00.3": parse("0000:1a:00.1"),
        "0000:1a:00.4": parse("0000:1a:00.0"),
        "0000:1a:00.5": parse("0000:1a:00.1"),
    }
    physical = {nic.address for nic in snapshot.nics if nic.pci.physical_function is None}
    for gpu in snapshot.gpus:
        assert gpu.nic is not None
        assert {gpu.nic.address, *gpu.nic.ties} <= physical
    assert {nic.address for nic in snapshot.nics if nic.rail is not None} <= physical
    ends = {end for path in paths.between_all(snapshot) for end in (path.a, path.b)}
    assert {nic.address for nic in snapshot.nics} & ends == physical
    assert [nic.name for nic in snapshot.nics] == [f"mlx5_{number}" for number in range(6)]
    assert snapshot.findings == ()


def test_switching_virtual_functions_on_changes_no_pairing(tmp_path: Path) -> None:
    without = (NIC[0], NIC[1].replace("virtualFunctions: 2", "virtualFunctions: 0"))
    before, after = probed(tmp_path / "off", without, NVLINK), probed(tmp_path / "on", NIC, NVLINK)
    assert [gpu.nic for gpu in before.gpus] == [gpu.nic for gpu in after.gpus]
    assert [gpu.groups for gpu in before.gpus] == [gpu.groups for gpu in after.gpus]
    assert len(after.nics) == len(before.nics) + 4


def test_virtual_functions_of_a_gpu_are_for_virtual_machines(tmp_path: Path) -> None:
    snapshot = probed(tmp_path / "node", GPU, NVLINK)
    assert [str(gpu.address) for gpu in snapshot.gpus] == ["0000:18:00.0", "0000:19:00.0"]
    assert [(finding.code, finding.subject) for finding in snapshot.findings] == [
        ("gpu-virtual-functions", "0000:18:00.0")
    ]
    assert all(gpu.state is model.GpuState.READY for gpu in snapshot.gpus)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (((NIC[0], NIC[1].replace("s: 2", "s: 9")), NVLINK), "has 8 virtual functions, not 9"),
        ((("{nic: connectx-7-400g-ib}", "{nic: intel-x550, virtualFunctions: 1}"),), "has no virtual functions, not 1"),
        ((NIC, ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}\n", PARTS.replace("stride: 2", "stride: 1"))),
         "there is already a function at 0000:1a:00.3"),
        ((NIC, ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}\n", PARTS.replace("offset: 2", "offset: 255"))),
         "no place is left on bus 1a"),
        ((("{nvme: samsung-pm9a3}", "{nvme: samsung-pm9a3, virtualFunctions: 1}"),), "nvme takes no virtualFunctions"),
        ((("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, virtualFunctions: -1}"),), "virtualFunctions"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_that_names_its_line(changes: tuple[tuple[str, str], ...], said: str) -> None:
    with pytest.raises(DocumentError, match=said) as raised:
        mockmachine.parsed(*changes)
    assert str(raised.value).startswith("small.yaml:")
