# SPDX-License-Identifier: Apache-2.0
"""What a Recording of a node says of its networks: what stands on the interfaces of its NICs, and by which its default route
leaves. Nothing else: no address, no other route, no other interface.

Names of interfaces that the host made can be anybody's words, so they become `made0`, `made1`, ... in the order in which they
are met. The routes are written anew, one for each interface by which a default route leaves.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from discovery import errors, findings, network, sysfs
from discovery.mock import netfiles, procnet
from discovery.mock.recording import Entry, Link, Tree

_CLASS = "sys/class/net"


def files(reader: sysfs.Sysfs, taken: Mapping[str, Entry]) -> tuple[dict[str, Entry], Mapping[str, str]]:
    """The files to add to what was taken, in which the interfaces of devices are, and the new names of those that the host made.
    Without routes where they are not known, so that they are not on replay either.
    """
    tree = Tree(taken)
    directories = {
        link.rpartition("/")[2]: target for link in tree.below(_CLASS) if (target := tree.resolve(link)) is not None
    }
    stack = network.Stack(reader, findings.Findings())
    try:
        leaving = network.default_interfaces(reader, stack)
    except errors.SourceError:
        leaving = None
    made: dict[str, bool] = {}
    for interface in sorted(directories):
        made.update({upper.name: upper.vlan for upper in stack.above(interface)})
    made.update(dict.fromkeys(sorted((leaving or frozenset()) - directories.keys() - made.keys()), False))
    called = {name: f"made{number}" for number, name in enumerate(made)}
    directories.update({name: f"sys/devices/virtual/net/{pseudonym}" for name, pseudonym in called.items()})
    added: dict[str, Entry] = {}
    for name, pseudonym in called.items():
        here = directories[name]
        added[f"{here}/uevent"] = ("DEVTYPE=vlan\n" if made[name] else "") + f"INTERFACE={pseudonym}\n"
        added[f"{_CLASS}/{pseudonym}"] = Link(posixpath.relpath(here, _CLASS))
    added.update(_ties(stack, directories, called))
    if leaving is not None:
        added.update(procnet.files([called.get(name, name) for name in directories], _named(leaving, called)))
    return added, called


def _named(names: frozenset[str], called: Mapping[str, str]) -> list[str]:
    return sorted(called.get(name, name) for name in names)


def _ties(
    stack: network.Stack, directories: Mapping[str, str], called: Mapping[str, str]
) -> Iterator[tuple[str, Entry]]:
    for below, here in directories.items():
        for name in stack.directly_above(below):
            if name in called:
                yield from netfiles.tie(
                    (called[name], directories[name]),
                    (called.get(below, below), here),
                    enslaves=stack.master(below) == name,
                )
