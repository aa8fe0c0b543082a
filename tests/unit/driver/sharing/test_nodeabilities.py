# SPDX-License-Identifier: Apache-2.0
"""What a node can enforce.

- a node with all of it can do everything; each thing that is missing takes away its levels, with a reason
- MPS on a MIG instance is cooperative at most, and nothing else is there
- what may pass by itself is told from what does not
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from discovery import limits, model
from driver.sharing import abilities, nodeabilities
from driver.sharing.shares import Compute, Memory
from tests.fakes import divided, publishing

NEW = model.NvidiaDriver(version="615.12", cuda_version=(13, 4))
MEANS = nodeabilities.Means(mps_v3=None, mps_legacy=None, time_slices=None, pods=None)
READY: dict[str, Any] = {"memory_limits": True, "compute_mode": limits.ComputeMode.DEFAULT}


def can(
    gpu: model.Gpu | None = None,
    *,
    driver: model.NvidiaDriver | None = NEW,
    cgroup: int | None = 2,
    means: nodeabilities.Means = MEANS,
    **changes: Any,
) -> abilities.Abilities:
    seen = gpu if gpu is not None else publishing.gpu(1, **{**READY, **changes})
    snapshot = publishing.snapshot(seen, nvidia_driver=driver, host=model.Host(cgroup=cgroup))
    return nodeabilities.node_abilities(seen, snapshot, means)


def missing(found: abilities.Abilities) -> tuple[set[str], set[str]]:
    return {str(level) for level in found.memory}, {str(level) for level in found.compute}


def test_a_node_that_has_all_can_do_everything() -> None:
    assert can() == abilities.Abilities(mps_clients=60)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"driver": model.NvidiaDriver(version="580.95.05"), "memory_limits": False},
            "driver 580.95.05 is older than 615, which brought memory limits of cgroups",
        ),
        (
            {"cgroup": 1, "memory_limits": False},
            "this node has cgroup v1, and it takes v2: boot it with systemd.unified",
        ),
        ({"cgroup": 1}, "this node has cgroup v1"),
        ({"cgroup": None}, "it is not known that this node has cgroup v2"),
        ({"memory_limits": False}, "the driver has no memory limits for this GPU"),
        ({"memory_limits": None}, "the driver does not tell whether it limits the memory of cgroups"),
        ({"driver": None, "memory_limits": None}, "the driver does not tell whether"),
        ({"cgroup": 1, "memory_limits": None}, "this node has cgroup v1"),
        ({"driver": model.NvidiaDriver(version="R615?"), "memory_limits": False}, "the driver has no memory limits"),
    ],
)
def test_memory_by_cgroup_needs_driver_and_kernel(changes: dict[str, Any], said: str) -> None:
    found = can(**changes)
    assert missing(found) == ({"cgroup"}, set())
    assert found.memory[Memory.CGROUP].startswith(said)
    assert found.passing_memory == ({Memory.CGROUP} if "not known" in said or "not tell" in said else set())


def test_memory_by_cgroup_needs_the_cgroups_of_pods() -> None:
    hidden = replace(MEANS, pods="there is no kubepods below /sys/fs/cgroup")
    found = can(means=hidden)
    assert missing(found) == ({"cgroup"}, set())
    assert found.memory[Memory.CGROUP] == hidden.pods
    assert not found.passing_memory
    # What of v1 is seen says nothing of where v2 would be.
    assert "kubepods" not in can(means=hidden, cgroup=1).memory[Memory.CGROUP]


def test_all_that_keeps_a_level_away_is_said_at_once() -> None:
    found = can(cgroup=1, memory_limits=False, driver=model.NvidiaDriver(version="550.1"))
    assert "driver 550.1 is older" in found.memory[Memory.CGROUP]
    assert "cgroup v1" in found.memory[Memory.CGROUP]


def test_what_the_driver_says_counts_more_than_its_number() -> None:
    assert Memory.CGROUP not in can(driver=model.NvidiaDriver(version="610.1")).memory


def test_each_program_has_its_levels() -> None:
    assert missing(can(means=replace(MEANS, mps_v3="old program"))) == ({"mps"}, {"mps"})
    assert missing(can(means=replace(MEANS, mps_legacy="none"))) == ({"cooperative"}, {"cooperative"})
    assert missing(can(means=replace(MEANS, time_slices="no nvidia-smi"))) == (set(), {"timeslice"})


def test_volta_is_the_first_with_limits_for_clients() -> None:
    volta = can(compute_capability=(7, 0), architecture="Volta")
    assert missing(volta) == (set(), set())
    pascal = can(compute_capability=(6, 1), architecture="Pascal")
    assert missing(pascal) == ({"mps", "cooperative"}, {"mps", "cooperative", "timeslice"})
    assert "(Pascal)" in pascal.compute[Compute.MPS]
    assert "(6.1)" in can(compute_capability=(6, 1), architecture=None).compute[Compute.MPS]
    assert not pascal.passing_compute


@pytest.mark.parametrize("unread", ["compute_capability", "compute_mode"])
def test_what_was_not_read_may_be_read_soon(unread: str) -> None:
    """A call of NVML that fails once takes nothing away from a GPU that is shared."""
    changes: dict[str, Any] = {unread: None}
    unknown = can(**changes)
    assert missing(unknown) == ({"mps", "cooperative"}, {"mps", "cooperative"})
    assert unknown.passing_memory == set(unknown.memory)
    assert unknown.passing_compute == set(unknown.compute)


def test_mps_needs_a_compute_mode_that_can_be_exclusive() -> None:
    found = can(compute_mode=None)
    assert missing(found) == ({"mps", "cooperative"}, {"mps", "cooperative"})
    assert "compute mode" in found.compute[Compute.MPS]


def test_a_mig_instance_is_shared_by_cooperative_mps_at_most() -> None:
    found = can(divided.gpu(1, divided.instance(19, 0), memory_limits=False, compute_mode=None))
    assert missing(found) == ({"cgroup", "mps"}, {"mps", "timeslice"})
    assert "cooperative at most" in found.memory[Memory.MPS]
    # One whose MIG is off is a GPU as any other.
    assert missing(can(divided.gpu(1, enabled=False, **READY))) == (set(), set())


@pytest.mark.parametrize(
    ("driver", "clients"),
    [(NEW, 60), (model.NvidiaDriver(version="590.1", cuda_version=(13, 1)), 60), (None, 48)]
    + [(model.NvidiaDriver(version="580.1", cuda_version=version), 48) for version in ((13, 0), (12, 8), None)],
)
def test_the_driver_says_how_many_clients_mps_serves(driver: model.NvidiaDriver | None, clients: int) -> None:
    assert can(driver=driver).mps_clients == clients


def test_a_supervisor_that_may_come_back_takes_nothing_away_for_good() -> None:
    gone = replace(MEANS, mps_v3="away", mps_legacy="away", mps_passing=True)
    found = can(means=gone)
    assert found.passing_memory == {Memory.MPS, Memory.COOPERATIVE}
    assert found.passing_compute == {Compute.MPS, Compute.COOPERATIVE}
    # What keeps MPS from this GPU anyway does not pass.
    old = can(means=gone, compute_capability=(6, 0))
    assert (old.passing_memory, old.passing_compute) == (frozenset(), frozenset())
    mig = can(divided.gpu(1), means=gone)
    assert mig.passing_memory == {Memory.COOPERATIVE}
    assert mig.passing_compute == {Compute.COOPERATIVE}


@pytest.mark.parametrize("state", [state for state in model.GpuState if state is not model.GpuState.READY])
def test_a_gpu_that_cannot_be_read_can_do_nothing_for_now(state: model.GpuState) -> None:
    found = can(publishing.gpu(1, state=state, memory_bytes=None, compute_capability=None))
    assert missing(found) == ({"cgroup", "mps", "cooperative"}, {"mps", "cooperative", "timeslice"})
    assert found.passing_memory == set(found.memory)
    assert found.passing_compute == set(found.compute)
    assert found.mps_clients == 60
