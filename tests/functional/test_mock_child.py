# SPDX-License-Identifier: Apache-2.0
"""Faults on a machine that a probe's child is looking at: what hardware may do while an agent runs.

- lost, fallen off, bound away: the next look says so, and that it is over
- a crash costs one look, a hang one deadline; the child after it sees the machine as it is then
- a driver that comes later is used when it is there
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import child, model, options
from discovery.errors import ProbeError
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

DEADLINE_S = 60.0


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    mockmachine.rendered(tmp_path)
    return tmp_path


@pytest.fixture
def prober(machine: Path) -> Iterator[child.ProbeChild]:
    source = child.Source.rendered(machine)
    prober = child.ProbeChild(source=source, options=options.ProbeOptions())
    yield prober
    prober.close()


def _states(prober: child.ProbeChild) -> dict[str, model.GpuState]:
    return {str(gpu.address): gpu.state for gpu in prober.rescan(timeout_s=DEADLINE_S).gpus}


@pytest.mark.parametrize(
    ("broken", "state"),
    [
        (Fault(kind=Kind.GPU_LOST, target=GPU0), model.GpuState.LOST),
        (Fault(kind=Kind.VFIO_BOUND, target=GPU0), model.GpuState.VFIO),
        (Fault(kind=Kind.NO_DRIVER, target=GPU0), model.GpuState.NO_DRIVER),
        (Fault(kind=Kind.FALLEN_OFF, target=GPU0), None),
        (
            Fault(kind=Kind.NVML_ERROR, target=GPU0, function="nvmlDeviceGetUUID", error=999),
            model.GpuState.UNREADABLE,
        ),
    ],
    ids=lambda value: str(getattr(value, "kind", value)),
)
def test_one_gpu_breaks_and_heals(
    machine: Path, prober: child.ProbeChild, broken: Fault, state: model.GpuState | None
) -> None:
    healthy = prober.probe(timeout_s=DEADLINE_S)
    before = prober.rescan(timeout_s=DEADLINE_S).fingerprint
    assert {gpu.state for gpu in healthy.gpus} == {model.GpuState.READY}
    faults.apply(machine, [broken])
    assert _states(prober) == ({str(GPU0): state} if state else {}) | {str(GPU1): model.GpuState.READY}
    assert prober.rescan(timeout_s=DEADLINE_S).fingerprint != before
    faults.apply(machine, [])
    assert prober.rescan(timeout_s=DEADLINE_S).fingerprint == before
    assert prober.probe(timeout_s=DEADLINE_S).gpus == healthy.gpus


def test_a_crash_costs_one_look(machine: Path, prober: child.ProbeChild) -> None:
    faults.apply(machine, [Fault(kind=Kind.NVML_CRASH, function="nvmlDeviceGetName")])
    with pytest.raises(ProbeError):
        prober.probe(timeout_s=DEADLINE_S)
    faults.apply(machine, [])
    assert len(prober.probe(timeout_s=DEADLINE_S).gpus) == 2


def test_a_hang_costs_one_deadline(machine: Path, prober: child.ProbeChild) -> None:
    prober.probe(timeout_s=DEADLINE_S)
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG)])
    with pytest.raises(ProbeError):
        prober.probe(timeout_s=0.5)
    faults.apply(machine, [])
    assert len(prober.probe(timeout_s=DEADLINE_S).gpus) == 2


def test_a_driver_comes_later(machine: Path, prober: child.ProbeChild) -> None:
    faults.apply(machine, [Fault(kind=Kind.NO_DRIVER)])
    without = prober.probe(timeout_s=DEADLINE_S)
    assert without.nvidia_driver is None
    assert {gpu.state for gpu in without.gpus} == {model.GpuState.NO_DRIVER}
    faults.apply(machine, [])
    driver = prober.probe(timeout_s=DEADLINE_S).nvidia_driver
    assert driver is not None
    assert driver.version == "580.95.05"
