# SPDX-License-Identifier: Apache-2.0
"""What a GPU can be divided into, and what it is divided into: the values of Multi-Instance GPU. Pure.

A GPU instance takes memory slices in a row, and multiprocessors and engines from what the whole GPU has. Programs use it
through a compute instance, which may take all of it or a part; only GPU instances with one that takes all are offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from discovery.address import PciAddress

ENGINES = ("copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")
"""Fields of a MigProfile that count engines."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MigPlacement:
    """Memory slices in a row: `size` of them from `start` (nvmlGpuInstancePlacement_t)."""

    start: int
    size: int

    @property
    def slices(self) -> range:
        """The numbers of the memory slices."""
        return range(self.start, self.start + self.size)

    def overlaps(self, other: MigPlacement) -> bool:
        """Whether both need one memory slice."""
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A GPU instance profile of a GPU, taken whole by one compute instance (nvmlGpuInstanceProfileInfo_t). `name` is as
    `nvidia-smi mig -lgip` prints it without `MIG`, such as `1g.10gb+me`.
    """

    id: int
    """The id that NVML returns: what nvidia-smi prints and takes, and what GPU instances are created by."""
    number: int
    """NVML_GPU_INSTANCE_PROFILE_*: the number by which the profile was asked for."""
    compute_number: int
    """NVML_COMPUTE_INSTANCE_PROFILE_* of the compute instance that takes all of it."""
    name: str
    slices: int
    """Compute slices: the number before the `g`."""
    memory_bytes: int
    multiprocessors: int
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0
    instances: int
    """The most instances of it at once."""
    placements: tuple[MigPlacement, ...] = ()
    """All that the GPU allows, whatever is there now, in order of start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityNode:
    """A character device below /dev/nvidia-caps, whose possession is the right to use an instance. `path` as in a container."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A GPU instance that exists. `uuid` and `compute_instance` are those of the one compute instance that takes all of it; None
    where it has none, several, or a smaller one: it is then not `whole`, and cannot be handed out.
    """

    gpu_instance: int
    profile_id: int
    placement: MigPlacement
    compute_instance: int | None = None
    uuid: str | None = None
    nodes: tuple[CapabilityNode, ...] = ()
    """Of the GPU instance and of the compute instance; empty where they could not be read."""

    @property
    def whole(self) -> bool:
        """Whether it can be handed out."""
        return self.compute_instance is not None and self.uuid is not None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Partition:
    """A place on a GPU for an instance of a profile; there may be one or not."""

    gpu: PciAddress
    profile_id: int
    start: int


class Toggle(StrEnum):
    """Whether the MIG mode of a GPU can be changed while the node runs, see `toggle_of`."""

    AT_NEED = "at-need"
    NEVER = "never"


_RESET_NEEDED = frozenset({"Ampere"})


def toggle_of(architecture: str | None) -> Toggle:
    """Ampere changes its MIG mode by a reset, which NVML has no call for; from Hopper on the mode changes at once while no
    program uses the GPU (MIG User Guide, "Enable MIG Mode"). An architecture that is not known is left alone.
    """
    return Toggle.NEVER if architecture is None or architecture in _RESET_NEEDED else Toggle.AT_NEED


def memory_slices(profiles: tuple[MigProfile, ...]) -> int:
    """How many memory slices a GPU with these profiles has."""
    return max((place.start + place.size for profile in profiles for place in profile.placements), default=0)
