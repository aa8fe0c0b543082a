# SPDX-License-Identifier: Apache-2.0
"""The document `Machine`: a node as people describe it. Models only; `pcitree` and `expand` give them meaning.

    apiVersion: mock.nearfield.dev/v1alpha1
    kind: Machine
    name: two-gpus
    host: {vendor: Example, product: Example 2, cpu: Example CPU, rootPort: intel-sapphire-rapids-root-port}
    driver: {version: 580.95.05, cuda: "13.0"}
    numa:
      nodes: [{node: 0, socket: 0, cpus: "0-31", memory: 256GiB}]
    pci:
      - root: "0000:15"
        numa: 0
        ports:
          - switch: broadcom-pex890xx
            ports: [{gpu: nvidia-l40s}, {gpu: nvidia-l40s}, {nic: connectx-7-200g}]

Bus numbers, names (`gpu0`, `nic0`, ... in order of PCI address), UUIDs, MACs and GUIDs follow from the document; `bus`, `at`
and `name` set them where a real machine's are known. Parts come from products.yaml or from `products` of the document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PlainValidator, model_validator
from pydantic.alias_generators import to_camel

from discovery.mock import fault
from discovery.mock import network as networks
from discovery.mock import products as parts
from discovery.mock.products import Bus, LinkLayer, Model, Numbers, Size, Version, Width

_ROOT = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2})")
_AT = re.compile(r"([0-9a-f]{2})\.([0-7])")
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
NAME = "^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"

KINDS = ("gpu", "nic", "nvme", "device", "switch")
"""What can stand in a slot."""


class DevFn(NamedTuple):
    """Device and function number on a bus."""

    device: int
    function: int


class RootBus(NamedTuple):
    """Domain and first bus of a root complex."""

    domain: int
    bus: int


def _root(value: object) -> object:
    match = _ROOT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is no root bus; write domain and bus as "0000:15", in quotes')
    return RootBus(int(match[1], 16), int(match[2], 16))


def _at(value: object) -> object:
    match = _AT.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1], 16) > 0x1F:
        raise ValueError(f'{value!r} is no place on a bus; write device and function as "01.0", in quotes')
    return DevFn(int(match[1], 16), int(match[2]))


class Host(Model):
    """The machine around the devices. `threads` and `siblings` say how CPU numbers are laid over cores."""

    vendor: str | None = None
    product: str | None = None
    architecture: Literal["x86_64", "aarch64"] = "x86_64"
    kernel: str = "6.8.0"
    cpu: str
    threads: int = Field(default=1, ge=1, le=8)
    siblings: Literal["split", "adjacent"] = "split"
    """`split`: a node's CPUs are first all first threads, then all second ones (x86). `adjacent`: thread by thread."""
    packages: bool = True
    """Whether the firmware tells sockets: without, physical_package_id reads -1, as in many VMs."""
    offline: Numbers = ()
    """CPUs that are there and switched off; none of a node's `cpus`."""
    root_port: str | None = None
    """Product of root ports that name none."""
    iommu: Literal["off", "DMA", "DMA-FQ", "identity"] = "DMA-FQ"
    cgroup: Literal["v1", "v2"] | None = None
    """The version of cgroups; without it no hierarchy is mounted."""
    memory_accounting: Literal["dmem", "misc"] | None = None
    """Who counts the GPU memory of cgroups of version 2: the kernel's controller, or the driver itself, as it does from 615 on where
    the kernel has none.
    """
    acs_redirect: bool = False
    """Whether ports send peer-to-peer requests to the root complex: what the kernel sets where it finds an IOMMU and neither
    `pci=disable_acs_redir` nor the firmware or a service of the maker keeps it from that.
    """


class MigTimes(Model):
    """How many seconds it takes to make a GPU instance with its compute instance, to remove one, and to change the MIG mode."""

    create: float = Field(default=0.0, ge=0, le=600)
    destroy: float = Field(default=0.0, ge=0, le=600)
    mode: float = Field(default=0.0, ge=0, le=600)


class Driver(Model):
    """The loaded NVIDIA driver. Without it no function is bound to it and there is no NVML."""

    version: str = Field(pattern=r"^[0-9]+(\.[0-9]+){1,2}$")
    cuda: Version
    open_kernel_module: bool = True
    """Whether its kernel modules are the open ones, which GPUs before Turing cannot have."""
    peer_memory: bool = False
    """Whether nvidia_peermem is loaded."""
    mig_times: MigTimes = MigTimes()


class NumaNode(Model):
    """A NUMA node, or several (`nodes`) of which the first has the memory, as a GPU gives them to the kernel."""

    node: int | None = Field(default=None, ge=0, lt=1024)
    nodes: Numbers | None = None
    socket: int | None = Field(default=None, ge=0)
    die: int = Field(default=0, ge=0)
    cpus: Numbers = ()
    memory: Size = 0
    gpu: str | None = None
    """The GPU whose memory it is."""

    @model_validator(mode="after")
    def _one_or_several(self) -> NumaNode:
        if (self.node is None) == (not self.nodes):
            raise ValueError("give either node or nodes")
        if self.cpus and self.socket is None:
            raise ValueError("a node with CPUs needs its socket")
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """The numbers of its nodes."""
        return self.nodes or (self.node or 0,)


class Numa(Model):
    """The nodes, and the firmware's distances between the entries of the list; `within` is between the nodes of one entry."""

    nodes: tuple[NumaNode, ...]
    distances: tuple[tuple[int, ...], ...] | None = None
    within: int = Field(default=10, ge=10, le=255)

    @model_validator(mode="after")
    def _square(self) -> Numa:
        size = len(self.nodes)
        if self.distances is None:
            if size > 1:
                raise ValueError("several nodes need their distances")
        elif len(self.distances) != size or any(len(row) != size for row in self.distances):
            raise ValueError(f"distances is no table of {size} rows of {size} numbers")
        elif any(not 10 <= value <= 255 for row in self.distances for value in row):
            raise ValueError("a distance is not between 10 and 255")
        ids = [node for entry in self.nodes for node in entry.ids]
        cpus = [cpu for entry in self.nodes for cpu in entry.cpus]
        if len(set(ids)) != len(ids) or len(set(cpus)) != len(cpus):
            raise ValueError("a node or a CPU appears twice")
        if not cpus:
            raise ValueError("no node has CPUs")
        return self


class Port(Model):
    """One port of a NIC, in the order of its functions; what is not said follows from the product."""

    interface: str | None = Field(default=None, pattern=r"^[^/\s.][^/\s]{0,14}$")
    rdma: str | None = Field(default=None, pattern=r"^[^/\s.][^/\s]{0,62}$")
    link: LinkLayer | None = None
    rate: int | None = Field(default=None, ge=1)
    up: bool = True


class LinkNow(Model):
    """What the PCIe link has trained to, where that is less than both ends can."""

    generation: parts.Generation | None = None
    width: Width | None = None


class MigInstance(Model):
    """A GPU instance that exists: the name of its profile, and the memory slice where it begins."""

    profile: str = Field(min_length=1)
    start: int = Field(ge=0)
    compute: tuple[str, ...] | None = Field(default=None, max_length=8)
    """Names of its compute instances, first slice first; without it one that takes all."""


class Slot(Model):
    """A place on a bus: a device, or a port with one device or one switch behind it."""

    at: Annotated[DevFn, PlainValidator(_at, json_schema_input_type=parts.text(f"^{_AT.pattern}$"))] | None = None
    """Device and function of the port (below `ports`), or of the device itself (in `devices` of a root)."""
    bus: Bus | None = None
    """The bus behind the port."""
    port: str | None = None
    """Product of the port, where it is not the root's or the switch's."""
    slot: str | None = Field(default=None, pattern=NAME)
    """The name of the hot-plug slot that the port has."""
    name: str | None = Field(default=None, pattern=NAME)
    gpu: str | None = None
    nic: str | None = None
    nvme: str | None = None
    device: str | None = None
    switch: str | None = None
    ports: tuple[Slot, ...] = ()
    functions: tuple[Port, ...] | None = None
    driver: str | None = None
    """The bound driver in place of the usual one; `none` for no driver."""
    numa: int | None = Field(default=None, ge=-1)
    link: LinkNow | None = None
    acs_redirect: bool | None = None
    """Of the port, where it is not as the host's."""
    vpd: str | None = Field(default=None, pattern=NAME)
    """A word for the card. Functions with the same word show the same vital product data; without it they have none."""
    virtual_functions: int = Field(default=0, ge=0)
    """How many SR-IOV virtual functions are switched on, of each function."""
    minor: int | None = Field(default=None, ge=0, le=254)
    module_id: int | None = Field(default=None, ge=0)
    mig_mode: bool = False
    """Whether MIG is enabled."""
    mig_instances: tuple[MigInstance, ...] = Field(default=(), max_length=8)
    root: RootComplex | None = None
    """A root complex that the device makes, with a PCI domain of its own (Intel VMD)."""

    @model_validator(mode="after")
    def _fits(self) -> Slot:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(f"a slot holds one thing, not {' and '.join(given)}")
        kind = given[0] if given else "empty slot"
        for key, owner in (
            ("ports", "switch"),
            ("functions", "nic"),
            ("vpd", "nic or device"),
            ("virtual_functions", "nic or gpu"),
            ("minor", "gpu"),
            ("module_id", "gpu"),
            ("mig_mode", "gpu"),
            ("mig_instances", "gpu"),
            ("root", "device"),
        ):
            if getattr(self, key) and kind not in owner.split(" or "):
                raise ValueError(f"{kind} takes no {to_camel(key)}; only {owner} does")
        if self.mig_instances and not self.mig_mode:
            raise ValueError("migInstances need migMode: true")
        return self

    @property
    def kind(self) -> str | None:
        """Which of KINDS it holds."""
        return next((kind for kind in KINDS if getattr(self, kind) is not None), None)


class RootComplex(Model):
    """A host bridge: its root bus, root ports with what hangs on them, and devices on the root bus itself."""

    root: Annotated[RootBus, PlainValidator(_root, json_schema_input_type=parts.text(f"^{_ROOT.pattern}$"))]
    numa: int | None = Field(default=None, ge=0)
    """None: the firmware does not say, numa_node reads -1."""
    under: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9:._-]*(/[A-Za-z0-9][A-Za-z0-9:._-]*)*$")
    """Where in /sys/devices the host bridge stands, if not at the top (Hyper-V's VMBus)."""
    ports: tuple[Slot, ...] = ()
    devices: tuple[Slot, ...] = ()


class Pair(Model):
    """NVLinks between two GPUs."""

    between: tuple[str, str]
    links: int = Field(ge=1)


class Switched(Model):
    """NVLinks of every GPU to NVSwitches. `links`: how many to each switch; without `switches` they are outside the node."""

    switches: tuple[str, ...] = ()
    links: tuple[int, ...]

    @model_validator(mode="after")
    def _alike(self) -> Switched:
        if self.switches and len(self.switches) != len(self.links):
            raise ValueError("links needs one number for each of switches")
        return self


class Board(Switched):
    """NVLinks of some GPUs to the NVSwitches of the baseboard that they share."""

    gpus: tuple[str, ...] = Field(min_length=1)


class NvLink(Model):
    """The NVLink fabric. `boards`: several baseboards, whose NVSwitches are joined to one fabric (DGX-2)."""

    switched: Switched | None = None
    boards: tuple[Board, ...] = ()
    pairs: tuple[Pair, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> NvLink:
        if [self.switched is not None, bool(self.boards), bool(self.pairs)].count(True) != 1:
            raise ValueError("give one of switched, boards and pairs")
        gpus = [gpu for board in self.boards for gpu in board.gpus]
        if len(set(gpus)) != len(gpus):
            raise ValueError("a GPU is on two boards, or twice on one")
        return self


class Fabric(Model):
    """What the GPUs registered with their fabric manager."""

    state: Literal["not_started", "in_progress", "completed"] = "completed"
    cluster_uuid: str | None = Field(default=None, pattern=_UUID)
    clique: int = Field(default=0, ge=0, lt=1 << 32)


class Fault(Model):
    """A fault, see `fault.Kind`. Times in seconds after the machine is put up; `at: [from, to]` is drawn by `seed`."""

    kind: fault.Kind
    target: str | None = None
    """A device's name or its PCI address."""
    at: float | tuple[float, float] = Field(default=0.0, union_mode="left_to_right")
    until: float | None = None
    xid: int | None = None
    link: int | None = None
    width: int | None = None
    node: int | None = None
    count: int | None = None
    temperature: int | None = None
    function: str | None = None
    after: bool | None = None
    """Whether the call does its work before the fault hits."""
    error: int | None = None
    signal: int | None = None


class Machine(Model):
    """The document."""

    api_version: Literal["mock.nearfield.dev/v1alpha1"]
    kind: Literal["Machine"]
    name: str = Field(pattern=NAME)
    description: str = ""
    host: Host
    driver: Driver | None = None
    numa: Numa
    pci: tuple[RootComplex, ...] = ()
    nvlink: NvLink | None = None
    fabric: Fabric | None = None
    network: networks.Network = networks.Network()
    products: parts.Products = parts.Products()
    mig: Mapping[str, tuple[MigInstance, ...]] = {}
    """GPUs with MIG enabled, by name, in place of what their slots say."""
    seed: int = 0
    faults: tuple[Fault, ...] = ()
