# SPDX-License-Identifier: Apache-2.0
"""The contract of limits.Limiting, in this process, over machines that count in both ways.

- a limit is set, read back and told with the use; an allocation above it fails; it goes with the cgroup, or by NO_LIMIT
- nothing but a cgroup below the root is opened
- old driver, cgroup v1, MIG, missing rights, a controller that is not handed down: each is told as what it is
- the compute mode is changed, the one before is told
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import errors, limits, options, workers
from discovery.limits import NO_LIMIT, ComputeMode, MemoryLimit
from discovery.mock import live, memorylimits, podcgroups, state
from discovery.work import Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

GIB = 1 << 30
NEW = ('version: 580.95.05, cuda: "13.0"', 'version: 615.10.01, cuda: "13.4"')
HOST = "host: {vendor: Example,"
V2 = (HOST, "host: {cgroup: v2, vendor: Example,")
DMEM = (HOST, "host: {cgroup: v2, memoryAccounting: dmem, kernel: 6.17.0, vendor: Example,")
V1 = (HOST, "host: {cgroup: v1, vendor: Example,")
EACH_WAY = pytest.mark.parametrize("host", [V2, DMEM], ids=["misc", "dmem"])
TWO = MemoryLimit(soft=2 * GIB, hard=2 * GIB)


def _source(directory: Path, *changes: tuple[str, str]) -> options.Source:
    mockmachine.rendered(directory, *changes)
    return mockmachine.source(directory)


def _pod(source: options.Source, uid: str = "11aa-22", *, hand_down: bool = True) -> str:
    return str(podcgroups.make(source.cgroup_root, uid, hand_down=hand_down))


def _refused(kind: Kind, said: str, do: Callable[[], object]) -> None:
    with pytest.raises(errors.WorkError, match=said) as raised:
        do()
    assert raised.value.kind == kind
    assert raised.value.retryable == (kind is Kind.FAILED)


def _change(directory: Path, change: Callable[[state.Nvml], state.Nvml]) -> None:
    def changed(now: live.Live) -> live.Live:
        assert now.nvml is not None
        return dataclasses.replace(now, nvml=change(now.nvml))

    live.LiveFile(directory).update(changed)


@EACH_WAY
def test_a_limit_is_set_told_and_taken_away(tmp_path: Path, host: tuple[str, str]) -> None:
    source = _source(tmp_path, NEW, host)
    work, pod = workers.InProcessWork(source=source), _pod(source)
    work.limit_memory(GPU0, {pod: TWO}, timeout_s=30.0)
    assert work.memory_use(GPU0, [pod, f"{pod}-gone"], timeout_s=30.0) == {pod: limits.MemoryUse(limit=TWO, used=0)}
    assert work.memory_use(GPU1, [pod], timeout_s=30.0) == {pod: limits.MemoryUse(limit=NO_LIMIT, used=0)}
    assert memorylimits.charge(tmp_path, GPU0, pod, 2 * GIB)
    assert not memorylimits.charge(tmp_path, GPU0, pod, 1)
    assert memorylimits.charge(tmp_path, GPU1, pod, 9 * GIB)
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].used == 2 * GIB
    lower = MemoryLimit(soft=GIB, hard=4 * GIB)
    work.limit_memory(GPU0, {pod: lower}, timeout_s=30.0)
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == lower
    work.limit_memory(GPU0, {pod: NO_LIMIT}, timeout_s=30.0)
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == NO_LIMIT
    assert memorylimits.charge(tmp_path, GPU0, pod, 50 * GIB)


@EACH_WAY
def test_a_limit_goes_with_its_cgroup(tmp_path: Path, host: tuple[str, str]) -> None:
    source = _source(tmp_path, NEW, host)
    work, pod = workers.InProcessWork(source=source), _pod(source)
    work.limit_memory(GPU0, {pod: TWO}, timeout_s=30.0)
    podcgroups.remove(source.cgroup_root, "11aa-22")
    work.limit_memory(GPU0, {pod: NO_LIMIT}, timeout_s=30.0)
    _refused(Kind.FAILED, "is not there", lambda: work.limit_memory(GPU0, {pod: TWO}, timeout_s=30.0))
    assert _pod(source) == pod
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == NO_LIMIT


@EACH_WAY
def test_every_cgroup_is_tried_before_an_error_leaves(tmp_path: Path, host: tuple[str, str]) -> None:
    source = _source(tmp_path, NEW, host)
    work, pod, other = workers.InProcessWork(source=source), _pod(source), _pod(source, "33-44")
    wanted = {pod: TWO, f"{pod}-gone": TWO, other: TWO}
    _refused(Kind.FAILED, "-gone is not there", lambda: work.limit_memory(GPU0, wanted, timeout_s=30.0))
    assert work.memory_use(GPU0, [pod, other], timeout_s=30.0).keys() == {pod, other}
    assert all(use.limit == TWO for use in work.memory_use(GPU0, [pod, other], timeout_s=30.0).values())


def test_reservations_above_are_the_sum_and_are_left_by_a_cgroup_that_is_deleted(tmp_path: Path) -> None:
    source = _source(tmp_path, NEW, DMEM)
    work, pod, other = workers.InProcessWork(source=source), _pod(source), _pod(source, "33-44")
    parent = str(Path(pod).parent)

    def reserved() -> int:
        return work.memory_use(GPU0, [parent], timeout_s=30.0)[parent].limit.soft

    work.limit_memory(GPU0, {pod: TWO, other: TWO}, timeout_s=30.0)
    assert reserved() == 4 * GIB
    work.limit_memory(GPU0, {pod: NO_LIMIT}, timeout_s=30.0)
    assert reserved() == 2 * GIB
    podcgroups.remove(source.cgroup_root, "33-44")
    assert reserved() == 2 * GIB


def test_a_controller_that_is_not_handed_down_is_named(tmp_path: Path) -> None:
    source = _source(tmp_path, NEW, DMEM)
    work, pod = workers.InProcessWork(source=source), _pod(source, hand_down=False)
    _refused(Kind.FAILED, r"dmem controller is not handed down .*RmMemacctMode=1", lambda: _limit(work, {pod: TWO}))
    _limit(work, {pod: NO_LIMIT})


def _limit(work: workers.InProcessWork, wanted: dict[str, MemoryLimit]) -> None:
    work.limit_memory(GPU0, wanted, timeout_s=30.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((V2,), "Function Not Found"),
        ((NEW, V1), "Not Supported"),
        (
            (NEW, V2, ("{gpu: nvidia-h100-sxm5-80gb}, {gpu", "{gpu: nvidia-h100-sxm5-80gb, migMode: true}, {gpu")),
            "Not Supported",
        ),
    ],
    ids=["old driver", "cgroup v1", "MIG"],
)
def test_what_cannot_be_limited_at_all(tmp_path: Path, changes: tuple[tuple[str, str], ...], said: str) -> None:
    source = _source(tmp_path, *changes)
    work, pod = workers.InProcessWork(source=source), _pod(source)
    _refused(Kind.NOT_SUPPORTED, said, lambda: _limit(work, {pod: TWO}))
    _refused(Kind.NOT_SUPPORTED, said, lambda: work.memory_use(GPU0, [pod], timeout_s=30.0))


def test_it_takes_root(tmp_path: Path) -> None:
    source = _source(tmp_path, NEW, V2)
    work, pod = workers.InProcessWork(source=source), _pod(source)
    _change(tmp_path, lambda nvml: dataclasses.replace(nvml, system=dataclasses.replace(nvml.system, privileged=False)))
    _refused(Kind.NOT_SUPPORTED, "Insufficient Permissions", lambda: _limit(work, {pod: TWO}))
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == NO_LIMIT
    exclusive = ComputeMode.EXCLUSIVE_PROCESS
    _refused(Kind.NOT_SUPPORTED, "Insufficient Perm", lambda: work.set_compute_mode(GPU0, exclusive, timeout_s=30.0))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc",
        "{root}",
        "{root}/",
        "{root}//a",
        "{root}/../x",
        "{root}/./a",
        "{root}x/a",
        "a",
        "{root}/a\0b",
        "{root}/" + "a/" * 3000 + "a",
    ],
)
def test_nothing_else_than_a_cgroup_below_the_root_is_opened(tmp_path: Path, path: str) -> None:
    source = _source(tmp_path, NEW, V2)
    place = path.replace("{root}", str(source.cgroup_root))
    work = workers.InProcessWork(source=source)
    for limit in (TWO, NO_LIMIT):
        _refused(Kind.NOT_SUPPORTED, "is no cgroup below", lambda limit=limit: _limit(work, {place: limit}))  # type: ignore[misc]
    _refused(Kind.NOT_SUPPORTED, "is no cgroup below", lambda: work.memory_use(GPU0, [place], timeout_s=30.0))


@pytest.mark.parametrize("inside", [True, False])
def test_no_link_is_followed(tmp_path: Path, inside: bool) -> None:
    source = _source(tmp_path, NEW, V2)
    pod = Path(_pod(source))
    (source.cgroup_root / "link").symlink_to(pod.parent if inside else "/")
    place = str(source.cgroup_root / "link" / (pod.name if inside else "etc"))
    work = workers.InProcessWork(source=source)
    _refused(Kind.NOT_SUPPORTED, "link is no folder", lambda: _limit(work, {place: TWO}))
    (source.cgroup_root / "file").touch()
    _refused(Kind.NOT_SUPPORTED, "no folder", lambda: _limit(work, {str(source.cgroup_root / "file"): TWO}))


def test_a_hierarchy_outside_of_the_tree_is_looked_at_and_never_written(tmp_path: Path) -> None:
    _source(tmp_path / "machine", NEW, DMEM)
    outside = tmp_path / "memory"
    (outside / "kubepods/pod1").mkdir(parents=True)
    source = dataclasses.replace(mockmachine.source(tmp_path / "machine"), cgroups=outside)
    work, pod = workers.InProcessWork(source=source), str(outside / "kubepods/pod1")
    _limit(work, {pod: TWO})
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == TWO
    assert not memorylimits.charge(tmp_path / "machine", GPU0, pod, 3 * GIB)
    assert [found.name for found in outside.rglob("*") if not found.is_dir()] == []
    Path(pod).rename(outside / "before")  # so that the next one has another inode, as cgroups do
    assert work.memory_use(GPU0, [pod], timeout_s=30.0) == {}
    Path(pod).mkdir()
    assert work.memory_use(GPU0, [pod], timeout_s=30.0)[pod].limit == NO_LIMIT


@pytest.mark.parametrize(
    "limit",
    [MemoryLimit(soft=-1, hard=None), MemoryLimit(soft=2, hard=1), MemoryLimit(soft=0, hard=1 << 63)],
)
def test_a_limit_that_is_none_is_a_mistake_of_the_caller(tmp_path: Path, limit: MemoryLimit) -> None:
    work = workers.InProcessWork(source=_source(tmp_path, NEW, V2))
    with pytest.raises(ValueError, match="no limit of memory"):
        _limit(work, {str(tmp_path): limit})


def test_the_compute_mode_changes_and_the_one_before_is_told(tmp_path: Path) -> None:
    work = workers.InProcessWork(source=_source(tmp_path))
    assert work.set_compute_mode(GPU0, ComputeMode.EXCLUSIVE_PROCESS, timeout_s=30.0) is ComputeMode.DEFAULT
    assert work.set_compute_mode(GPU0, ComputeMode.EXCLUSIVE_PROCESS, timeout_s=30.0) is ComputeMode.EXCLUSIVE_PROCESS
    assert work.set_compute_mode(GPU0, ComputeMode.DEFAULT, timeout_s=30.0) is ComputeMode.EXCLUSIVE_PROCESS
    assert work.set_compute_mode(GPU1, ComputeMode.PROHIBITED, timeout_s=30.0) is ComputeMode.DEFAULT


def test_a_probe_sees_what_was_set(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path, NEW, V2)
    workers.InProcessWork(source=mockmachine.source(tmp_path)).set_compute_mode(
        GPU0, ComputeMode.EXCLUSIVE_PROCESS, timeout_s=30.0
    )
    first, second = mockmachine.probed(tree).gpus
    assert (first.compute_mode, second.compute_mode) == (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT)
    assert first.memory_limits is True
    _change(
        tmp_path,
        lambda nvml: dataclasses.replace(
            nvml, gpus=tuple(dataclasses.replace(gpu, compute_mode=None) for gpu in nvml.gpus)
        ),
    )
    assert mockmachine.probed(tree).gpus[0].compute_mode is None


def test_a_driver_that_fails_is_told(tmp_path: Path) -> None:
    source = _source(tmp_path, NEW, V2)
    work, pod = workers.InProcessWork(source=source), _pod(source)
    errors_of = {"nvmlDeviceSetMemoryLimits_v1": 999, "nvmlDeviceGetMemoryLimits_v1": 15}
    _change(
        tmp_path,
        lambda nvml: dataclasses.replace(
            nvml, gpus=tuple(dataclasses.replace(gpu, errors=errors_of) for gpu in nvml.gpus)
        ),
    )
    _refused(Kind.FAILED, "Unknown Error", lambda: _limit(work, {pod: TWO}))
    _refused(Kind.LOST, "lost", lambda: work.memory_use(GPU0, [pod], timeout_s=30.0))


@given(asked=st.integers(1 << 20, 1 << 40), told=st.integers(1 << 20, 1 << 40))
def test_limits_are_alike_up_to_rounding(asked: int, told: int) -> None:
    same = limits.alike(MemoryLimit(soft=0, hard=asked), MemoryLimit(soft=0, hard=told))
    assert same == (asked * 15 <= told * 16 and told * 16 <= asked * 17)
    assert not limits.alike(MemoryLimit(soft=0, hard=None), MemoryLimit(soft=0, hard=told))
    assert not limits.alike(MemoryLimit(soft=0, hard=asked), NO_LIMIT)
    assert not limits.alike(NO_LIMIT, MemoryLimit(soft=told, hard=None))
    assert limits.alike(NO_LIMIT, NO_LIMIT)


def test_the_example_of_nvidia_is_alike() -> None:
    mib = 1 << 20
    assert limits.alike(MemoryLimit(soft=4000 * mib, hard=8000 * mib), MemoryLimit(soft=4096 * mib, hard=8192 * mib))


def test_a_folder_may_not_be_looked_into(tmp_path: Path) -> None:
    source = _source(tmp_path, NEW, V2)
    long = f"{source.cgroup_root}/{'a' * 300}"
    work = workers.InProcessWork(source=source)
    _refused(Kind.FAILED, os.strerror(36), lambda: _limit(work, {long: TWO}))
