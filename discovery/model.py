# SPDX-License-Identifier: Apache-2.0
"""The values discovery speaks in: one `Snapshot` of a node, frozen, complete, without any reference to where it was read.

Everywhere: None means unknown or not there, never 0, -1 or "N/A". Sequences are tuples in a stable order (PCI address,
link number). Sizes are bytes, link speeds GT/s, network rates Mbit/s. Addresses are `address.PciAddress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from discovery import limits, mig
from discovery.address import HostBridge, PciAddress

SNAPSHOT_VERSION = 1
"""Schema version of the Snapshot's JSON (codec.py). Raised when a field changes meaning; adding a field does not raise it."""


class Origin(StrEnum):
    """Where a Snapshot comes from. Anything but THIS_NODE describes a machine that nobody may act upon."""

    THIS_NODE = "this-node"
    RECORDING = "recording"


class Provenance(StrEnum):
    """Which source a fact comes from."""

    SYSFS = "sysfs"
    NVML = "nvml"
    OVERLAY = "overlay"


class Severity(StrEnum):
    """How much a Finding matters: `info` explains, `warning` costs something, `error` takes a device out of use."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """Something odd that a person should be able to see. `code` is stable and made for machines (`numa-unknown`);
    `subject` names the object (an address, a path, `nvml`); `message` says what was found and what to do next.
    """

    code: str
    severity: Severity
    subject: str
    message: str


class PathClass(StrEnum):
    """How two PCI functions reach each other, in the vocabulary of `nvidia-smi topo -m`, nearest first.

    PIX: at most one PCIe switch. PXB: several switches, no host bridge. PHB: through one host bridge. NODE: between
    host bridges of one NUMA node. SYS: between NUMA nodes. UNKNOWN: the host bridges differ and a NUMA node is unknown.
    """

    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The link from a function up to its port. Width in lanes, speed in GT/s. A GPU lowers its speed when idle."""

    max_width: int | None = None
    current_width: int | None = None
    max_speed_gts: float | None = None
    current_speed_gts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimit:
    """The slowest PCIe link between a function and its host bridge. `at` is the function at the link's lower end; `width` the
    lanes in use; `speed_gts` the best speed that both ends can, as an idle device lowers the current one.
    """

    at: PciAddress
    width: int
    speed_gts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One PCI function and its place in the machine, as sysfs shows it (Documentation/ABI/testing/sysfs-bus-pci)."""

    address: PciAddress
    vendor_id: int
    device_id: int
    class_code: int
    """24 bits: base class, subclass, interface."""
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    host_bridge: HostBridge | None = None
    """The host bridge directory nearest above the function, whatever stands above that (VMD, VMBus)."""
    pcie_root: HostBridge | None = None
    """The value for `resource.kubernetes.io/pcieRoot`: known only where the path starts at `/sys/devices/pci...`."""
    bridges: tuple[PciAddress, ...] = ()
    """The PCI bridges between host bridge and function, outermost first, the function itself left out."""
    switch: PciAddress | None = None
    """Upstream port of the innermost PCIe switch above the function; of a group from an overlay, its lowest function."""
    switches: tuple[PciAddress, ...] = ()
    """Upstream ports of all PCIe switches above the function, innermost first. A part that shows itself as two levels is one."""
    switch_source: Provenance | None = None
    """Where `switches` comes from; None when there are none."""
    numa_node: int | None = None
    numa_source: Provenance | None = None
    cpu_socket: int | None = None
    """Physical package of the CPUs of `numa_node` when they all share one."""
    cpus: tuple[int, ...] | None = None
    """CPUs near the function (local_cpulist); None when the NUMA node is unknown, as the kernel then lists all CPUs."""
    iommu_group: int | None = None
    iommu_type: str | None = None
    driver: str | None = None
    link: PcieLink | None = None
    narrowest: LinkLimit | None = None
    """None when a link on the way up is not known, and for bridges."""
    physical_function: PciAddress | None = None
    """The PF of an SR-IOV virtual function."""


class PortType(StrEnum):
    """Device/port type of the PCI Express capability (PCIe base specification, 7.5.3.2)."""

    ROOT = "root-port"
    UPSTREAM = "upstream-port"
    DOWNSTREAM = "downstream-port"
    PCIE_TO_PCI = "pcie-to-pci"
    PCI_TO_PCIE = "pci-to-pcie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A PCI-to-PCI bridge function above a device of the Snapshot; others are not read, because reading the configuration
    space of an idle port wakes it. `port_type_inferred` is True when the configuration space was not readable and
    the type follows from the place in the chain (one root port, then pairs of upstream and downstream ports).
    """

    pci: PciFunction
    port_type: PortType | None = None
    port_type_inferred: bool = False
    redirects: bool | None = None
    """Whether it sends peer-to-peer requests from below up to the root complex (ACS P2P Request Redirect, PCIe base
    specification 7.7.11). False also where it has no ACS capability; None when that is not readable, or an egress control
    vector decides. Root ports and downstream ports have a use for it, see peering.py.
    """


class GpuState(StrEnum):
    """Whether a GPU can be handed out, and if not, why not. Only READY GPUs have the facts that NVML gives."""

    READY = "ready"
    LOST = "lost"
    """NVML says NVML_ERROR_GPU_IS_LOST, or the function left the bus."""
    UNREADABLE = "unreadable"
    """Bound to the NVIDIA driver, but NVML does not give UUID, memory and product."""
    NO_DRIVER = "no-driver"
    VFIO = "vfio"
    FOREIGN_DRIVER = "foreign-driver"
    """Bound to another driver, such as nouveau."""


class RemoteKind(StrEnum):
    """What an NVLink ends in (nvmlIntNvLinkDeviceType_t)."""

    GPU = "gpu"
    SWITCH = "switch"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU. `version` is the generation (NVLink 4 is 4). `remote` is known for peers with a PCI address; links
    to an NVSwitch may not give one.
    """

    link: int
    active: bool
    version: int | None = None
    remote_kind: RemoteKind | None = None
    remote: PciAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """GPU fabric registration (nvmlDeviceGetGpuFabricInfoV). `state` is not_supported, not_started, in_progress or
    completed; UUID and clique are known only when completed with success.
    """

    state: str
    cluster_uuid: str | None = None
    clique_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigMode:
    """MIG mode now and after the next reset. None in `Gpu.mig_mode` where the GPU has no MIG."""

    current: bool
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPairing:
    """The NIC chosen for a GPU, and all that are equally near. `name` is the RDMA device, else the network interface;
    None when the NIC shows neither (it may have moved into a pod).
    """

    address: PciAddress
    distance: PathClass
    name: str | None = None
    ties: tuple[PciAddress, ...] = ()
    rail: int | None = None
    data_direct: PciAddress | None = None
    """The NIC's DMA function that stands beside the GPU, by which `distance` is meant; None where the NIC itself does."""
    direct: bool | None = None
    """Whether what the NIC, or that function, sends to the GPU stays below the host bridge; see `Path.direct`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroups:
    """The groups a GPU belongs to; each is named by the lowest PCI address in it. None where it belongs to none.

    `nvlink_domain`: connected by NVLink, through switches or not. `nvlink_clique`: every two of it have an NVLink path
    of their own; there whenever `nvlink_domain` is. `aligned_pair`, `aligned_quad`: best sets of two and four.
    """

    nvlink_domain: PciAddress | None = None
    nvlink_clique: PciAddress | None = None
    aligned_pair: PciAddress | None = None
    aligned_quad: PciAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU. `pci` and `state` are always there; the rest as far as NVML and procfs gave it."""

    pci: PciFunction
    state: GpuState
    state_reason: str | None = None
    """One sentence for a person; None when READY."""
    uuid: str | None = None
    minor: int | None = None
    """The number in /dev/nvidia<minor>."""
    product: str | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    mig_mode: MigMode | None = None
    mig_profiles: tuple[mig.MigProfile, ...] = ()
    """What it can be divided into, in order of id; whether MIG is enabled or not."""
    mig_instances: tuple[mig.MigInstance, ...] | None = None
    """The GPU instances that exist, in order of placement; None where MIG is not enabled, or they could not be read."""
    memory_limits: bool | None = None
    """Whether the driver limits how much of its memory a cgroup may have (nvmlDeviceSetMemoryLimits_v1)."""
    compute_mode: limits.ComputeMode | None = None
    memory_numa_node: int | None = None
    """The NUMA node that its memory is, on systems whose CPUs address it (Grace); has nothing to do with CPU affinity."""
    c2c: bool | None = None
    """Whether it reaches its CPU by NVLink-C2C (nvmlDeviceGetC2cModeInfoV)."""
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    groups: GpuGroups = field(default_factory=GpuGroups)
    nic: NicPairing | None = None
    """None: there is no NIC on this node, or none of the GPU's paths to one is known."""

    @property
    def address(self) -> PciAddress:
        """Its PCI address."""
        return self.pci.address


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """A netdev as this network namespace shows it; it disappears when a pod takes it, so nothing is decided by it."""

    name: str
    operstate: str | None = None
    speed_mbps: int | None = None
    link_type: int | None = None
    """ARPHRD number: 1 Ethernet, 32 InfiniBand."""
    mtu: int | None = None
    master: str | None = None
    """The bond or bridge that it belongs to."""
    vlans: tuple[str, ...] = ()
    """The VLAN interfaces on it, or on its master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device, in the words of /sys/class/infiniband/<device>/ports/<port>."""

    port: int
    state: str | None = None
    physical_state: str | None = None
    link_layer: str | None = None
    rate_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device of a NIC function."""

    name: str
    ports: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network function: PCI class 02, or any function with an RDMA device."""

    pci: PciFunction
    interfaces: tuple[NetworkInterface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    rail: int | None = None
    rail_source: Provenance | None = None
    """OVERLAY when a person gave the rail; SYSFS when it was counted from the order of the NICs."""
    management: bool | None = None
    """Whether the node's default route leaves by it, or by a bond, bridge or VLAN above it; None when routes cannot be read."""
    data_direct: PciFunction | None = None
    """Its DMA function in the PCIe tree of a GPU (ConnectX-8 Data Direct), found by the vital product data of both."""

    @property
    def address(self) -> PciAddress:
        """Its PCI address."""
        return self.pci.address

    @property
    def name(self) -> str | None:
        """The RDMA device, else the network interface, else None."""
        if self.rdma_devices:
            return self.rdma_devices[0].name
        return self.interfaces[0].name if self.interfaces else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """An NVMe controller function and the names of its controllers (`nvme0`)."""

    pci: PciFunction
    controllers: tuple[str, ...] = ()

    @property
    def address(self) -> PciAddress:
        """Its PCI address."""
        return self.pci.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The path between two devices, `a` < `b`. `nvlinks`: active NVLinks between two GPUs (0: none). There is a path between
    every two GPUs, NICs and NVMe controllers, but for virtual functions, which share those of their physical function.

    `direct`: whether PCIe traffic between them stays below the host bridge, both ways. False where the path crosses a host
    bridge, or a port of the switch where it turns redirects to the root complex (ACS), however near the class says they are;
    None when that is not known.
    """

    a: PciAddress
    b: PciAddress
    path_class: PathClass
    nvlinks: int = 0
    direct: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node. `cpus` is empty for a memory-only node. `distances`: node id -> SLIT distance."""

    node: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect:
    """What a NIC needs on this host to read and write GPU memory itself. `peer_memory`: the kernel module for it that is
    loaded (`nvidia_peermem`, `nv_peer_mem`), None when none is. `dma_buf`: whether kernel and NVIDIA driver export GPU memory
    as dma-buf; None when they do not say enough.
    """

    peer_memory: str | None = None
    dma_buf: bool | None = None


class MemoryAccounting(StrEnum):
    """Who counts the GPU memory of cgroups (NVIDIA, "MPS v3 Memory Partitioning", backends)."""

    DMEM = "dmem"
    """The kernel's controller of device memory: a limit stands in files of the cgroup, and counts all that is below it."""
    MISC = "misc"
    """The driver itself, by the nearest cgroup that has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine itself. `sockets`: physical package -> its online CPUs; empty where the kernel tells none."""

    boot_id: str | None = None
    kernel: str | None = None
    memory_bytes: int | None = None
    online_cpus: tuple[int, ...] = ()
    sockets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    vendor: str | None = None
    product: str | None = None
    gpu_direct: GpuDirect = field(default_factory=GpuDirect)
    cgroup: int | None = None
    """The version of cgroups that processes are in: 2, or 1, also where a hierarchy of version 2 stands beside those of 1."""
    memory_accounting: MemoryAccounting | None = None
    """None where no NVIDIA driver counts it, or it is not known which way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDriver:
    """The NVIDIA driver in use. `cuda_version` is the newest CUDA it supports, (major, minor)."""

    version: str
    cuda_version: tuple[int, int] | None = None
    nvml_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One complete reading of a node. `taken_at` is when the reading began, in seconds since the epoch, so that all
    that was done before is in it; it is no part of the content: `codec.same_content` leaves it out. The paths between its devices follow from it (paths.py).
    """

    origin: Origin
    taken_at: float
    host: Host
    nvidia_driver: NvidiaDriver | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nvswitches: tuple[PciFunction, ...] = ()
    nics: tuple[Nic, ...] = ()
    nvmes: tuple[Nvme, ...] = ()
    findings: tuple[Finding, ...] = ()

    def gpu(self, address: PciAddress) -> Gpu | None:
        """The GPU at an address, or None."""
        return next((gpu for gpu in self.gpus if gpu.pci.address == address), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """A cheap reading of a READY GPU for metrics (nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo_v2)."""

    address: PciAddress
    utilization_ratio: float | None = None
    """0 to 1, over the driver's last sampling period."""
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What a rescan sees of one GPU: enough to notice that a full probe is needed, and whether the GPU still answers."""

    address: PciAddress
    state: GpuState
    state_reason: str | None = None
    driver: str | None = None
    uuid: str | None = None
    fabric: str | None = None
    """How far its registration with the GPU fabric is, which goes on for a while after the driver is there."""
    mig: str | None = None
    """A text that is another one whenever its MIG mode or its instances are; None where it has no MIG, or does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicReading:
    """The names by which a NIC can be seen: its first RDMA device, its first interface; None where it shows none now."""

    address: PciAddress
    rdma: str | None = None
    interface: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescan:
    """A cheap look at identity and state. `fingerprint` changes whenever a full probe could give another Snapshot in
    identity or locality (a function came or went, a driver was bound or unbound); it ignores link and port state, and the
    names of NICs, which come and go with pods: those are in `nics`.
    """

    gpus: tuple[GpuReading, ...]
    fingerprint: str
    nics: tuple[NicReading, ...] = ()
