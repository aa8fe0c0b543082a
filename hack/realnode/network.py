# SPDX-License-Identifier: Apache-2.0
"""The cluster's network: a namespace of its own, with the addresses that stand for the node and for the API server's Service."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from hack.realnode import locks
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

SERVICE_ADDRESS = "10.96.0.1"
"""The first address of the Service range, that of Service default/kubernetes. The API server listens on it, so no kube-proxy is needed."""

SERVICE_RANGE = "10.96.0.0/16"
NODE_ADDRESS = "192.0.2.1"
POD_RANGE = "10.88.0.0/16"
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def create(layout: Layout) -> None:
    """Makes the namespace. Raises ClusterError."""
    _ip("netns", "add", layout.namespace)
    _ip("-n", layout.namespace, "link", "set", "lo", "up")
    for address in (SERVICE_ADDRESS, NODE_ADDRESS):
        _ip("-n", layout.namespace, "address", "add", f"{address}/32", "dev", "lo")
    # A default route, as every node has: kubelet and client-go look for one to choose the node's address.
    _ip("-n", layout.namespace, "route", "add", "default", "dev", "lo", "src", NODE_ADDRESS)


def remove(layout: Layout) -> None:
    """Removes the namespace; without processes in it, it ends, and its links with it."""
    if layout.namespace_file.exists():
        _ip("netns", "delete", layout.namespace)  # takes a file that never became a namespace, too


@contextlib.contextmanager
def entered(layout: Layout) -> Iterator[None]:
    """The calling thread is in the cluster's network for the block, and so are the threads and processes that it starts in it."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            inside = os.open(layout.namespace_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ClusterError(f"Cluster {layout.name} does not run; hack/cluster --name {layout.name} up") from error
        try:
            _enter(inside)
        finally:
            os.close(inside)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(namespace: int) -> None:
    """setns(2); the standard library has it from Python 3.12 on."""
    if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
        raise ClusterError(f"The network of the cluster cannot be entered: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    locks.output(["/bin/ip", *arguments])
