# SPDX-License-Identifier: Apache-2.0
"""limits.Limiting by processes: the contract of test_limiting.py from a distance, and what only a distance has: a hang that costs its
own call, a crash that says so, turns at a GPU.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import errors, limits, work, workers
from discovery.limits import NO_LIMIT, ComputeMode, MemoryLimit
from discovery.mock import fault, faults, podcgroups
from discovery.mock.fault import Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

PATIENCE_S = 50.0
NEW = ('version: 580.95.05, cuda: "13.0"', 'version: 615.10.01, cuda: "13.4"')
DMEM = ("host: {vendor: Example,", "host: {cgroup: v2, memoryAccounting: dmem, kernel: 6.17.0, vendor: Example,")
TWO = MemoryLimit(soft=2 << 30, hard=2 << 30)


@pytest.fixture
def machine() -> Iterator[Path]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        mockmachine.rendered(Path(directory) / "machine", NEW, DMEM)
        yield Path(directory) / "machine"


@pytest.fixture
def pool(machine: Path) -> Iterator[workers.Workers]:
    pool = workers.Workers(source=mockmachine.source(machine), locks=machine.parent / "turns")
    yield pool
    pool.close()


@pytest.fixture
def pod(machine: Path) -> str:
    return str(podcgroups.make(machine / "sys/fs/cgroup", "a-b", driver="systemd"))


def test_limits_and_modes_pass_through(pool: workers.Workers, pod: str) -> None:
    pool.limit_memory(GPU0, {pod: TWO}, timeout_s=PATIENCE_S)
    told = pool.memory_use(GPU0, [pod, pod + "-gone"], timeout_s=PATIENCE_S)
    assert told == {pod: limits.MemoryUse(limit=TWO, used=0)}
    pool.limit_memory(GPU0, {pod: NO_LIMIT}, timeout_s=PATIENCE_S)
    assert pool.memory_use(GPU0, [pod], timeout_s=PATIENCE_S)[pod].limit == NO_LIMIT
    assert pool.memory_use(GPU0, [], timeout_s=PATIENCE_S) == {}
    mode = ComputeMode.EXCLUSIVE_PROCESS
    assert pool.set_compute_mode(GPU0, mode, timeout_s=PATIENCE_S) is ComputeMode.DEFAULT
    assert pool.set_compute_mode(GPU0, mode, timeout_s=PATIENCE_S) is mode


def test_a_refusal_is_told_and_the_process_goes_on(pool: workers.Workers, pod: str) -> None:
    for path, kind in (("/etc", work.Kind.NOT_SUPPORTED), (pod + "-gone", work.Kind.FAILED)):
        with pytest.raises(errors.WorkError) as caught:
            pool.limit_memory(GPU0, {path: TWO}, timeout_s=PATIENCE_S)
        assert caught.value.kind == kind
    with pytest.raises(ValueError, match="no limit of memory"):
        pool.limit_memory(GPU0, {pod: MemoryLimit(soft=2, hard=1)}, timeout_s=PATIENCE_S)
    pool.limit_memory(GPU0, {pod: TWO}, timeout_s=PATIENCE_S)


def test_a_hang_costs_its_own_call_and_no_other_gpu(pool: workers.Workers, machine: Path, pod: str) -> None:
    pool.memory_use(GPU0, [pod], timeout_s=PATIENCE_S)  # its process is there
    hang = fault.Fault(kind=Kind.NVML_HANG, target=GPU0, function="nvmlDeviceSetMemoryLimits_v1")
    faults.apply(machine, [hang])
    with pytest.raises(errors.WorkError, match="hung call of NVML") as caught:
        pool.limit_memory(GPU0, {pod: TWO}, timeout_s=3.0)
    assert (caught.value.kind, caught.value.retryable) == (work.Kind.TIMEOUT, True)
    pool.limit_memory(GPU1, {pod: TWO}, timeout_s=PATIENCE_S)
    faults.apply(machine, [])
    pool.limit_memory(GPU0, {pod: TWO}, timeout_s=PATIENCE_S)
    assert pool.memory_use(GPU0, [pod], timeout_s=PATIENCE_S)[pod].limit == TWO


def test_a_crash_while_reading_changed_nothing(pool: workers.Workers, machine: Path, pod: str) -> None:
    faults.apply(machine, [fault.Fault(kind=Kind.NVML_CRASH, function="nvmlDeviceGetMemoryLimits_v1")])
    with pytest.raises(errors.WorkError, match="nothing was changed"):
        pool.memory_use(GPU0, [pod], timeout_s=PATIENCE_S)
    with pytest.raises(errors.WorkError, match="how far it came is not known"):
        pool.limit_memory(GPU0, {pod: TWO}, timeout_s=PATIENCE_S)
    faults.apply(machine, [])
    assert pool.memory_use(GPU0, [pod], timeout_s=PATIENCE_S)[pod].limit == TWO


def test_calls_side_by_side_all_come_true(pool: workers.Workers, machine: Path) -> None:
    pods = [str(podcgroups.make(machine / "sys/fs/cgroup", f"pod-{number}")) for number in range(8)]
    raised: list[BaseException] = []

    def limit(path: str) -> None:
        try:
            for gpu in (GPU0, GPU1):
                pool.limit_memory(gpu, {path: TWO}, timeout_s=PATIENCE_S)
        except BaseException as err:  # noqa: BLE001 - told by the test
            raised.append(err)

    threads = [threading.Thread(target=limit, args=(path,)) for path in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    parent = str(Path(pods[0]).parent)
    for gpu in (GPU0, GPU1):
        told = pool.memory_use(gpu, [*pods, parent], timeout_s=PATIENCE_S)
        assert [told[path].limit for path in pods] == [TWO] * 8
        assert told[parent].limit == MemoryLimit(soft=8 * (2 << 30), hard=None)
