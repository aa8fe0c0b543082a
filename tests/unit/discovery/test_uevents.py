# SPDX-License-Identifier: Apache-2.0
"""Uevents: their bytes, which of them matter, and a listener over a socket pair.

- messages as a kernel sent them are read; what is none, or contradicts itself, is refused; no bytes raise anything else
- PCI functions, RDMA drivers and NVIDIA's modules matter; interfaces, queues and everything else does not
- a listener judges by sender, then by content; it can be stopped while it waits; it says when its socket is of no use
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import errors, uevents
from discovery.uevents import Heard, Uevent

GPU = "/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
BOUND = (
    f"bind@{GPU}\0ACTION=bind\0DEVPATH={GPU}\0SUBSYSTEM=pci\0DRIVER=nvidia\0PCI_CLASS=30200\0PCI_ID=10DE:2330\0"
    "PCI_SUBSYS_ID=10DE:16C1\0PCI_SLOT_NAME=0000:01:00.0\0"
    "MODALIAS=pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\0SEQNUM=4711\0"
).encode()


def message(action: str, devpath: str, subsystem: str) -> bytes:
    return f"{action}@{devpath}\0ACTION={action}\0DEVPATH={devpath}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0".encode()


def test_a_message_is_read() -> None:
    assert uevents.parse(BOUND) == Uevent("bind", GPU, "pci")


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\0",
        BOUND[:-1],
        BOUND.replace(b"bind@", b"bind"),
        BOUND.replace(b"bind@", b"explode@").replace(b"ACTION=bind", b"ACTION=explode"),
        BOUND.replace(b"bind@", b"unbind@"),
        BOUND.replace(b"bind@/", b"bind@"),
        BOUND.replace(f"DEVPATH={GPU}".encode(), b"DEVPATH=/devices/other"),
        BOUND.replace(b"SUBSYSTEM=pci\0", b""),
        BOUND.replace(b"SUBSYSTEM=pci", b"SUBSYSTEM="),
        BOUND + b"SUBSYSTEM=net\0",
        BOUND + b"no variable\0",
        BOUND + b"=\0",
        BOUND + b"\0",
        BOUND + b"NAME=\xff\0",
        BOUND + b"A=" + b"x" * uevents.MAX_BYTES + b"\0",
        b"libudev\0" + BOUND,
        b"bind@" + b"/" * 4000,
    ],
)
def test_what_is_no_message_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"^"):
        uevents.parse(wrong)


_PIECES = st.sampled_from([b"add", b"@", b"/devices/x", b"\0", b"ACTION=add", b"DEVPATH=/devices/x", b"SUBSYSTEM=pci"])


@given(st.one_of(st.binary(max_size=300), st.lists(_PIECES, max_size=14).map(b"".join)))
def test_no_bytes_are_more_than_refused(data: bytes) -> None:
    try:
        event = uevents.parse(data)
    except ValueError:
        return
    assert event.devpath.startswith("/")
    assert data.startswith(f"{event.action}@{event.devpath}\0".encode())


@pytest.mark.parametrize(
    ("action", "devpath", "subsystem", "matter"),
    [
        ("add", GPU, "pci", True),
        ("remove", GPU, "pci", True),
        ("bind", GPU, "pci", True),
        ("unbind", GPU, "pci", True),
        ("change", GPU, "pci", True),
        ("move", GPU, "pci", False),
        ("add", "/module/nvidia", "module", True),
        ("remove", "/module/nvidia_peermem", "module", True),
        ("add", "/module/overlay", "module", False),
        ("change", "/module/nvidia", "module", False),
        ("bind", f"{GPU}/mlx5_core.rdma.0", "auxiliary", True),
        ("add", f"{GPU}/mlx5_core.rdma.0", "auxiliary", False),
        ("add", f"{GPU}/infiniband/mlx5_0", "infiniband", True),
        ("remove", f"{GPU}/infiniband/mlx5_0", "infiniband", False),
        ("add", f"{GPU}/net/eth0", "net", False),
        ("remove", f"{GPU}/net/eth0", "net", False),
        ("move", f"{GPU}/net/eth0", "net", False),
        ("add", f"{GPU}/net/eth0/queues/rx-0", "queues", False),
        ("change", "/devices/virtual/block/dm-0", "block", False),
        ("add", "/bus/pci/drivers/nvidia", "drivers", False),
    ],
)
def test_which_messages_matter(action: str, devpath: str, subsystem: str, matter: bool) -> None:
    assert uevents.matters(uevents.parse(message(action, devpath, subsystem))) is matter


@contextlib.contextmanager
def listening(*, genuine: bool = True) -> Iterator[tuple[uevents.Listener, socket.socket]]:
    """A listener, and the socket on which its messages are sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener = uevents.Listener(ours, genuine=lambda _: genuine)
    with theirs:
        yield listener, theirs
    listener.close()


@pytest.mark.parametrize(
    ("sent", "heard", "hint"),
    [
        (BOUND, Heard.HEEDED, True),
        (message("add", f"{GPU}/net/eth0", "net"), Heard.IGNORED, False),
        (b"nonsense", Heard.MALFORMED, False),
        (BOUND + b"A=" + b"x" * 2 * uevents.MAX_BYTES + b"\0", Heard.MALFORMED, False),
    ],
)
def test_what_becomes_of_a_message(sent: bytes, heard: Heard, hint: bool) -> None:
    with listening() as (listener, sender):
        sender.send(sent)
        assert listener.hear() is heard
        assert heard.hint is hint


def test_what_the_kernel_did_not_send_counts_for_nothing() -> None:
    with listening(genuine=False) as (listener, sender):
        sender.send(BOUND)
        assert listener.hear() is Heard.FOREIGN
        assert not Heard.FOREIGN.hint


def test_a_listener_that_waits_can_be_stopped() -> None:
    with listening() as (listener, _):
        heard: list[Heard | None] = []
        thread = threading.Thread(target=lambda: heard.append(listener.hear()))
        thread.start()
        listener.stop()
        thread.join(40)
        assert heard == [None]
        assert listener.hear() is None


def test_a_socket_that_is_of_no_use_any_more_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        accepted, _ = server.accept()
        listener = uevents.Listener(ours, genuine=lambda _: True)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        accepted.close()  # the other side hears of it by ECONNRESET
        with pytest.raises(errors.SourceError, match="cannot be heard") as raised:
            listener.hear()
        assert (raised.value.source, raised.value.kind) == ("uevents", "econnreset")
        listener.close()
