# SPDX-License-Identifier: Apache-2.0
"""Every machine of the zoo is consistent: links lead somewhere, the prober finds no contradiction, NVML and sysfs agree.

That it is the machine it claims to be is in `test_zoo_*.py`: the published facts, as this probe sees them.
"""

from __future__ import annotations

import gzip
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from discovery import model, pcie
from discovery.errors import DocumentError
from discovery.mock import hotplug, recording, zoo
from discovery.mock.pcitree import PortType
from discovery.mock.recording import Tree
from tests.machines.attributes import HEALTHY

Seen = Mapping[str, model.Snapshot]
ALL = pytest.mark.parametrize("name", zoo.names())
WITHOUT_A_FAULT = pytest.mark.parametrize("name", HEALTHY)

NOTED = {
    "cloud-vm-a100-8": {"numa-unknown"},
    "cloud-vm-t4": {"numa-unknown"},
    "dgx-h100-mig": {"mig-instance-incomplete"},
    "workstation-rtx": {"numa-unknown"},
}
"""What is noted of machines without a fault."""


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


@WITHOUT_A_FAULT
def test_the_prober_finds_no_contradiction(name: str, seen: Seen) -> None:
    findings = seen[name].findings
    assert [finding for finding in findings if finding.severity is model.Severity.ERROR] == []
    assert {finding.code for finding in findings} == NOTED.get(name, set())


@WITHOUT_A_FAULT
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
def test_both_ends_of_a_link_have_trained_to_the_same(name: str) -> None:
    """The faults of a machine are not in its files yet."""
    tree = Tree(zoo.load(name).files)
    lower = [tree.function(pci) or "" for pci in hotplug.functions(tree.files)]
    lower = [end for end in lower if not _is_inside_a_switch(tree, end)]
    for fact in ("current_link_width", "current_link_speed"):
        links = {end: (tree.text(f"{end}/{fact}"), tree.text(f"{posixpath.dirname(end)}/{fact}")) for end in lower}
        assert {end: told for end, told in links.items() if None not in told and len(set(told)) > 1} == {}


def _is_inside_a_switch(tree: Tree, directory: str) -> bool:
    """Whether a function is a downstream port, whose link is the one below it."""
    config = tree.files[f"{directory}/config"]
    assert isinstance(config, bytes)
    express = pcie.capabilities(config)[0][0x10]
    return config[express + 2] >> 4 == PortType.DOWNSTREAM


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
    for ask in (zoo.load, zoo.describe, zoo.text):
        with pytest.raises(DocumentError, match=", ".join(zoo.names())):
            ask("dgx-h1000")


def test_the_documentation_names_all_machines() -> None:
    text = (Path(__file__).parents[2] / "docs/machines.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \|$", text, re.MULTILINE))
    assert {name: described.get(name) for name in zoo.names()} == {name: zoo.describe(name) for name in zoo.names()}
