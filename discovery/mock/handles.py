# SPDX-License-Identifier: Apache-2.0
"""What handles of NVML stand for, beside GPUs (PciAddress) and event sets: MIG devices, GPU instances, compute instances.

An instance that was removed and one made at its place since have the same id, and are not the same: a handle remembers the
serial too, and once its instance is gone it is invalid for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from discovery.address import PciAddress
from discovery.mock import abi, state
from discovery.mock.status import StatusError


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """nvmlGpuInstance_t."""

    pci: PciAddress
    id: int
    serial: int

    def found(self, gpu: state.Gpu) -> state.MigInstance:
        """The instance; an error once it is gone."""
        for instance in gpu.mig.instances if gpu.mig else ():
            if (instance.id, instance.serial) == (self.id, self.serial):
                return instance
        raise StatusError(abi.INVALID_ARGUMENT)


@dataclass(frozen=True, slots=True)
class ComputeInstance:
    """nvmlComputeInstance_t."""

    parent: GpuInstance
    id: int
    serial: int

    @property
    def pci(self) -> PciAddress:
        """The GPU."""
        return self.parent.pci

    def found(self, gpu: state.Gpu) -> tuple[state.MigInstance, state.MigComputeInstance]:
        """The instance and that which it is in; an error once one of them is gone."""
        parent = self.parent.found(gpu)
        for instance in parent.compute:
            if (instance.id, instance.serial) == (self.id, self.serial):
                return parent, instance
        raise StatusError(abi.INVALID_ARGUMENT)


@dataclass(frozen=True, slots=True)
class MigDevice:
    """nvmlDevice_t of a MIG device, which is another name for a compute instance."""

    instance: ComputeInstance

    @property
    def pci(self) -> PciAddress:
        """The GPU."""
        return self.instance.pci


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPart:
    """The part of a GPU that a MIG device is."""

    instance: state.MigInstance
    compute: state.MigComputeInstance


def of_instance(gpu: state.Gpu, instance: state.MigInstance) -> GpuInstance:
    """The key of the handle of a GPU instance."""
    return GpuInstance(gpu.pci, instance.id, instance.serial)


def of_compute(gpu: state.Gpu, instance: state.MigInstance, compute: state.MigComputeInstance) -> ComputeInstance:
    """The key of the handle of a compute instance."""
    return ComputeInstance(of_instance(gpu, instance), compute.id, compute.serial)


def mig_devices(gpu: state.Gpu) -> tuple[MigPart, ...]:
    """The MIG devices of a GPU in the order of their index: by the ids of GPU and compute instance, without gaps."""
    return tuple(
        MigPart(instance=instance, compute=compute)
        for instance in (gpu.mig.instances if gpu.mig else ())
        for compute in instance.compute
    )
