# SPDX-License-Identifier: Apache-2.0
"""What a person, or a cloud, says about the wiring of machines and the machines do not tell: the values, and the rules that
such a document keeps by itself, whatever machine it is held against. Pure.

An Overlay may speak of several kinds of machine; `overlaid` chooses one and applies it. Every statement knows its line, as a
message about it must name it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from discovery.address import PciAddress

_Thing = TypeVar("_Thing")

MAX_DEPTH = 16
"""Groups inside groups. No machine nests more than four switches."""

MAX_DEVICES = 4096
"""Groups in one file, and devices, counted each time they are named: no machine has a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A PCI function, and the line that names it. `base_class`: the PCI base class that the document takes it for, if it says."""

    address: PciAddress
    line: int
    base_class: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """The devices of one NUMA node. `cpus`: those that the document believes to be in it; None where it does not say."""

    node: int
    line: int
    devices: tuple[Device, ...] = ()
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices below one PCIe switch, or below something that acts as one. `parent`: the name of the group around it."""

    name: str
    line: int
    parent: str | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """The rail of a NIC."""

    nic: PciAddress
    rail: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which machines are meant: all that is given must be so. `vendor` and `product` are those of the firmware (DMI), `gpu` is
    the PCI vendor and device of one of the GPUs.
    """

    vendor: str | None = None
    product: str | None = None
    gpu: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is said about one kind of machine. `file`: where its lines are. `match`: None for any machine."""

    file: str
    line: int
    match: Match | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    groups: tuple[Group, ...] = ()
    rails: tuple[Rail, ...] = ()

    def place(self, line: int) -> str:
        """A line of it, for a message."""
        return f"{self.file}:{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A file: the first of its machines that matches counts."""

    file: str
    machines: tuple[Machine, ...]


Problem = tuple[int, str]
"""A line, and what is wrong there."""


def devices(machine: Machine) -> Iterator[Device]:
    """Every device that is named, each time it is."""
    for node in machine.numa_nodes:
        yield from node.devices
    for group in machine.groups:
        yield from group.devices
    for rail in machine.rails:
        yield Device(address=rail.nic, line=rail.line)


def problems(machine: Machine) -> tuple[Problem, ...]:
    """What is wrong in it whatever the machine is, by line: a device in two places, groups that make no tree."""
    found = [
        *_twice(
            "NUMA nodes", ((device, f"node {node.node}") for node in machine.numa_nodes for device in node.devices)
        ),
        *_twice("groups", ((device, f"group {group.name!r}") for group in machine.groups for device in group.devices)),
        *(
            (rail.line, f"{rail.nic} has a rail already ({before.rail}, line {before.line})")
            for rail, before in _repeated(machine.rails, lambda rail: rail.nic)
        ),
        *_no_tree(machine.groups),
    ]
    return tuple(sorted(found))


def chains(machine: Machine) -> Mapping[PciAddress, tuple[str, ...]]:
    """The groups above every device that is in one, innermost first, by name. The groups make a tree (`problems`).

    A group around one other group and nothing else says nothing, and is left out.
    """
    parents = {group.name: group.parent for group in machine.groups}
    parts: dict[str, int] = {group.name: len(group.devices) for group in machine.groups}
    for parent in parents.values():
        if parent is not None:
            parts[parent] += 1
    holds_devices = {group.name for group in machine.groups if group.devices}
    told: dict[str, tuple[str, ...]] = {}
    for name in parents:
        chain: list[str] = []
        above: str | None = name
        while above is not None:
            if above in holds_devices or parts[above] > 1:
                chain.append(above)
            above = parents[above]
        told[name] = tuple(chain)
    return {device.address: told[group.name] for group in machine.groups for device in group.devices}


def names(above: Mapping[PciAddress, tuple[str, ...]]) -> Mapping[str, PciAddress]:
    """The address that stands for each group of `chains`: the lowest device in it that stands for no group inside it, and where
    each does, the lowest of those of the groups directly inside it. So no two groups that a device can be in directly have
    the same one, and two of a chain only where the one is directly inside the other. It follows from the document alone: a
    device that vanishes from the machine renames no group.
    """
    members: dict[str, list[PciAddress]] = {}
    inside: dict[str, set[str]] = {}
    depth: dict[str, int] = {}
    for address in sorted(above):
        chain = above[address]
        for index, name in enumerate(chain):
            members.setdefault(name, []).append(address)
            inside.setdefault(name, set()).update(chain[index - 1 : index] if index else ())
            depth[name] = len(chain) - index
    taken: dict[str, set[PciAddress]] = {}
    chosen: dict[str, PciAddress] = {}
    for name in sorted(members, key=lambda name: (-depth[name], members[name])):
        used = taken.get(name, set())
        free = next((address for address in members[name] if address not in used), None)
        chosen[name] = min(chosen[inner] for inner in inside[name]) if free is None else free
        chain = above[members[name][0]]
        for outer in chain[chain.index(name) + 1 :]:
            taken.setdefault(outer, set()).add(chosen[name])
    return chosen


def switches(above: Mapping[PciAddress, tuple[str, ...]]) -> Mapping[PciAddress, tuple[PciAddress, ...]]:
    """The groups of `chains` by their addresses, each once."""
    known = names(above)
    return {device: tuple(dict.fromkeys(known[name] for name in chain)) for device, chain in above.items()}


def covers(earlier: Match | None, later: Match | None) -> bool:
    """Whether every machine that `later` means is meant by `earlier` too, so that of two entries the later is never reached."""
    wide, narrow = earlier or Match(), later or Match()
    return (
        wide.vendor in (None, narrow.vendor)
        and wide.product in (None, narrow.product)
        and wide.gpu in (None, narrow.gpu)
    )


def _repeated(things: Iterable[_Thing], key: Callable[[_Thing], Hashable]) -> Iterator[tuple[_Thing, _Thing]]:
    """What has the key of an earlier one, and the first that has it."""
    first: dict[Hashable, _Thing] = {}
    for thing in things:
        before = first.setdefault(key(thing), thing)
        if before is not thing:
            yield thing, before


def _twice(what: str, named: Iterable[tuple[Device, str]]) -> Iterator[Problem]:
    for (device, place), (before, there) in _repeated(named, lambda one: one[0].address):
        if there == place:
            yield device.line, f"{device.address} stands twice in {place}, already on line {before.line}"
        else:
            yield device.line, f"{device.address} is in two {what}: {place} here, {there} on line {before.line}"


def _no_tree(groups: Sequence[Group]) -> Iterator[Problem]:
    for group, before in _repeated(groups, lambda group: group.name):
        yield group.line, f"there is a group {group.name!r} already, on line {before.line}"
    by_name = {group.name: group for group in reversed(groups)}
    for group in by_name.values():
        if group.parent is not None and group.parent not in by_name:
            yield group.line, f"group {group.name!r}: there is no group {group.parent!r} that could be its parent"
    for group in by_name.values():
        way = [group.name]
        above = group.parent
        while above in by_name and above != group.name and len(way) <= MAX_DEPTH:
            way.append(above)
            above = by_name[above].parent
        if above == group.name:
            yield group.line, f"group {group.name!r} is inside itself: {' in '.join(map(repr, [*way, above]))}"
        elif len(way) > MAX_DEPTH:
            yield (
                group.line,
                f"group {group.name!r} is nested deeper than {MAX_DEPTH} groups, or inside one that is inside itself",
            )
