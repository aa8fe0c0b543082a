# SPDX-License-Identifier: Apache-2.0
"""The files of the machine around its devices: CPUs, NUMA nodes, firmware identity, and procfs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from discovery.mock import cpulists, identity, machine
from discovery.mock.pcitree import MachineError
from discovery.mock.recording import Entry, Link

_SYSTEM = "sys/devices/system"
_DISTANCE_LOCAL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One CPU (hardware thread) and its place."""

    number: int
    socket: int
    die: int
    core: int
    siblings: tuple[int, ...]


def cpus(described: machine.Machine) -> tuple[Cpu, ...]:
    """The online CPUs in order of number. A node's CPUs are laid over its cores as `host.siblings` says. MachineError where one
    is said to be offline.
    """
    placed: list[Cpu] = []
    cores: dict[int, int] = {}
    for entry in described.numa.nodes:
        for siblings in _by_core(entry.cpus, described.host):
            socket = entry.socket or 0
            core = cores.get(socket, 0)
            cores[socket] = core + 1
            placed.extend(
                Cpu(number=number, socket=socket, die=entry.die, core=core, siblings=siblings) for number in siblings
            )
    both = {cpu.number for cpu in placed}.intersection(described.host.offline)
    if both:
        raise MachineError(("host", "offline"), f"CPUs {cpulists.spell(both)} are offline and CPUs of a node as well")
    return tuple(sorted(placed, key=lambda cpu: cpu.number))


def _by_core(numbers: Sequence[int], host: machine.Host) -> list[tuple[int, ...]]:
    count, rest = divmod(len(numbers), host.threads)
    if rest:  # an odd CPU was taken offline: the last core has fewer threads
        count += 1
    if host.siblings == "adjacent":
        return [tuple(numbers[core * host.threads : (core + 1) * host.threads]) for core in range(count)]
    return [tuple(numbers[core::count]) for core in range(count)]


def cpu_files(every: Sequence[Cpu], host: machine.Host) -> dict[str, Entry]:
    """CPUs and their topology (Documentation/admin-guide/cputopology.rst), of which the kernel tells only for online ones."""
    online = {cpu.number for cpu in every}
    present = f"{cpulists.spell(online | set(host.offline))}\n"
    possible = max(online | set(host.offline)) + 1
    tree: dict[str, Entry] = {f"{_SYSTEM}/cpu/{name}": present for name in ("present", "possible")}
    tree[f"{_SYSTEM}/cpu/online"] = f"{cpulists.spell(online)}\n"
    tree[f"{_SYSTEM}/cpu/offline"] = f"{cpulists.spell(host.offline)}\n"
    tree |= {f"{_SYSTEM}/cpu/cpu{number}/online": "0\n" for number in host.offline}
    packages: dict[int, list[int]] = {}
    for cpu in every:
        packages.setdefault(cpu.socket, []).append(cpu.number)
    masks = {socket: f"{cpulists.mask(numbers, possible=possible)}\n" for socket, numbers in packages.items()}
    for cpu in every:
        here = f"{_SYSTEM}/cpu/cpu{cpu.number}"
        tree[f"{here}/topology/physical_package_id"] = f"{cpu.socket if host.packages else -1}\n"
        tree[f"{here}/topology/die_id"] = f"{cpu.die}\n"
        tree[f"{here}/topology/core_id"] = f"{cpu.core}\n"
        tree[f"{here}/topology/thread_siblings"] = f"{cpulists.mask(cpu.siblings, possible=possible)}\n"
        tree[f"{here}/topology/thread_siblings_list"] = f"{cpulists.spell(cpu.siblings)}\n"
        tree[f"{here}/topology/core_siblings"] = masks[cpu.socket]
    return tree


def node_files(numa: machine.Numa) -> dict[str, Entry]:
    """NUMA nodes (Documentation/ABI/stable/sysfs-devices-node). Distances stand in order of the online nodes."""
    owners = {node: number for number, entry in enumerate(numa.nodes) for node in entry.ids}
    online = sorted(owners)
    possible = max(cpu for entry in numa.nodes for cpu in entry.cpus) + 1
    spelt = f"{cpulists.spell(online)}\n"
    tree: dict[str, Entry] = {f"{_SYSTEM}/node/{name}": spelt for name in ("online", "possible")}
    tree[f"{_SYSTEM}/node/has_cpu"] = f"{cpulists.spell(e.ids[0] for e in numa.nodes if e.cpus)}\n"
    tree[f"{_SYSTEM}/node/has_memory"] = f"{cpulists.spell(e.ids[0] for e in numa.nodes if e.memory)}\n"
    for node in online:
        entry = numa.nodes[owners[node]]
        first = node == entry.ids[0]
        here = f"{_SYSTEM}/node/node{node}"
        row = (_distance(numa, owners, node, other) for other in online)
        tree[f"{here}/cpulist"] = f"{cpulists.spell(entry.cpus if first else ())}\n"
        tree[f"{here}/cpumap"] = f"{cpulists.mask(entry.cpus if first else (), possible=possible)}\n"
        tree[f"{here}/distance"] = f"{' '.join(map(str, row))}\n"
        tree[f"{here}/meminfo"] = _node_memory(node, entry.memory if first else 0)
    return tree


def _distance(numa: machine.Numa, owners: Mapping[int, int], node: int, other: int) -> int:
    if node == other or numa.distances is None:
        return _DISTANCE_LOCAL
    if owners[node] == owners[other]:
        return numa.within
    return numa.distances[owners[node]][owners[other]]


def _node_memory(node: int, size: int) -> str:
    fields = {"MemTotal": size, "MemFree": size, "MemUsed": 0}
    return "".join(f"Node {node} {name + ':':<15} {value >> 10:>8} kB\n" for name, value in fields.items())


def proc_files(described: machine.Machine, every: Sequence[Cpu]) -> dict[str, Entry]:
    """Files of procfs, and the firmware's name of the machine. Memory of GPUs is none of the host's."""
    host = described.host
    memory = sum(entry.memory for entry in described.numa.nodes if entry.gpu is None)
    tree: dict[str, Entry] = {
        "proc/meminfo": _meminfo(memory),
        "proc/cpuinfo": "".join(_cpuinfo(host, every)),
        "proc/stat": "".join((f"cpu{n} 0 0 0 0 0 0 0 0 0 0\n") for n in ("", *(cpu.number for cpu in every)))
        + "btime 1767225600\n",
        "proc/cmdline": "root=/dev/nvme0n1p2 ro" + (" iommu=off" if host.iommu == "off" else "") + "\n",
        "proc/sys/kernel/osrelease": f"{host.kernel}\n",
        "proc/sys/kernel/random/boot_id": f"{identity.uuid_of(described.name, 'boot')}\n",
    }
    for name, value in (("sys_vendor", host.vendor), ("product_name", host.product)):
        if value is not None:
            tree[f"sys/devices/virtual/dmi/id/{name}"] = f"{value}\n"
    if host.vendor or host.product:
        tree["sys/class/dmi/id"] = Link("../../devices/virtual/dmi/id")
    return tree


def _meminfo(size: int) -> str:
    """The lines that psutil wants, of a machine with nothing running."""
    total = size >> 10
    free = dict.fromkeys(("MemTotal", "MemFree", "MemAvailable"), total)
    used = dict.fromkeys(
        (
            "Buffers",
            "Cached",
            "SwapCached",
            "Active",
            "Inactive",
            "SwapTotal",
            "SwapFree",
            "Shmem",
            "Slab",
            "SReclaimable",
        ),
        0,
    )
    return "".join(f"{name + ':':<15} {value:>8} kB\n" for name, value in (free | used).items())


def _cpuinfo(host: machine.Host, every: Sequence[Cpu]) -> Sequence[str]:
    if host.architecture == "aarch64":
        return [f"processor\t: {cpu.number}\nmodel name\t: {host.cpu}\n\n" for cpu in every]
    per_socket: dict[int, set[int]] = {}
    for cpu in every:
        per_socket.setdefault(cpu.socket, set()).add(cpu.core)
    return [
        f"processor\t: {cpu.number}\nmodel name\t: {host.cpu}\nphysical id\t: {cpu.socket}\n"
        f"core id\t\t: {cpu.core}\ncpu cores\t: {len(per_socket[cpu.socket])}\n\n"
        for cpu in every
    ]
