# SPDX-License-Identifier: Apache-2.0
"""Limits and modes by a library that answers oddly: through the real pynvml.

- a driver without the function that sets, or that refuses to tell, limits nothing; one that has no such cgroup does
- a limit of all that the GPU has is none; sentinels are no numbers
- a mode of which nothing is known is not known
- what is taken and not kept is an error
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from discovery import errors, findings, limiting, nvml, options
from discovery.address import parse
from discovery.limits import NO_LIMIT, ComputeMode, MemoryLimit
from tests.fakes.nvmllib import FakeGpu, FakeLibrary

WHERE = parse("0000:1b:00.0")
BUS_ID = "00000000:1B:00.0"
MOST = (1 << 64) - 1
GET, SET = "nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"


def _path(limits: Any) -> bytes:
    """As C reads it; pynvml makes text of it."""
    path: bytes = ctypes.Structure.__getattribute__(limits._obj, "nameSpace")
    return path


class Limiter(FakeLibrary):
    """A driver that has limits: what it answers, and what it was asked."""

    def __init__(
        self, *answers: tuple[int, tuple[int, int, int]], mode: int = 0, missing: tuple[str, ...] = ()
    ) -> None:
        super().__init__(FakeGpu(bus_id=BUS_ID), missing=missing)
        self.answers = list(answers)
        self.mode = mode
        self.asked: list[Any] = []

    def _nvmlDeviceGetMemoryLimits_v1(self, _handle: Any, limits: Any) -> int:  # noqa: N802 - as NVML
        status, told = self.answers.pop(0)
        self.asked.append(_path(limits))
        limits._obj.softLimit, limits._obj.hardLimit, limits._obj.currentUsed = told
        return status

    def _nvmlDeviceSetMemoryLimits_v1(self, _handle: Any, limits: Any) -> int:  # noqa: N802
        self.asked.append((_path(limits), limits._obj.softLimit, limits._obj.hardLimit))
        return 0

    def _nvmlDeviceGetComputeMode(self, _handle: Any, mode: Any) -> int:  # noqa: N802
        mode._obj.value = self.mode
        return 0

    def _nvmlDeviceSetComputeMode(self, _handle: Any, _mode: Any) -> int:  # noqa: N802
        return 0


def _with(library: Limiter, do: Callable[[Any], Any]) -> Any:
    with nvml.Nvml(library) as session:
        return do(session.limits_of(WHERE))


@pytest.mark.parametrize(("status", "expected"), [(0, True), (6, True), (3, False), (13, False), (2, False)])
def test_whether_it_limits(status: int, expected: bool) -> None:
    library = Limiter((status, (0, 0, 0)))
    assert _with(library, lambda gpu: gpu.has_memory_limits("/c")) is expected
    assert library.asked == [b"/c"]


@pytest.mark.parametrize("missing", [GET, SET])
def test_it_takes_both_functions(missing: str) -> None:
    assert _with(Limiter((0, (0, 0, 0)), missing=(missing,)), lambda gpu: gpu.has_memory_limits("/c")) is False


def test_an_odd_error_is_a_finding_and_no_answer() -> None:
    found = findings.Findings()
    with nvml.Nvml(Limiter((999, (0, 0, 0)))) as session:
        facts = session.facts(WHERE, found, identity=nvml.Identity(), cgroup="/c")
    assert facts.memory_limits is None
    assert [each.code for each in found.result()] == ["nvml-unknown"]


def test_without_a_cgroup_nothing_is_asked() -> None:
    library = Limiter()
    with nvml.Nvml(library) as session:
        assert session.facts(WHERE, findings.Findings(), identity=nvml.Identity()).memory_limits is None
    assert library.asked == []


@pytest.mark.parametrize(
    ("told", "limit", "used"),
    [
        ((1, 2, 3), MemoryLimit(soft=1, hard=2), 3),
        ((0, MOST, 0), NO_LIMIT, 0),
        ((0, 80 << 30, 7), NO_LIMIT, 7),
        ((0, (80 << 30) + 5, MOST), NO_LIMIT, None),
    ],
)
def test_what_a_cgroup_has(told: tuple[int, int, int], limit: MemoryLimit, used: int | None) -> None:
    use = _with(Limiter((0, told)), lambda gpu: gpu.memory_use("/c"))
    assert (use.limit, use.used) == (limit, used)


def test_what_a_cgroup_is_given() -> None:
    library = Limiter()
    path = "/sys/fs/cgroup/\udcff\u00e9"
    _with(library, lambda gpu: gpu.limit_memory(path, MemoryLimit(soft=1, hard=2)))
    _with(library, lambda gpu: gpu.limit_memory("/c", NO_LIMIT))
    assert library.asked == [(b"/sys/fs/cgroup/\xff\xc3\xa9", 1, 2), (b"/c", 0, MOST)]


@pytest.mark.parametrize(
    ("number", "mode"),
    [(0, "default"), (1, "exclusive-thread"), (2, "prohibited"), (3, "exclusive-process"), (4, None)],
)
def test_modes(number: int, mode: str | None) -> None:
    told = _with(Limiter(mode=number), lambda gpu: gpu.compute_mode())
    assert told == (None if mode is None else ComputeMode(mode))


def test_a_driver_without_modes_has_none() -> None:
    library = Limiter(missing=("nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"))
    assert _with(library, lambda gpu: gpu.compute_mode()) is None
    with pytest.raises(errors.SourceError, match="nvmlDeviceSetComputeMode"):
        _with(library, lambda gpu: gpu.set_compute_mode(ComputeMode.DEFAULT))


@pytest.mark.parametrize("told", [(0, MOST, 0), (2 << 30, 3 << 30, 0), (0, 2 << 30, 0)])
def test_a_limit_that_is_taken_and_not_kept_is_an_error(tmp_path: Path, told: tuple[int, int, int]) -> None:
    pod = tmp_path / "pod"
    pod.mkdir()
    limiter = limiting.Limiter(root=tmp_path, session=nvml.Nvml(Limiter((0, told))))
    with pytest.raises(errors.WorkError, match=f"{pod} was limited to .*, and the driver says"):
        limiter.limit_memory(WHERE, {str(pod): MemoryLimit(soft=2 << 30, hard=2 << 30)})


def test_a_mode_that_is_taken_and_not_kept_is_an_error(tmp_path: Path) -> None:
    limiter = limiting.Limiter(root=tmp_path, session=nvml.Nvml(Limiter()))
    with pytest.raises(errors.WorkError, match="was set to exclusive-process, and the driver says default"):
        limiter.set_compute_mode(WHERE, ComputeMode.EXCLUSIVE_PROCESS)


def test_the_root_of_cgroups_is_that_of_sys_unless_another_is_given() -> None:
    assert str(options.Source().cgroup_root) == "/sys/fs/cgroup"
