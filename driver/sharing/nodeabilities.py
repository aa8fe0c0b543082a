# SPDX-License-Identifier: Apache-2.0
"""What a node can enforce of the shares of a GPU, from what was read of it and of the programs beside the driver. Pure.

- Memory by cgroup: NVML's memory limits (driver 615 and newer), cgroup v2, no MIG (NVIDIA, "MPS v3 Memory Partitioning"), and
  the cgroups of pods, which a container sees only where the node's are mounted.
- MPS v3 and legacy MPS: limits of a client need Volta or newer. A program that forgets its MPS gets no GPU only where the compute mode
  is EXCLUSIVE_PROCESS, which a MIG instance has not (nvmlDeviceSetComputeMode): there MPS is cooperative at most.
- Turns of a set length: nvidia-smi of the driver root (compute-policy), Volta or newer, and never of a MIG instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from discovery import model
from driver.sharing import abilities
from driver.sharing.abilities import Abilities
from driver.sharing.shares import Compute, Memory

_Level = TypeVar("_Level", Memory, Compute)

MEMORY_LIMITS_DRIVER = 615
"""The first driver that limits the memory of cgroups."""

_VOLTA = (7, 0)
_MORE_CLIENTS_CUDA = (13, 1)
_MORE_CLIENTS = 60
"""MPS documentation, Client-Server Connection Limits: 60 contexts a device, 48 on CUDA 13.0 and before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is beside the driver: for each, why it cannot be had, in a sentence that says what would help, None where it can.
    `pods`: the cgroups of pods. `mps_passing`: MPS may be had again without anybody doing anything.
    """

    mps_v3: str | None
    mps_legacy: str | None
    time_slices: str | None
    pods: str | None
    mps_passing: bool = False


@dataclass(frozen=True, slots=True)
class _Why:
    """Why a level cannot be had. `passes`: perhaps it can soon, without anybody doing anything."""

    reason: str
    passes: bool = False


def node_abilities(gpu: model.Gpu, snapshot: model.Snapshot, means: Means) -> Abilities:
    """What can be enforced of the shares of a GPU, or, where it is divided by MIG, of its instances. What could not be read, and is
    told otherwise as a rule, may pass.
    """
    if gpu.state is not model.GpuState.READY:
        away = abilities.without(f"the GPU cannot be used now ({gpu.state})", passing=True)
        return replace(away, mps_clients=_clients(snapshot.nvidia_driver))
    mps, legacy = _mps_v3(gpu, means), _mps_legacy(gpu, means)
    memory = _found({Memory.CGROUP: _cgroup(gpu, snapshot, means), Memory.MPS: mps, Memory.COOPERATIVE: legacy})
    compute = _found({Compute.MPS: mps, Compute.COOPERATIVE: legacy, Compute.TIMESLICE: _turns(gpu, means)})
    return Abilities(
        memory={level: why.reason for level, why in memory.items()},
        compute={level: why.reason for level, why in compute.items()},
        passing_memory=frozenset(level for level, why in memory.items() if why.passes),
        passing_compute=frozenset(level for level, why in compute.items() if why.passes),
        mps_clients=_clients(snapshot.nvidia_driver),
    )


def _found(levels: Mapping[_Level, _Why | None]) -> dict[_Level, _Why]:
    return {level: why for level, why in levels.items() if why is not None}


def _cgroup(gpu: model.Gpu, snapshot: model.Snapshot, means: Means) -> _Why | None:
    if _divided(gpu):
        return _Why("the driver limits the memory of no MIG instance by cgroup")
    reasons = []
    driver = snapshot.nvidia_driver
    if driver is not None and _is_older(driver.version) and not gpu.memory_limits:
        reasons.append(
            f"driver {driver.version} is older than {MEMORY_LIMITS_DRIVER}, which brought memory limits of cgroups"
        )
    if snapshot.host.cgroup == 1:
        reasons.append(
            "this node has cgroup v1, and it takes v2: boot it with systemd.unified_cgroup_hierarchy=1, or use a newer system"
        )
    elif snapshot.host.cgroup == 2 and means.pods is not None:
        reasons.append(means.pods)
    if reasons:
        return _Why(", and ".join(reasons))
    if snapshot.host.cgroup is None:
        asked = "is the host's /sys/fs/cgroup visible to the agent?"
        return _Why(f"it is not known that this node has cgroup v2: {asked}", passes=True)
    if gpu.memory_limits is None:
        return _Why("the driver does not tell whether it limits the memory of cgroups on this GPU", passes=True)
    return None if gpu.memory_limits else _Why("the driver has no memory limits for this GPU")


def _mps_v3(gpu: model.Gpu, means: Means) -> _Why | None:
    if _divided(gpu):
        return _Why(
            "a program on a MIG instance can leave MPS, as an instance has no exclusive compute mode: by MPS it is cooperative at"
            " most"
        )
    return _no_clients(gpu) or _unless(means.mps_v3, passes=means.mps_passing)


def _mps_legacy(gpu: model.Gpu, means: Means) -> _Why | None:
    return _no_clients(gpu) or _unless(means.mps_legacy, passes=means.mps_passing)


def _no_clients(gpu: model.Gpu) -> _Why | None:
    """Why MPS does not hold its clients to a share of this GPU, whatever the supervisor can do."""
    if gpu.compute_capability is None:
        return _Why(
            "the compute capability of this GPU is not known, and MPS has limits from Volta (7.0) on", passes=True
        )
    if gpu.compute_capability < _VOLTA:
        return _Why(f"MPS has limits from Volta on, and this GPU is older ({_architecture(gpu)})")
    if gpu.compute_mode is None and not _divided(gpu):
        return _Why(
            "the driver does not tell the compute mode of this GPU, which has to be exclusive where MPS shares it",
            passes=True,
        )
    return None


def _turns(gpu: model.Gpu, means: Means) -> _Why | None:
    if _divided(gpu):
        return _Why("the turns at a MIG instance cannot be set")
    if gpu.compute_capability is not None and gpu.compute_capability < _VOLTA:
        return _Why(f"the driver sets turns from Volta on, and this GPU is older ({_architecture(gpu)})")
    return _unless(means.time_slices)


def _unless(reason: str | None, *, passes: bool = False) -> _Why | None:
    return None if reason is None else _Why(reason, passes)


def _architecture(gpu: model.Gpu) -> str:
    return gpu.architecture or ".".join(map(str, gpu.compute_capability or ()))


def _divided(gpu: model.Gpu) -> bool:
    return gpu.mig_mode is not None and gpu.mig_mode.current


def _is_older(version: str) -> bool:
    major = version.partition(".")[0]
    return major.isascii() and major.isdecimal() and int(major) < MEMORY_LIMITS_DRIVER


def _clients(driver: model.NvidiaDriver | None) -> int:
    if driver is None or driver.cuda_version is None or driver.cuda_version < _MORE_CLIENTS_CUDA:
        return abilities.MPS_CLIENTS
    return _MORE_CLIENTS
