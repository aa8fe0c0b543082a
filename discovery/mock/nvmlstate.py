# SPDX-License-Identifier: Apache-2.0
"""From the tree of a Machine to the state behind NVML: what its driver would answer on an idle, healthy node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from discovery.address import PciAddress
from discovery.mock import abi, cgroupfiles, identity, machine, migstate, pcitree, state
from discovery.mock import products as parts
from discovery.mock.pcitree import Function, MachineError, PortType

_IDLE_POWER_SHARE = 10
"""An idle GPU is given a tenth of its power limit; no data sheet says it."""

_IDLE_TEMPERATURE_C = 32
_FABRIC_HEALTHY = 0
MEMORY_LIMITS = ("nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1")
_NVLINK_CAPABILITIES = 0b101111
"""Peer-to-peer, system memory and atomics both ways, valid; no SLI bridge."""


def build(
    described: machine.Machine, functions: Sequence[Function], numa_nodes: Mapping[PciAddress, int]
) -> state.Nvml | None:
    """The state, or None without a driver. `numa_nodes`: the nodes of GPUs' own memory."""
    if described.driver is None:
        return None
    bound = bound_gpus(functions)
    named = pcitree.by_name(functions)
    for name in described.mig:
        _named_gpu(named, name, ("mig", name))
    links = _nvlinks(described.nvlink, named, bound)
    parents = {function.directory: function for function in functions}
    gpus = tuple(
        _gpu(
            described,
            function,
            minor=minor,
            nvlinks=links[function.address],
            numa_node=numa_nodes.get(function.address),
            peers={
                other.address: _peer(function, other, parents, linked=_linked(links[function.address], other.address))
                for other in bound
                if other is not function
            },
        )
        for minor, function in zip(minors(bound), bound, strict=True)
    )
    cuda_major, cuda_minor = described.driver.cuda
    return state.Nvml(
        system=state.System(
            driver_version=described.driver.version,
            nvml_version=f"{cuda_major}.{described.driver.version}",
            cuda_version=cuda_major * 1000 + cuda_minor * 10,
            missing_functions=() if cgroupfiles.limits_memory(described.driver) else MEMORY_LIMITS,
            memory_accounting=cgroupfiles.accounting(described),
        ),
        gpus=gpus,
    )


def bound_gpus(functions: Iterable[Function]) -> tuple[Function, ...]:
    """The GPUs that the NVIDIA driver holds, in order of address, which is the order of NVML's index."""
    return tuple(function for function in functions if function.kind == "gpu" and function.driver == "nvidia")


def minors(bound: Sequence[Function]) -> tuple[int, ...]:
    """Device minors: what the document says, else the lowest free one. MachineError when one is given twice."""
    given = {function.slot.minor for function in bound if function.slot and function.slot.minor is not None}
    free = iter(number for number in range(256) if number not in given)
    chosen: list[int] = []
    for function in bound:
        minor = function.slot.minor if function.slot else None
        if minor is not None and minor in chosen:
            raise MachineError((*function.place, "minor"), f"minor {minor} is already taken")
        chosen.append(next(free) if minor is None else minor)
    return tuple(chosen)


def uuid_of(described: machine.Machine, function: Function) -> str:
    """The UUID of a GPU."""
    return f"GPU-{identity.uuid_of(described.name, function.address)}"


def _gpu(
    described: machine.Machine,
    function: Function,
    *,
    minor: int,
    nvlinks: tuple[state.NvLink, ...],
    numa_node: int | None,
    peers: Mapping[PciAddress, state.Peer],
) -> state.Gpu:
    part = function.part
    assert isinstance(part, parts.Gpu)
    link = function.link
    return state.Gpu(
        pci=function.address,
        pci_device_id=part.pci.device << 16 | part.pci.vendor,
        pci_subsystem_id=part.subsystem.device << 16 | part.subsystem.vendor if part.subsystem else 0,
        uuid=uuid_of(described, function),
        minor=minor,
        name=part.name,
        brand=abi.BRANDS[part.brand],
        architecture=abi.ARCHITECTURES[part.architecture],
        compute_capability=part.compute_capability,
        cores=part.cores,
        memory=state.Memory(total=part.memory, reserved=part.reserved_memory),
        mig=_mig(described, function, part),
        nvlinks=nvlinks,
        fabric=_fabric(described),
        utilization=(0, 0),
        power_mw=part.power_limit_watts * 1000 // _IDLE_POWER_SHARE,
        power_limit_mw=part.power_limit_watts * 1000,
        temperature_c=_IDLE_TEMPERATURE_C,
        clocks_event_reasons=abi.CLOCKS_GPU_IDLE,
        ecc=state.Ecc() if part.ecc else None,
        remapped_rows=state.RemappedRows() if part.ecc else None,
        pcie=None
        if link is None
        else state.Pcie(
            generation=link.generation, width=link.width, max_generation=link.max_generation, max_width=link.max_width
        ),
        numa_node=numa_node,
        c2c=True if part.c2c else None,
        persistence_mode=True,
        compute_mode=0,
        module_id=function.slot.module_id if function.slot else None,
        serial=identity.number_of(described.name, function.address, digits=13),
        supported_events=abi.EVENTS if part.ecc else abi.EVENT_XID,
        peers=peers,
    )


def _mig(described: machine.Machine, function: Function, part: parts.Gpu) -> state.Mig | None:
    slot, name = function.slot, function.name or ""
    place: pcitree.Place = (*function.place, "migInstances")
    said = slot.mig_instances if slot is not None and slot.mig_mode else None
    if name in described.mig:
        said, place = described.mig[name], ("mig", name)
    if part.mig is None:
        if said is not None:
            raise MachineError(place, f"{name} is a {part.name}, which has no MIG")
        return None
    assert described.driver is not None
    return migstate.build(part.mig, said, described.driver.mig_times, gpu=uuid_of(described, function), place=place)


def _fabric(described: machine.Machine) -> state.Fabric | None:
    fabric = described.fabric
    if fabric is None:
        return None
    number = abi.FABRIC_STATES[fabric.state]
    if number != abi.FABRIC_COMPLETED:
        return state.Fabric(state=number)
    return state.Fabric(
        state=number,
        cluster_uuid=fabric.cluster_uuid or identity.uuid_of(described.name, "fabric"),
        clique_id=fabric.clique,
        health_mask=_FABRIC_HEALTHY,
    )


def _nvlinks(
    fabric: machine.NvLink | None, named: Mapping[str, Function], gpus: Sequence[Function]
) -> Mapping[PciAddress, tuple[state.NvLink, ...]]:
    """The links of every GPU; those that are not connected are inactive."""
    ends: dict[PciAddress, list[state.NvLink]] = {gpu.address: [] for gpu in gpus}
    if fabric is not None and fabric.switched is not None:
        _join(ends, gpus, fabric.switched, _switches(fabric.switched, named, ("nvlink", "switched")))
    for number, board in enumerate(fabric.boards if fabric else ()):
        place: pcitree.Place = ("nvlink", "boards", number)
        on_board = [_named_gpu(named, name, (*place, "gpus")) for name in board.gpus]
        _join(ends, on_board, board, _switches(board, named, place))
    for number, pair in enumerate(fabric.pairs if fabric else ()):
        first, second = (_named_gpu(named, name, ("nvlink", "pairs", number, "between")) for name in pair.between)
        for near, far in ((first, second), (second, first)):
            if near.address in ends and far.address in ends:
                ends[near.address] += [_nvlink(near, abi.NVLINK_TYPE_GPU, _bus_id(far.address))] * pair.links
    return {gpu.address: _padded(gpu, ends[gpu.address]) for gpu in gpus}


def _join(
    ends: Mapping[PciAddress, list[state.NvLink]],
    gpus: Sequence[Function],
    switched: machine.Switched,
    remotes: Sequence[str],
) -> None:
    """Adds the links of `gpus` to NVSwitches; a GPU that the driver does not hold tells none."""
    for gpu in gpus:
        if gpu.address in ends:
            ends[gpu.address] += [
                _nvlink(gpu, abi.NVLINK_TYPE_SWITCH, remote)
                for remote, count in zip(remotes, switched.links, strict=True)
                for _ in range(count)
            ]


def _switches(switched: machine.Switched, named: Mapping[str, Function], place: pcitree.Place) -> list[str]:
    if not switched.switches:
        return [state.NVLINK_REMOTE_HIDDEN] * len(switched.links)
    remotes = []
    for number, name in enumerate(switched.switches):
        if name not in named:
            raise MachineError((*place, "switches", number), f"there is no device called {name}")
        remotes.append(_bus_id(named[name].address))
    return remotes


def _named_gpu(named: Mapping[str, Function], name: str, place: pcitree.Place) -> Function:
    function = named.get(name)
    if function is None or function.kind != "gpu":
        raise MachineError(place, f"there is no GPU called {name}")
    return function


def _nvlink(gpu: Function, remote_type: int, remote: str) -> state.NvLink:
    assert isinstance(gpu.part, parts.Gpu)
    if gpu.part.nvlink is None:
        raise MachineError(("nvlink",), f"{gpu.name} is a {gpu.part.name}, which has no NVLink")
    return state.NvLink(
        active=True,
        version=abi.NVLINK_VERSIONS[gpu.part.nvlink.version],
        remote_type=remote_type,
        remote_bus_id=remote,
        capabilities=_NVLINK_CAPABILITIES,
    )


def _padded(gpu: Function, links: list[state.NvLink]) -> tuple[state.NvLink, ...]:
    assert isinstance(gpu.part, parts.Gpu)
    most = gpu.part.nvlink.links if gpu.part.nvlink else 0
    if len(links) > most:
        raise MachineError(("nvlink",), f"{gpu.name} would have {len(links)} NVLinks, but a {gpu.part.name} has {most}")
    unused = state.NvLink(active=False, capabilities=0)
    return (*links, *[unused] * (most - len(links)))


def _linked(nvlinks: Sequence[state.NvLink], other: PciAddress) -> bool:
    return any(
        link.active and (link.remote_type == abi.NVLINK_TYPE_SWITCH or link.remote_bus_id == _bus_id(other))
        for link in nvlinks
    )


def _bus_id(pci: PciAddress) -> str:
    return f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0"


def _peer(a: Function, b: Function, parents: Mapping[str, Function], *, linked: bool) -> state.Peer:
    """What two GPUs can do to each other over PCIe depends on chipset and settings and is not said."""
    p2p = (abi.P2P_OK,) * (abi.P2P_CAPS - 1) if linked else ()
    return state.Peer(ancestor=_ancestor(a, b, parents), p2p=p2p)


def _ancestor(a: Function, b: Function, parents: Mapping[str, Function]) -> int:
    """nvmlGpuTopologyLevel_t of a pair, from their places in the PCI tree and their NUMA nodes."""
    mine, theirs = _chain(a), _chain(b)
    shared = [directory for directory in mine if directory in theirs]
    if shared and shared[-1] in parents:
        switches = {d for d in {*mine, *theirs} if d in parents and parents[d].port_type is PortType.UPSTREAM}
        crossed = {d for d in switches if d.startswith(shared[-1])}
        return abi.TOPOLOGY_SINGLE if len(crossed) <= 1 else abi.TOPOLOGY_MULTIPLE
    if shared:
        return abi.TOPOLOGY_HOSTBRIDGE
    return abi.TOPOLOGY_NODE if a.numa is not None and a.numa == b.numa else abi.TOPOLOGY_SYSTEM


def _chain(function: Function) -> list[str]:
    """The directories above a function, outermost first."""
    steps = function.directory.split("/")
    return ["/".join(steps[:end]) for end in range(1, len(steps))]
