# SPDX-License-Identifier: Apache-2.0
"""Uevents of this machine's own kernel.

- a message that the kernel sends is heard, and judged by what it is about
- what another process sends is told apart, where the kernel lets it be sent at all
- messages that are not read in time are noticed
- an agent on real files listens to the kernel and looks when it hears something

Who may write to /sys has the kernel send a message about a device of the machine. Who may not, makes a network namespace of
its own, in which it may hand the kernel a message to send (uevent_net_rcv in lib/kobject_uevent.c).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import uevents
from discovery.uevents import Heard
from tests.fakes import agents

NETLINK_KOBJECT_UEVENT = 15
GPU = "/devices/pci0000:00/0000:00:01.0"
TEXT = f"add@{GPU}\0ACTION=add\0DEVPATH={GPU}\0SUBSYSTEM=pci\0".encode()

INJECT = f"""
import socket, struct
from discovery import uevents
listener = uevents.kernel()
with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, {NETLINK_KOBJECT_UEVENT}) as channel:
    text = {TEXT!r}
    channel.sendto(struct.pack("=IHHII", 16 + len(text), 16, 1, 1, 0) + text, (0, 0))
print(listener.hear())
"""


@pytest.fixture(name="listener")
def fixture_listener() -> Iterator[uevents.Listener]:
    listener = uevents.kernel()
    yield listener
    listener.close()


def triggers() -> tuple[Path, Path] | None:
    """Where a message about a PCI function and one about the loopback interface can be asked for; None without the right."""
    pci = next(iter(sorted(Path("/sys/bus/pci/devices").glob("*/uevent"))), None)
    loopback = Path("/sys/class/net/lo/uevent")
    both = pci is not None and all(os.access(path, os.W_OK) for path in (pci, loopback))
    return (pci, loopback) if pci is not None and both else None


def next_of(listener: uevents.Listener, wanted: Heard) -> None:
    """Others may come in between: the machine lives."""
    while listener.hear() is not wanted:
        pass


def test_what_the_kernel_sends_is_heard(listener: uevents.Listener) -> None:
    allowed = triggers()
    if allowed is None:
        command = [sys.executable, "-c", INJECT]
        own = ["unshare", "--user", "--net", "--map-root-user", *command]
        assert subprocess.run(own, capture_output=True, text=True, check=True).stdout.strip() == Heard.HEEDED
        return
    pci, loopback = allowed
    loopback.write_text("change")
    next_of(listener, Heard.IGNORED)
    pci.write_text("change")
    next_of(listener, Heard.HEEDED)


def test_what_a_process_sends_is_told_apart(listener: uevents.Listener) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT) as channel:
        try:
            channel.sendto(TEXT, (0, 1))
        except PermissionError:
            return  # without CAP_NET_ADMIN nobody can
    next_of(listener, Heard.FOREIGN)


def test_a_message_of_a_process_that_the_kernel_sends_on_needs_rights_over_the_namespace(
    listener: uevents.Listener,
) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT) as channel:
        message = struct.pack("=IHHII", 16 + len(TEXT), 16, 5, 1, 0) + TEXT
        channel.sendto(message, (0, 0))
        channel.settimeout(30)
        answer = channel.recv(4096)
    (status,) = struct.unpack_from("=i", answer, 16)
    if status == 0:
        next_of(listener, Heard.HEEDED)
    else:
        assert -status == 1  # EPERM


def test_messages_that_are_not_read_in_time_are_noticed() -> None:
    """On a socket of the same kind as the kernel's: a multicast message that finds no room is dropped, and recv says so."""
    family = socket.AF_NETLINK
    with socket.socket(family, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # the least there is
        ours.bind((0, 1))
        listener = uevents.Listener(os_dup(ours), genuine=lambda _: True)
    allowed = triggers()
    with socket.socket(family, socket.SOCK_DGRAM, NETLINK_KOBJECT_UEVENT) as channel:
        for _ in range(50):
            if allowed is not None:
                allowed[0].write_text("change")
            else:
                with contextlib.suppress(PermissionError):
                    channel.sendto(TEXT, (0, 1))
                    continue
                listener.close()
                return
    next_of(listener, Heard.OVERRUN)
    listener.close()


def os_dup(channel: socket.socket) -> socket.socket:
    """The same socket again."""
    return socket.socket(fileno=os.dup(channel.fileno()))


@pytest.mark.timeout(300)
def test_an_agent_on_real_files_listens_to_the_kernel() -> None:
    with agents.node() as node:
        devices = node.directory / "sys/bus/pci/devices"
        devices.mkdir(parents=True)
        agent = node.start("--sysfs", str(node.directory / "sys"), "--probe-interval", "3600s", mock=None)
        agents.until(node.slices, "the empty slice")
        agents.until(lambda: "Listening to uevents" in agent.said(), "it listens")
        allowed = triggers()
        if allowed is None:
            return
        before = heeded(agent)
        allowed[0].write_text("change")
        agents.until(lambda: heeded(agent) > before, "it heard of it")


def heeded(agent: agents.Agent) -> float:
    found = re.search(r'^nearfield_uevents_total\{result="heeded"\} (\S+)$', agent.get("/metrics")[1], re.MULTILINE)
    assert found is not None
    return float(found[1])
