# SPDX-License-Identifier: Apache-2.0
"""What the NVIDIA driver of a recorded node knows: the state behind the NVML functions, keyed by field.

It is state and no log of calls: a function reads or changes fields, so calls that change hardware have their effect. A
field that is None makes its function answer NVML_ERROR_NOT_SUPPORTED. Numbers are NVML's own (nvml.h), not translated;
addresses are the kernel's spelling. The JSON form is `discovery.codec`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from discovery.address import PciAddress

NVLINK_REMOTE_HIDDEN = "FFFFFFFF:FF:FF.0"
"""nvmlPciInfo_t.busId of an NVLink whose other end has no PCI function on this node (an NVSwitch outside the chassis)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The driver itself. `cuda_version` is major * 1000 + minor * 10, as nvmlSystemGetCudaDriverVersion_v2 gives it."""

    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: int | None = None
    missing_functions: tuple[str, ...] = ()
    """Functions that this driver's library has not, of those that the mock has."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Functions without a GPU that fail, nvmlInitWithFlags among them: C name -> nvmlReturn_t."""
    privileged: bool = True
    """Whether the caller may change MIG, which needs root or /dev/nvidia-caps/nvidia-cap1, and all else that takes root."""
    memory_accounting: str | None = None
    """Who counts the memory of cgroups: the kernel's controller `dmem`, or the driver (`misc`); None: nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Frame buffer in bytes (nvmlMemory_v2_t); `total` includes `reserved`."""

    total: int
    reserved: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MigPlacement:
    """Slices in a row: memory slices of a GPU (nvmlGpuInstancePlacement_t), or compute slices of a GPU instance
    (nvmlComputeInstancePlacement_t).
    """

    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigComputeProfile:
    """A compute instance profile of GPU instances of one profile (nvmlComputeInstanceProfileInfo_v2_t). Its engines are all
    that the GPU instance has.
    """

    number: int
    """NVML_COMPUTE_INSTANCE_PROFILE_*, by which it is asked for."""
    id: int
    """By which compute instances are created."""
    name: str
    """As nvidia-smi prints it, without `MIG`: `1c.3g.40gb`, or as the GPU instance's where it takes all."""
    slices: int
    multiprocessors: int
    instances: int
    placements: tuple[MigPlacement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A GPU instance profile (nvmlGpuInstanceProfileInfo_v3_t) with its possible placements and compute instance profiles."""

    number: int
    """NVML_GPU_INSTANCE_PROFILE_*, by which it is asked for."""
    id: int
    """By which GPU instances are created; what nvidia-smi prints."""
    name: str
    """As nvidia-smi prints it, without `MIG`: `1g.10gb+me`."""
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0
    p2p: bool = False
    graphics: bool = False
    """Capabilities: `p2p` of the GPU instance (NVML_GPU_INSTANCE_PROFILE_CAPS_P2P), `graphics` of its compute instances
    (NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX).
    """
    instances: int
    placements: tuple[MigPlacement, ...] = ()
    compute: tuple[MigComputeProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MigComputeInstance:
    """A compute instance. `uuid` is that of its MIG device. `serial`: as of a GPU instance."""

    id: int
    profile_id: int
    placement: MigPlacement
    uuid: str
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A GPU instance. `serial` tells it from one that had its id before, for which a handle may still be held."""

    id: int
    profile_id: int
    placement: MigPlacement
    compute: tuple[MigComputeInstance, ...] = ()
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigTimes:
    """How long the hardware takes, in seconds: to make a GPU instance with its compute instance, to remove one, to change the
    mode.
    """

    create_s: float = 0.0
    destroy_s: float = 0.0
    mode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mig:
    """MIG mode, the most MIG devices (nvmlDeviceGetMaxMigDeviceCount), what the GPU can be divided into, and what it is
    divided into.
    """

    current: bool = False
    pending: bool = False
    max_devices: int
    profiles: tuple[MigProfile, ...] = ()
    """In order of `number`."""
    instances: tuple[MigInstance, ...] = ()
    times: MigTimes = MigTimes()
    made: int = 0
    """How many instances of both kinds the driver has made: the last serial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink. `version` is nvmlNvlinkVersion_t, `remote_type` nvmlIntNvLinkDeviceType_t, `capabilities` one bit per
    nvmlNvLinkCapability_t. `remote_bus_id` is nvmlPciInfo_t.busId.
    """

    active: bool
    version: int | None = None
    remote_type: int | None = None
    remote_bus_id: str | None = None
    capabilities: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """nvmlGpuFabricInfoV_t. `state`: 0 not supported, 1 not started, 2 in progress, 3 completed; `status` an nvmlReturn_t."""

    state: int
    status: int = 0
    cluster_uuid: str | None = None
    clique_id: int = 0
    health_mask: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    """ECC mode and counters since the driver was loaded and over the card's life."""

    current: bool = True
    pending: bool = True
    volatile_corrected: int = 0
    volatile_uncorrected: int = 0
    aggregate_corrected: int = 0
    aggregate_uncorrected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemappedRows:
    """nvmlDeviceGetRemappedRows."""

    corrected: int = 0
    uncorrected: int = 0
    pending: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie:
    """The PCIe link as NVML tells it."""

    generation: int
    width: int
    max_generation: int
    max_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What NVML says of a pair of GPUs. `ancestor`: nvmlGpuTopologyLevel_t; `p2p`: status per nvmlGpuP2PCapsIndex_t."""

    ancestor: int | None = None
    p2p: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A compute process on a GPU, or on one of its MIG devices (nvmlProcessInfo_t). `memory` in bytes."""

    pid: int
    memory: int = 0
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    """The limit of a cgroup that the driver keeps itself, in bytes. `device`, `inode` and `made` tell its folder from one that is made
    anew under the name, which has none. `hard` None: as much as there is.
    """

    path: str
    device: int
    inode: int
    made: int = 0
    """When, in ns, in a rendered tree: other than the kernel's cgroups, its files have the inodes of those before them."""
    soft: int = 0
    hard: int | None = None
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, in the order of NVML's index. `pci_device_id` and `pci_subsystem_id` hold the device in the upper 16 bits."""

    pci: PciAddress
    pci_device_id: int
    pci_subsystem_id: int = 0
    uuid: str | None = None
    minor: int | None = None
    name: str | None = None
    brand: int | None = None
    architecture: int | None = None
    compute_capability: tuple[int, int] | None = None
    cores: int | None = None
    memory: Memory | None = None
    mig: Mig | None = None
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    utilization: tuple[int, int] | None = None
    """Percent of time that the SMs and that memory were busy."""
    power_mw: int | None = None
    power_limit_mw: int | None = None
    temperature_c: int | None = None
    clocks_event_reasons: int | None = None
    ecc: Ecc | None = None
    remapped_rows: RemappedRows | None = None
    pcie: Pcie | None = None
    numa_node: int | None = None
    """The node of its own memory, where the driver gives that to the kernel (nvmlDeviceGetNumaNodeId)."""
    c2c: bool | None = None
    """Whether it reaches its CPU by NVLink-C2C (nvmlDeviceGetC2cModeInfoV)."""
    persistence_mode: bool | None = None
    compute_mode: int | None = None
    """nvmlComputeMode_t."""
    time_slice: int = 0
    """How long programs have their turn: 0 default, 1 short, 2 medium, 3 long (nvidia-smi compute-policy)."""
    cgroups: tuple[CgroupMemory, ...] = ()
    module_id: int | None = None
    """Its place on the board (nvmlDeviceGetModuleId)."""
    serial: str | None = None
    vbios: str | None = None
    supported_events: int | None = None
    processes: tuple[Process, ...] = ()
    peers: Mapping[PciAddress, Peer] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    """Functions that fail for this GPU: C name -> nvmlReturn_t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvml:
    """The driver and its GPUs."""

    system: System
    gpus: tuple[Gpu, ...] = ()
