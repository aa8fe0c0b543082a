# SPDX-License-Identifier: Apache-2.0
"""Where the things of a cluster lie.

- names: what fits into socket paths and nothing else
- paths: an inside path is found outside, below the folder that stands behind it
- sockets: the longest one of any node fits into the 107 bytes that the kernel has for it
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.realnode import hollow
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

SOCKET_BYTES = 107
POD_UID = "12345678-1234-1234-1234-123456789abc"


@pytest.mark.parametrize("name", ["a", "node", "e2e", "abcdef", "x12345"])
def test_a_short_name_is_taken(name: str) -> None:
    assert Layout(name).node_name == f"{name}-0"


@pytest.mark.parametrize("name", ["", "abcdefg", "1a", "A", "a-b", "a/b", "../x", "a b", "a\n"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="--name"):
        Layout(name)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("/var/lib/kubelet/pods", "/var/lib/nf/a/lib/kubelet/pods"),
        ("/var/run/cdi/x.json", "/var/lib/nf/a/run/cdi/x.json"),
        ("/run/containerd", "/var/lib/nf/a/run/containerd"),
        ("/var/log/pods", "/var/lib/nf/a/log/pods"),
        ("/var/library", "/var/library"),
        ("/etc/hosts", "/etc/hosts"),
    ],
)
def test_an_inside_path_has_its_outside(inside: str, outside: str) -> None:
    assert Layout("a").host_path(inside) == Path(outside)


@pytest.mark.parametrize(
    "folder", [Layout("abcdef").kubelet_dir, Layout("abcdef").hollow_dir(hollow.NODES_MAX) / "kubelet"]
)
def test_sockets_of_the_longest_name_fit(folder: Path) -> None:
    for socket in (
        f"plugins/gpu.nearfield.dev/dra.{POD_UID[:8]}.sock",
        f"plugins_registry/gpu.nearfield.dev-{POD_UID[:8]}-reg.sock",
        "pod-resources/kubelet.sock",
    ):
        assert len(str(folder / socket)) <= SOCKET_BYTES


def test_two_clusters_share_nothing() -> None:
    one, other = Layout("a"), Layout("b")
    for name in ("root", "lock", "namespace", "cgroup", "node_name", "failed_logs"):
        assert getattr(one, name) != getattr(other, name)
