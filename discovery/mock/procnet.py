# SPDX-License-Identifier: Apache-2.0
"""What procfs says of the network of process 1: the files that name every interface, and how they change when one goes."""

from __future__ import annotations

from collections.abc import Iterable

from discovery.mock.recording import Entry, Tree

DEVICES = "proc/1/net/dev"
ROUTES = "proc/1/net/route"
ROUTES_V6 = "proc/1/net/ipv6_route"

_GATEWAY = "010200C0"  # 192.0.2.1, as the kernel writes it: the bytes of the address as a number of this machine
_DEV_HEADER = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n"
)
_ROUTE_HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
_UP_GATEWAY = "0003"
_NO_ROUTE_V6 = f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200       lo\n"
"""What there always is: no route to anywhere."""


def files(interfaces: Iterable[str], default: Iterable[str]) -> dict[str, Entry]:
    """Some interfaces, and default routes of IPv4 by some of them."""
    routes = (f"{name}\t00000000\t{_GATEWAY}\t{_UP_GATEWAY}\t0\t0\t0\t00000000\t0\t0\t0" for name in default)
    return {
        DEVICES: _DEV_HEADER + "".join(f"{name:>6}: {' '.join(['0'] * 16)}\n" for name in interfaces),
        ROUTES: "".join(f"{line:<127}\n" for line in (_ROUTE_HEADER, *routes)),
        ROUTES_V6: _NO_ROUTE_V6,
    }


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
