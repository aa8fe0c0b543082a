# SPDX-License-Identifier: Apache-2.0
"""The devices of this node as they were last seen, and what is kept of one for a claim. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from discovery import mig, model
from discovery.address import PciAddress
from driver.prepare import claims, ledger, tenancy

_PASSING = frozenset({model.GpuState.NO_DRIVER, model.GpuState.UNREADABLE})
"""States of a GPU whose driver is being loaded, as after a reboot, when kubelet has pods prepared before it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """A published GPU as it was last seen. `divisible`: the agent divides it by MIG at need, and has to see that it is whole
    before it is used as a whole; `divided`: somebody else keeps MIG enabled on it.
    """

    name: str
    address: PciAddress
    state: model.GpuState
    reason: str | None = None
    uuid: str | None = None
    minor: int | None = None
    divisible: bool = False
    divided: bool = False
    toggle: bool = False
    """Whether the agent may change its MIG mode."""
    sharing: tenancy.Sharing | None = None
    """How it is given out in shares; None where it is given out whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDevice:
    """A place for a MIG instance on a GPU as it was last seen. `instance`: the one that was there then; `dynamic`: the agent makes
    one for a claim and removes it afterwards, otherwise what is there is used.
    """

    name: str
    gpu: GpuDevice
    partition: mig.Partition
    place: mig.MigPlacement
    instance: mig.MigInstance | None = None
    dynamic: bool = False
    sharing: tenancy.Sharing | None = None


Device = GpuDevice | PartitionDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class NotThere:
    """Why a device name stands for nothing now. `retryable`: it may soon."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a claim cannot be prepared. `retryable`: waiting may help. `look_again`: a new look at the hardware may, too."""

    message: str
    retryable: bool
    look_again: bool = False


def held(
    name: str, found: Device | NotThere, *, taken: bool, known: ledger.HeldDevice | None
) -> ledger.HeldDevice | Rejection:
    """What is kept of a device. `known`: what the record has of it, for admin access beside the one who has it."""
    if isinstance(found, NotThere):
        return Rejection(
            message=f"device {claims.shown(name)}: {found.reason}",
            retryable=found.retryable,
            look_again=found.retryable,
        )
    gpu = found if isinstance(found, GpuDevice) else found.gpu
    if gpu.state is not model.GpuState.READY or gpu.uuid is None or gpu.minor is None:
        passing = gpu.state in _PASSING
        return Rejection(
            message=f"device {name} is not usable ({gpu.state}): "
            f"{gpu.reason or 'its UUID or its minor number is not known'}",
            retryable=passing,
            look_again=passing,
        )
    nodes = (f"/dev/nvidia{gpu.minor}",)
    if isinstance(found, GpuDevice):
        if found.divided and taken:
            return Rejection(
                message=f"device {name} is not usable as a whole: MIG is enabled on it, and this GPU is not of mode "
                "mig-dynamic; disable MIG (`nvidia-smi -mig 0`), or change its sharing rule",
                retryable=False,
                look_again=True,
            )
        return ledger.HeldDevice(name=name, address=str(gpu.address), uuid=gpu.uuid, nodes=nodes)
    device = ledger.HeldDevice(name=name, address=str(gpu.address), uuid="", nodes=nodes, place=found.place)
    if found.dynamic and taken:
        return device
    if known is not None and known.uuid:
        return replace(device, uuid=known.uuid, caps=known.caps)
    if found.instance is None or not found.instance.whole:
        return Rejection(
            message=f"device {name}: there is no MIG instance at its place now"
            + ("" if taken else ", and admin access makes none"),
            retryable=True,
            look_again=True,
        )
    if not found.instance.nodes:
        return Rejection(message=without_nodes(name, found.instance), retryable=True, look_again=True)
    return with_instance(device, found.instance)


def with_instance(device: ledger.HeldDevice, instance: mig.MigInstance) -> ledger.HeldDevice:
    """The device with the instance that is at its place."""
    return replace(device, uuid=instance.uuid or "", caps=instance.nodes)


def without_nodes(name: str, instance: mig.MigInstance) -> str:
    """Why an instance is of no use whose capability nodes could not be read."""
    return (
        f"device {name}: the capability nodes of its MIG instance (GPU instance {instance.gpu_instance}) could not be read "
        "below /proc/driver/nvidia/capabilities: does the agent see the host's /proc?"
    )


def addresses(devices: Iterable[Device | NotThere]) -> Sequence[PciAddress]:
    """The GPUs that devices are, or are parts of."""
    return [
        device.address if isinstance(device, GpuDevice) else device.gpu.address
        for device in devices
        if not isinstance(device, NotThere)
    ]
