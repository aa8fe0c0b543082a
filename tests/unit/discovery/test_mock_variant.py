# SPDX-License-Identifier: Apache-2.0
"""The Variant document: a machine like another one, with faults of its own; and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery.errors import DocumentError
from discovery.mock import recording, stamp, zoo
from discovery.mock.fault import Kind
from tests.fakes import mockmachine

VARIANT = """\
apiVersion: mock.nearfield.dev/v1alpha1
kind: Variant
name: {name}
base: {base}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small machine, which has a fault of its own."""
    text = mockmachine.TEXT + "faults: [{kind: gpu-lost, target: gpu1}]\n"
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path


def write(folder: Path, name: str, base: str, more: str = "") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(VARIANT.format(name=name, base=base) + more)
    return str(path)


def kinds(machine: recording.Recording) -> list[tuple[Kind, str]]:
    return [(item.kind, str(item.target)) for item in machine.faults]


def uuids(machine: recording.Recording) -> set[str | None]:
    assert machine.nvml is not None
    return {gpu.uuid for gpu in machine.nvml.gpus}


def test_a_variant_has_the_hardware_of_its_base_and_faults_of_its_own(folder: Path) -> None:
    base = zoo.load(str(folder / "small.yaml"))
    machine = zoo.load(write(folder, "one", "small.yaml", "faults: [{kind: numa-wrong, node: 1}]\n"))
    assert machine.name == "one"
    assert machine.files.keys() == base.files.keys()
    assert kinds(base) == [(Kind.GPU_LOST, str(mockmachine.GPU1))]
    assert kinds(machine) == [(Kind.NUMA_WRONG, "None")]
    assert uuids(machine).isdisjoint(uuids(base))  # another node of the same build


def test_a_variant_without_faults_is_healthy(folder: Path) -> None:
    assert kinds(zoo.load(write(folder, "healthy", "small.yaml"))) == []


def test_a_variant_may_be_of_a_variant_and_of_a_machine_of_the_zoo(folder: Path) -> None:
    write(folder, "inner", "workstation-rtx", "faults: [{kind: gpu-lost, target: gpu0}]\n")
    machine = zoo.load(write(folder, "outer", "inner.yaml"))
    assert machine.files.keys() == zoo.load("workstation-rtx").files.keys()
    assert kinds(machine) == []


def test_a_variant_of_itself_is_refused_and_the_chain_named(folder: Path) -> None:
    first = write(folder, "first", "second.yaml")
    write(folder, "second", "third.yaml")
    write(folder, "third", "second.yaml")
    with pytest.raises(DocumentError, match=r"third\.yaml:4: base: .*second\.yaml > .*third\.yaml > .*second\.yaml"):
        zoo.load(first)
    with pytest.raises(DocumentError, match="based on itself"):
        zoo.load(write(folder, "alone", "alone.yaml"))


def test_a_variant_of_itself_is_found_by_whatever_way_it_is_named(folder: Path) -> None:
    again = write(folder, "one", f"../{folder.name}/one.yaml")
    with pytest.raises(DocumentError, match=r"one\.yaml:4: base: .*based on itself: \S*one\.yaml > \S*one\.yaml$"):
        zoo.load(again)
    assert stamp.of(again) is None
    (folder / "link.yaml").symlink_to("linked.yaml")
    with pytest.raises(DocumentError, match=r"linked\.yaml:4: base: .*based on itself"):
        zoo.load(write(folder, "linked", "link.yaml"))


def test_variants_stand_on_each_other_so_far_and_no_further(folder: Path) -> None:
    write(folder, "v0", "small.yaml")
    for number in range(1, 40):
        write(folder, f"v{number}", f"v{number - 1}.yaml")
    assert zoo.load(str(folder / f"v{zoo.MAX_BASES - 1}.yaml")).name == f"v{zoo.MAX_BASES - 1}"
    with pytest.raises(DocumentError, match=r"v23\.yaml:4: base: more than 16 Variants"):
        zoo.load(str(folder / "v39.yaml"))


def test_a_base_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(
        DocumentError, match=r"base: dgx-h1000 is neither a machine of the zoo \(.*dgx-h100.*\) nor a file"
    ):
        zoo.load(write(folder, "one", "dgx-h1000"))
    with pytest.raises(DocumentError, match=r"one\.yaml:4: base: x{300} is neither"):
        zoo.load(write(folder, "one", 300 * "x"))
    with pytest.raises(DocumentError, match=r"^x{300}: neither a machine of the zoo"):
        zoo.load(300 * "x")


@pytest.mark.parametrize(
    ("more", "where", "message"),
    [
        ("fautls: []\n", "one.yaml:5", "unknown key"),
        ("host: {product: Other}\n", "one.yaml:5", "unknown key"),
        ("faults: [{kind: gpu-lost, target: gpu9}]\n", "one.yaml:5", "gpu9"),
        ("faults: [{kind: numa-wrong, node: 7}]\n", "one.yaml:5", r"no NUMA node 7; numa.nodes has \[0, 1\]"),
        ("faults: [{kind: numa-wrong}]\n", "one.yaml:5", "numa-wrong needs node"),
    ],
)
def test_a_mistake_in_a_variant_names_its_line(folder: Path, more: str, where: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as refused:
        zoo.load(write(folder, "one", "small.yaml", more))
    assert where in str(refused.value)


def test_a_mistake_in_the_base_names_the_base(folder: Path) -> None:
    (folder / "small.yaml").write_text(mockmachine.TEXT.replace("samsung-pm9a3", "samsung-pm9a4"))
    with pytest.raises(DocumentError, match=r"small\.yaml:20: pci\[1\]"):
        zoo.load(write(folder, "one", "small.yaml"))


def test_neither_a_machine_nor_a_variant(folder: Path) -> None:
    (folder / "other.yaml").write_text("kind: Pod\n")
    with pytest.raises(DocumentError, match="not a document of kind Machine or Variant"):
        zoo.load(str(folder / "other.yaml"))


def test_the_word_of_a_variant_changes_with_its_base(folder: Path) -> None:
    outer = write(folder, "outer", write(folder, "inner", "small.yaml").rpartition("/")[2])
    before = stamp.of(outer)
    (folder / "small.yaml").write_text(mockmachine.TEXT.replace("64GiB", "32GiB"))
    after = stamp.of(outer)
    assert None not in (before, after)
    assert before != after


@pytest.mark.parametrize("base", ["nothing.yaml", "one.yaml"])
def test_a_variant_that_cannot_be_has_no_word(folder: Path, base: str) -> None:
    assert stamp.of(write(folder, "one", base)) is None


def test_a_variant_that_only_yaml_can_read_has_no_word(folder: Path) -> None:
    path = folder / "flow.yaml"
    path.write_text("{apiVersion: mock.nearfield.dev/v1alpha1, kind: Variant, name: flow, base: small.yaml}\n")
    assert zoo.load(str(path)).name == "flow"
    assert stamp.of(str(path)) is None
