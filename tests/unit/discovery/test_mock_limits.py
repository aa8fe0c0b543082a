# SPDX-License-Identifier: Apache-2.0
"""Compute modes and memory limits of the stand-in for libnvidia-ml, asked by the real pynvml; the machines that have them; what a
capture keeps of them.

- both structs have the layout of pynvml's, and the path in them is read as C reads it
- statuses are those of NVIDIA's documents; a cgroup without files is told the limit of the nearest one above
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from discovery import document
from discovery.errors import DocumentError
from discovery.mock import abi, capture, dmem, library, library_limits, podcgroups, render, zoo
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0

NEW = ('version: 580.95.05, cuda: "13.0"', 'version: 615.10.01, cuda: "13.4"')
DMEM = ("host: {vendor: Example,", "host: {cgroup: v2, memoryAccounting: dmem, kernel: 6.17.0, vendor: Example,")
MISC = ("host: {vendor: Example,", "host: {cgroup: v2, vendor: Example,")
MOST = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A session with a machine; the root of its cgroups."""
    mockmachine.rendered(tmp_path, NEW, getattr(request, "param", DMEM))
    pynvml.nvmlLib = library.Library(tmp_path)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInitWithFlags(1)
    yield tmp_path / "sys/fs/cgroup"
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def _gpu() -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def _set(path: bytes | None, soft: int, hard: int) -> None:
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=path, softLimit=soft, hardLimit=hard)
    pynvml.nvmlDeviceSetMemoryLimits_v1(_gpu(), limits)


def _get(path: Path) -> tuple[int, int, int]:
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=bytes(path))
    pynvml.nvmlDeviceGetMemoryLimits_v1(_gpu(), limits)
    return limits.softLimit, limits.hardLimit, limits.currentUsed


def _fails(status: int, function: Any, *arguments: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        function(*arguments)
    assert raised.value.value == status


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (abi.SetMemoryLimits, pynvml.c_nvmlSetMemoryLimits_v1_t),
        (abi.GetMemoryLimits, pynvml.c_nvmlGetMemoryLimits_v1_t),
    ],
)
def test_structs_are_laid_out_as_pynvml_does(ours: Any, theirs: Any) -> None:
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    for name, _ in theirs._fields_:
        assert getattr(ours, name).offset == getattr(theirs, name).offset
        assert getattr(ours, name).size == getattr(theirs, name).size


def test_a_limit_stands_in_the_files_of_the_kernel(root: Path) -> None:
    pod = podcgroups.make(root, "a-b", driver="systemd")
    _set(bytes(pod), 1 << 30, 2 << 30)
    assert _get(pod) == (1 << 30, 2 << 30, 0)
    region = dmem.region(GPU0)
    assert f"{region} {2 << 30}\n" in (pod / "dmem.max").read_text()
    assert f"{region} {1 << 30}\n" in (pod / "dmem.min").read_text()
    assert f"{region} {1 << 30}\n" in (pod.parents[1] / "dmem.min").read_text()
    _set(bytes(pod), 0, MOST)
    assert _get(pod) == (0, MOST, 0)
    assert f"{region} 0\n" in (pod.parents[1] / "dmem.min").read_text()
    assert len((pod / "dmem.max").read_text().splitlines()) == 2


@pytest.mark.parametrize("root", [MISC, DMEM], indirect=True)
def test_a_soft_limit_of_all_is_the_hard_one(root: Path) -> None:
    pod = podcgroups.make(root, "a-b")
    _set(bytes(pod), MOST, 2 << 30)
    assert _get(pod) == (2 << 30, 2 << 30, 0)


@pytest.mark.parametrize("root", [MISC, DMEM], indirect=True)
def test_a_cgroup_without_a_limit_of_its_own_is_told_that_above(root: Path) -> None:
    pod = podcgroups.make(root, "a-b")
    container = pod / "container"
    container.mkdir()
    _set(bytes(pod), 1 << 30, 2 << 30)
    assert _get(container) == (1 << 30, 2 << 30, 0)


@pytest.mark.parametrize("root", [MISC, DMEM], indirect=True)
def test_what_is_refused(root: Path) -> None:
    pod = bytes(podcgroups.make(root, "a-b"))
    _fails(abi.INVALID_ARGUMENT, _set, None, 0, MOST)
    _fails(abi.INVALID_ARGUMENT, _set, b"", 0, MOST)
    _fails(abi.INVALID_ARGUMENT, _set, b"a/b", 0, MOST)
    _fails(abi.INVALID_ARGUMENT, _set, b"/\xff\xfe", 0, MOST)
    _fails(abi.INVALID_ARGUMENT, _set, pod, 2, 1)
    _fails(abi.NOT_FOUND, _set, pod + b"/gone", 0, 1)
    _fails(abi.NOT_FOUND, _set, pod + b"/cgroup.procs", 0, 1)
    _fails(abi.NOT_FOUND, _get, Path("/no/such/cgroup"))
    assert _get(Path(pod.decode())) == (0, MOST, 0)


def test_only_where_the_controller_was_handed_down(root: Path) -> None:
    pod = podcgroups.make(root, "a-b", hand_down=False)
    _fails(abi.NOT_FOUND, _set, bytes(pod), 0, 1)
    assert _get(pod) == (0, MOST, 0)
    _fails(abi.NOT_FOUND, _set, bytes(root), 0, 1)


def test_a_mode_that_is_none_is_refused(root: Path) -> None:
    assert root.is_dir()
    _fails(abi.INVALID_ARGUMENT, pynvml.nvmlDeviceSetComputeMode, _gpu(), 4)
    pynvml.nvmlDeviceSetComputeMode(_gpu(), pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert pynvml.nvmlDeviceGetComputeMode(_gpu()) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS


def test_a_divided_gpu_has_no_mode_but_the_default(tmp_path: Path) -> None:
    divided = ("{gpu: nvidia-h100-sxm5-80gb}, {gpu", "{gpu: nvidia-h100-sxm5-80gb, migMode: true}, {gpu")
    mockmachine.rendered(tmp_path, NEW, MISC, divided)
    found = library.Library(tmp_path)
    driver = found._driver
    driver.initialise()
    gpu = driver.device(driver.view(), GPU0, "")
    body = library_limits.FUNCTIONS["nvmlDeviceSetComputeMode"].body
    body(driver, gpu, 0)
    with pytest.raises(Exception) as raised:
        body(driver, gpu, 3)
    assert getattr(raised.value, "status", None) == abi.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("name", "accounting"), [("l40s-8-shares", "dmem"), ("dgx-h100-shares", "misc"), ("dgx-h100", None)]
)
def test_a_capture_keeps_who_counts_and_no_limit(tmp_path: Path, name: str, accounting: str | None) -> None:
    machine = zoo.load(name)
    tree = render.render(machine, tmp_path / "a")
    if accounting is not None:
        podcgroups.make(tree.sys / "fs/cgroup", "a-b")
    taken = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.Library(tree.directory))
    assert machine.nvml is not None
    assert taken.nvml is not None
    assert machine.nvml.system.memory_accounting == taken.nvml.system.memory_accounting == accounting
    assert taken.nvml.system.missing_functions == machine.nvml.system.missing_functions
    assert {path: text for path, text in taken.files.items() if "cgroup" in path} == {
        path: text for path, text in machine.files.items() if path.endswith(("/cgroup.controllers", dmem.CAPACITY))
    }
    again = render.render(dataclasses.replace(taken, name="again"), tmp_path / "b")
    before, after = mockmachine.probed(tree), mockmachine.probed(again)
    assert (before.host.cgroup, before.host.memory_accounting) == (after.host.cgroup, after.host.memory_accounting)
    assert [gpu.memory_limits for gpu in before.gpus] == [gpu.memory_limits for gpu in after.gpus]
    assert {gpu.memory_limits for gpu in after.gpus} == {accounting is not None}


def test_cgroups_of_version_1_are_captured(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path, NEW, (MISC[0], MISC[1].replace("v2", "v1")))
    assert mockmachine.probed(tree).host.cgroup == 1
    assert {gpu.memory_limits for gpu in mockmachine.probed(tree).gpus} == {False}
    taken = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.Library(tree.directory))
    assert mockmachine.probed(render.render(taken, tmp_path.with_name("again"))).host.cgroup == 1


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("memoryAccounting: misc", "cgroup: v2 only"),
        ("cgroup: v1, memoryAccounting: dmem", "cgroup: v2 only"),
        ("cgroup: v2, memoryAccounting: dmem, kernel: 6.13.9", "6.14"),
        ("cgroup: v2, memoryAccounting: dmem, kernel: odd", "6.14"),
        ("cgroup: v3", "v1"),
        ("memoryAccounting: both", "dmem"),
    ],
)
def test_a_machine_that_cannot_be(host: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        mockmachine.parsed(("host: {vendor: Example,", f"host: {{{host}, vendor: Example,"))


def test_a_variant_has_another_driver_and_other_cgroups() -> None:
    text = (
        "apiVersion: mock.nearfield.dev/v1alpha1\nkind: Variant\nname: v\nbase: l40s-8-shares\n"
        'driver: {version: 620.1.1, cuda: "13.5"}\ncgroup: v1\n'
    )
    with pytest.raises(DocumentError, match="cgroup: v2 only"):
        zoo.parse_machine(document.parse(text.encode(), name="v.yaml"))
    made = zoo.parse_machine(
        document.parse(text.replace("v1\n", "v2\n").replace("dev/v2", "dev/v1").encode(), name="v.yaml")
    )
    assert made.nvml is not None
    assert made.nvml.system.driver_version == "620.1.1"
    assert made.nvml.system.memory_accounting == "dmem"
