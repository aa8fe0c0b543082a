# SPDX-License-Identifier: Apache-2.0
"""What procfs says of the network of process 1, when interfaces go: the files that name every interface."""

from __future__ import annotations

from discovery.mock.recording import Entry, Tree

DEVICES = "proc/1/net/dev"
ROUTES = "proc/1/net/route"
ROUTES_V6 = "proc/1/net/ipv6_route"


def without_interfaces_of(tree: Tree, directory: str) -> dict[str, Entry]:
    """What procfs says once the interfaces of a function are gone."""
    prefix = f"{directory}/net/"
    interfaces = {
        path.removeprefix(prefix).partition("/")[0] for path in tree.below(directory) if path.startswith(prefix)
    }
    texts = ((path, tree.files.get(path)) for path in (DEVICES, ROUTES, ROUTES_V6))
    return {path: _without(text, interfaces) for path, text in texts if interfaces and isinstance(text, str)}


def _without(text: str, interfaces: set[str]) -> str:
    """One of the files of procfs without the lines of some interfaces, which stand first in them or last."""

    def names(line: str) -> set[str]:
        words = line.split()
        return {words[0].removesuffix(":"), words[-1]} if words else set()

    return "".join(line for line in text.splitlines(keepends=True) if interfaces.isdisjoint(names(line)))
