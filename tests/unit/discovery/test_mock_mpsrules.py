# SPDX-License-Identifier: Apache-2.0
"""The stand-in control program refuses what NVIDIA's page "MPS v3 Interface" refuses, and takes what it takes."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from discovery.mock import mpslegacy, mpsrules


class Node:
    """A daemon without processes."""

    def __init__(self, *, multiuser: bool = True) -> None:
        self.done: list[str] = []
        self.state = mpsrules.State(
            pipes=PurePosixPath("/p"),
            multiuser=multiuser,
            start_server=self._start,
            end_server=self._end,
            open_namespace=lambda server, name: self.done.append(f"open {server}/{name}"),
            close_namespace=lambda server, name: self.done.append(f"close {server}/{name}"),
            terminate=lambda pid: self.done.append(f"terminate {pid}"),
        )

    def _start(self, server: mpsrules.Server) -> int:
        server.status = mpsrules.READY
        return 4711

    def _end(self, name: str) -> None:
        del self.state.servers[name]

    def __call__(self, command: str, *, uid: int = 0) -> str:
        return mpsrules.run(self.state, uid, command.split())

    def client(self, pid: int, namespace: str) -> None:
        self.state.clients[pid] = mpsrules.Client(pid=pid, server="s", namespace=namespace, command="python train.py")


@pytest.fixture
def node() -> Node:
    """A node with a server and a namespace."""
    made = Node()
    made("server create s --allowed-devices=GPU-1")
    made("namespace create n --server=s")
    return made


@pytest.mark.parametrize(
    "command",
    [
        "server",
        "server make x",
        "device list",
        "server create",
        "server create S",
        f"server create {'x' * 65}",
        "server create a-b",
        "server create s",
        "server create t --uid=1000",
        "server create t --uid=me",
        "server create t --color=red",
        "server create a b c d",
        "server delete t",
        "server get s color",
        "server get s",
        "server set s",
        "server set s --client-priority=2",
        "server list --format=xml",
        "server list --format=csv,header",
        "namespace create m",
        "namespace create m --server=t",
        "namespace create n --server=s",
        "namespace create default --server=s",
        "namespace create N --server=s",
        "namespace delete default --server=s",
        "namespace delete m --server=s",
        "namespace set n --server=s",
        "namespace set n --server=s --pinned-memory-limit=10",
        "namespace set n --server=s --pinned-memory-limit=1.5G",
        "namespace set n --server=s --pinned-memory-limit=0M",
        "namespace set n --server=s --pinned-memory-limit=1T",
        "namespace set n --server=s --active-thread-percentage=0",
        "namespace set n --server=s --active-thread-percentage=101",
        "namespace set n --server=s --active-thread-percentage=half",
        "namespace set n --server=s --client-priority=high",
        "namespace set n --server=s --force",
        "namespace get n s",
        "namespace get n s color",
        "client get 7 cmd",
        "client terminate 7",
    ],
)
def test_what_is_refused(node: Node, command: str) -> None:
    before = (node("server list"), node("namespace list"))
    with pytest.raises(mpsrules.RefusedError):
        node(command)
    assert (node("server list"), node("namespace list")) == before


def test_limits_are_set_apart_and_read_as_the_documents_show_them(node: Node) -> None:
    node("namespace set n --server=s --pinned-memory-limit=20480M")
    assert [node(f"namespace get n s {field}") for field in ("pinned-memory-limit", "active-thread-percentage")] == [
        "20G\n",
        "-\n",
    ]
    node("namespace set n --server=s active-thread-percentage=30 --client-priority=1")
    assert node("namespace list n --server=s --format=csv,noheader") == "n,s,Ready,20G,30.00,1,/p/s/n\n"
    # Those of the server are for its default namespace alone.
    node("server set s --pinned-memory-limit=1G")
    assert node("namespace get n s pinned-memory-limit") == "20G\n"
    assert node("namespace get default s pinned-memory-limit") == "1G\n"
    node("namespace set n --server=s --pinned-memory-limit=1025K")
    assert node("namespace get n s pinned-memory-limit") == "1025K\n"


def test_who_has_clients_goes_by_force_alone(node: Node) -> None:
    node.client(7, "n")
    with pytest.raises(mpsrules.RefusedError, match="active clients"):
        node("namespace delete n --server=s")
    with pytest.raises(mpsrules.RefusedError, match="active clients"):
        node("server delete s")
    assert node("client list --server=s --format=csv,noheader") == "7,s,0,n,python train.py\n"
    assert node("client get 7 maws-ns") == "n\n"
    node("namespace delete n --server=s --force")
    node("server delete s --force")
    assert node.done[-2:] == ["close s/n", "terminate 7"]
    assert node("server list --format=csv,noheader") == ""


def test_without_multi_user_mode_servers_may_be_of_other_users() -> None:
    node = Node(multiuser=False)
    node("server create --uid=1000")
    assert node("server get uid_1000 uid") == "1000\n"
    node("server create mine", uid=7)
    assert node("server get mine uid") == "7\n"


def test_legacy_commands() -> None:
    node = Node()
    legacy = mpslegacy.Legacy(node.state)
    assert legacy.run(0, "get_server_list") == ""
    legacy.run(0, "start_server -uid 0")
    assert legacy.run(0, "get_server_list") == "4711\n"
    assert legacy.run(0, "get_server_status 4711") == "ACTIVE\n"
    assert legacy.run(0, "set_default_active_thread_percentage 50") == "50.0\n"
    legacy.run(0, "set_default_device_pinned_mem_limit 0 3G")
    assert legacy.run(0, "get_default_device_pinned_mem_limit 0") == "3G\n"
    for command in (
        "start_server -uid 0",
        "start_server",
        "get_server_status 1",
        "set_default_device_pinned_mem_limit 0 3K",
        "make_coffee",
        "",
    ):
        with pytest.raises(mpsrules.RefusedError):
            legacy.run(0, command)


def test_a_legacy_client_limits_itself() -> None:
    limits = mpslegacy.own_limits(
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-1=512M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    )
    assert limits == (512 << 10, 25.0)
    assert mpslegacy.own_limits({}) == (None, None)
