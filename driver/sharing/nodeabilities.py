# SPDX-License-Identifier: Apache-2.0
"""What a node can enforce of the shares of a GPU, from what was read of it and of the programs beside the driver. Pure.

- Memory by cgroup: NVML's memory limits (driver 615 and newer), cgroup v2, no MIG (NVIDIA, "MPS v3 Memory Partitioning").
- MPS v3 and legacy MPS: limits of a client need Volta or newer. A program that forgets its MPS gets no GPU only where the compute mode
  is EXCLUSIVE_PROCESS, which a MIG instance has not (nvmlDeviceSetComputeMode): there MPS is cooperative at most.
- Turns of a set length: nvidia-smi of the driver root (compute-policy), Volta or newer, and never of a MIG instance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from discovery import model
from driver.sharing import abilities
from driver.sharing.abilities import Abilities
from driver.sharing.shares import Compute, Memory

MEMORY_LIMITS_DRIVER = 615
"""The first driver that limits the memory of cgroups."""

_VOLTA = (7, 0)
_MORE_CLIENTS_CUDA = (13, 1)
_MORE_CLIENTS = 60
"""MPS documentation, Client-Server Connection Limits: 60 contexts a device, 48 on CUDA 13.0 and before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is beside the driver: for each, why it cannot be had, in a sentence that says what would help, None where it can.
    `mps_passing`: MPS may be had again without anybody doing anything.
    """

    mps_v3: str | None
    mps_legacy: str | None
    time_slices: str | None
    mps_passing: bool = False


def node_abilities(gpu: model.Gpu, snapshot: model.Snapshot, means: Means) -> Abilities:
    """What can be enforced of the shares of a GPU, or, where it is divided by MIG, of its instances."""
    if gpu.state is not model.GpuState.READY:
        away = abilities.without(f"the GPU cannot be used now ({gpu.state})", passing=True)
        return replace(away, mps_clients=_clients(snapshot.nvidia_driver))
    mps, legacy, turns = _mps_v3(gpu, means), _mps_legacy(gpu, means), _turns(gpu, means)
    by_cgroup = _cgroup(gpu, snapshot)
    memory = {Memory.CGROUP: by_cgroup, Memory.MPS: mps, Memory.COOPERATIVE: legacy}
    compute = {Compute.MPS: mps, Compute.COOPERATIVE: legacy, Compute.TIMESLICE: turns}
    v3 = means.mps_passing and mps is not None and mps == means.mps_v3
    v2 = means.mps_passing and legacy is not None and legacy == means.mps_legacy
    return Abilities(
        memory={level: why for level, why in memory.items() if why is not None},
        compute={level: why for level, why in compute.items() if why is not None},
        passing_memory=frozenset((*((Memory.MPS,) if v3 else ()), *((Memory.COOPERATIVE,) if v2 else ()))),
        passing_compute=frozenset((*((Compute.MPS,) if v3 else ()), *((Compute.COOPERATIVE,) if v2 else ()))),
        mps_clients=_clients(snapshot.nvidia_driver),
    )


def _cgroup(gpu: model.Gpu, snapshot: model.Snapshot) -> str | None:
    if _divided(gpu):
        return "the driver limits the memory of no MIG instance by cgroup"
    reasons = []
    driver = snapshot.nvidia_driver
    old = driver is not None and _is_older(driver.version)
    if driver is not None and old and not gpu.memory_limits:
        reasons.append(
            f"driver {driver.version} is older than {MEMORY_LIMITS_DRIVER}, which brought memory limits of cgroups"
        )
    if snapshot.host.cgroup == 1:
        reasons.append(
            "this node has cgroup v1, and it takes v2: boot it with systemd.unified_cgroup_hierarchy=1, or use a newer system"
        )
    elif snapshot.host.cgroup is None and not reasons:
        reasons.append(
            "it is not known that this node has cgroup v2: is the host's /sys/fs/cgroup visible to the agent?"
        )
    if not reasons and not gpu.memory_limits:
        reasons.append(
            "the driver has no memory limits for this GPU"
            if gpu.memory_limits is False
            else "the driver does not tell whether it limits the memory of cgroups on this GPU"
        )
    return ", and ".join(reasons) or None


def _mps_v3(gpu: model.Gpu, means: Means) -> str | None:
    if _divided(gpu):
        return (
            "a program on a MIG instance can leave MPS, as an instance has no exclusive compute mode: by MPS it is cooperative at"
            " most"
        )
    return _no_clients(gpu) or means.mps_v3


def _mps_legacy(gpu: model.Gpu, means: Means) -> str | None:
    return _no_clients(gpu) or means.mps_legacy


def _no_clients(gpu: model.Gpu) -> str | None:
    """Why MPS does not hold its clients to a share of this GPU, whatever the supervisor can do."""
    if gpu.compute_capability is None:
        return "the compute capability of this GPU is not known, and MPS has limits from Volta (7.0) on"
    if gpu.compute_capability < _VOLTA:
        return f"MPS has limits from Volta on, and this GPU is older ({gpu.architecture or _spelt(gpu.compute_capability)})"
    if gpu.compute_mode is None and not _divided(gpu):
        return "the driver does not tell the compute mode of this GPU, which has to be exclusive where MPS shares it"
    return None


def _turns(gpu: model.Gpu, means: Means) -> str | None:
    if _divided(gpu):
        return "the turns at a MIG instance cannot be set"
    if gpu.compute_capability is not None and gpu.compute_capability < _VOLTA:
        return (
            "the driver sets turns from Volta on, and this GPU is older"
            f" ({gpu.architecture or _spelt(gpu.compute_capability)})"
        )
    return means.time_slices


def _divided(gpu: model.Gpu) -> bool:
    return gpu.mig_mode is not None and gpu.mig_mode.current


def _is_older(version: str) -> bool:
    major = version.partition(".")[0]
    return major.isascii() and major.isdecimal() and int(major) < MEMORY_LIMITS_DRIVER


def _clients(driver: model.NvidiaDriver | None) -> int:
    if driver is None or driver.cuda_version is None or driver.cuda_version < _MORE_CLIENTS_CUDA:
        return abilities.MPS_CLIENTS
    return _MORE_CLIENTS


def _spelt(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
