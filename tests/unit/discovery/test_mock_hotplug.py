# SPDX-License-Identifier: Apache-2.0
"""Uevents of a rendered machine.

- each fault of the files sends what a kernel would, in its order, and healing sends the way back; link state sends nothing
- from any state to any other, the messages lead from the functions and drivers before to those after
- all who listen hear; who is gone is forgotten; who does not read holds nobody up; a long path is no obstacle
- with a bridge all behind it goes, and NVML has none of it
"""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from discovery import address, uevents
from discovery.errors import SourceError
from discovery.mock import fault, faults, hotplug, live, recording, render, ueventsocket, view
from discovery.mock.fault import Fault, Kind
from discovery.uevents import Heard
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1, NIC, NVME

BASE = mockmachine.parsed().files
HERE = recording.Tree(BASE)


def devpath(pci: object) -> str:
    return "/" + (HERE.function(pci) or "").removeprefix("sys/")


def upstream() -> Any:
    """The switch above the GPUs and the NIC."""
    return address.parse(devpath(GPU0).split("/")[-3])


def told(*active: Fault, before: tuple[Fault, ...] = ()) -> list[str]:
    """Action and the end of the path of each event between two states."""
    events = hotplug.events(after(before), after(active))
    return [f"{event.action} {event.subsystem} {event.devpath.rpartition('/')[2]}" for event in events]


def after(active: tuple[Fault, ...]) -> dict[str, recording.Entry]:
    placed = faults.place(HERE, active, since=0)
    merged = {**BASE, **faults.effects(BASE, [item.fault for item in placed])}
    return {path: entry for path, entry in merged.items() if entry is not None}


def test_a_message_has_the_bytes_of_a_kernel() -> None:
    (event,) = hotplug.events(after((Fault(kind=Kind.NO_DRIVER, target=GPU0),)), BASE)
    assert (
        event.message(7)
        == (
            f"bind@{devpath(GPU0)}\0ACTION=bind\0DEVPATH={devpath(GPU0)}\0SUBSYSTEM=pci\0DRIVER=nvidia\0PCI_CLASS=30200\0"
            "PCI_ID=10DE:2330\0PCI_SUBSYS_ID=10DE:16C1\0PCI_SLOT_NAME=0000:18:00.0\0"
            "MODALIAS=pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\0SEQNUM=7\0"
        ).encode()
    )


@pytest.mark.parametrize(
    ("item", "goes", "comes"),
    [
        (
            Fault(kind=Kind.FALLEN_OFF, target=GPU0),
            ["unbind pci 0000:18:00.0", "remove pci 0000:18:00.0"],
            ["add pci 0000:18:00.0", "bind pci 0000:18:00.0"],
        ),
        (
            Fault(kind=Kind.FALLEN_OFF, target=NIC),
            [
                "remove net ibp26s0",
                "remove infiniband mlx5_0",
                "unbind pci 0000:1a:00.0",
                "remove pci 0000:1a:00.0",
            ],
            ["add pci 0000:1a:00.0", "bind pci 0000:1a:00.0", "add infiniband mlx5_0", "add net ibp26s0"],
        ),
        (
            Fault(kind=Kind.VFIO_BOUND, target=GPU1),
            ["unbind pci 0000:19:00.0", "bind pci 0000:19:00.0"],
            ["unbind pci 0000:19:00.0", "bind pci 0000:19:00.0"],
        ),
        (Fault(kind=Kind.NO_DRIVER, target=GPU1), ["unbind pci 0000:19:00.0"], ["bind pci 0000:19:00.0"]),
        (Fault(kind=Kind.NETDEV_MOVED, target=NIC), ["remove net ibp26s0"], ["add net ibp26s0"]),
        (Fault(kind=Kind.RDMA_MOVED, target=NIC), ["remove infiniband mlx5_0"], ["add infiniband mlx5_0"]),
        (Fault(kind=Kind.LINK_DOWN, target=NIC), [], []),
        (Fault(kind=Kind.NARROW_LINK, target=GPU0, width=4), [], []),
        (Fault(kind=Kind.NUMA_UNKNOWN), [], []),
    ],
)
def test_what_is_told(item: Fault, goes: list[str], comes: list[str]) -> None:
    assert told(item) == goes
    assert told(before=(item,)) == comes


def test_a_driver_that_is_unloaded_and_loaded() -> None:
    gone = told(Fault(kind=Kind.NO_DRIVER))
    assert gone[:2] == ["unbind pci 0000:19:00.0", "unbind pci 0000:18:00.0"]
    assert gone[2:] == sorted((line for line in gone if line.startswith("remove module nvidia")), reverse=True)
    assert "remove module nvidia" in gone
    back = told(before=(Fault(kind=Kind.NO_DRIVER),))
    assert back[-2:] == ["bind pci 0000:18:00.0", "bind pci 0000:19:00.0"]
    assert "add module nvidia" in back


def test_a_switch_that_is_pulled_takes_along_what_is_behind_it(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    faults.apply(tmp_path, [Fault(kind=Kind.FALLEN_OFF, target=upstream())])
    left = {path.name for path in (tmp_path / "sys/bus/pci/devices").iterdir()}
    assert left.isdisjoint({str(upstream()), str(GPU0), str(GPU1), str(NIC)})
    assert str(NVME) in left
    assert {path.name for path in (tmp_path / "sys/class/net").iterdir()} == {"lo"}
    assert not (tmp_path / "dev/nvidia0").exists()
    assert view.view(live.LiveFile(tmp_path).read(), now=1e12).gpus == ()
    faults.apply(tmp_path, [])
    assert len(view.view(live.LiveFile(tmp_path).read(), now=1e12).gpus) == 2


def test_names_that_are_no_addresses_are_left_out() -> None:
    files = {**BASE, "sys/bus/pci/devices/nonsense": recording.Link("../../../devices/nonsense")}
    assert hotplug.events(BASE, files) == ()
    port = Fault(kind=Kind.FALLEN_OFF, target=upstream())
    below = f"../../..{devpath(upstream())}/odd"
    tree = recording.Tree({**files, "sys/bus/pci/devices/odd": recording.Link(below)})
    assert {item.fault.target for item in faults.place(tree, [port], since=0)} >= {GPU0, GPU1, NIC, upstream()}


STEPS = [
    Fault(kind=Kind.FALLEN_OFF, target=GPU0),
    Fault(kind=Kind.FALLEN_OFF, target=NIC),
    Fault(kind=Kind.FALLEN_OFF, target=upstream()),
    Fault(kind=Kind.VFIO_BOUND, target=GPU0),
    Fault(kind=Kind.VFIO_BOUND, target=NIC),
    Fault(kind=Kind.NO_DRIVER),
    Fault(kind=Kind.NO_DRIVER, target=GPU1),
    Fault(kind=Kind.NETDEV_MOVED, target=NIC),
]


def bindings(files: dict[str, recording.Entry]) -> dict[str, str | None]:
    """Every function by path, and the name of its driver."""
    tree = recording.Tree(files)
    found = {}
    for link in tree.below("sys/bus/pci/devices"):
        directory = tree.resolve(link) or ""
        driver = tree.resolve(f"{directory}/driver")
        found["/" + directory.removeprefix("sys/")] = None if driver is None else driver.rpartition("/")[2]
    return found


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(STEPS), max_size=3, unique=True), st.lists(st.sampled_from(STEPS), max_size=3, unique=True)
)
def test_messages_lead_from_any_state_to_any_other(first: list[Fault], second: list[Fault]) -> None:
    old, new = after(tuple(first)), after(tuple(second))
    state = bindings(old)
    for number, event in enumerate(hotplug.events(old, new)):
        read = uevents.parse(event.message(number))
        assert (read.action, read.devpath, read.subsystem) == (event.action, event.devpath, event.subsystem)
        if event.subsystem != "pci":
            continue
        match event.action:
            case "add":
                assert event.devpath not in state
                state[event.devpath] = None
            case "remove":
                assert state.pop(event.devpath) is None
            case "unbind":
                assert state[event.devpath] is not None
                state[event.devpath] = None
            case "bind":
                assert state[event.devpath] is None
                state[event.devpath] = event.variables["DRIVER"]
    assert state == bindings(new)


def hear(listener: uevents.Listener, count: int) -> list[Heard | None]:
    return [listener.hear() for _ in range(count)]


def test_all_who_listen_hear_of_a_fault_and_of_its_end(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    first, second = ueventsocket.listen(tmp_path), ueventsocket.listen(tmp_path)
    faults.apply(tmp_path, [Fault(kind=Kind.FALLEN_OFF, target=GPU0), Fault(kind=Kind.NETDEV_MOVED, target=NIC)])
    faults.apply(tmp_path, [])
    going = [Heard.IGNORED, Heard.HEEDED, Heard.HEEDED]
    coming = [Heard.HEEDED, Heard.HEEDED, Heard.IGNORED]
    for listener in (first, second):
        assert hear(listener, 6) == [*going, *coming]
        listener.close()
    assert live.LiveFile(tmp_path).read().seqnum == 6
    assert list((tmp_path / ueventsocket.FOLDER).iterdir()) == []


def test_who_is_gone_is_forgotten_and_who_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    folder = tmp_path / ueventsocket.FOLDER
    listener = ueventsocket.listen(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(folder / "dead"))
    (folder / "no-socket").write_bytes(b"")
    ueventsocket.send(tmp_path, [b"nonsense"] * 1000)
    assert not (folder / "dead").exists()
    assert listener.hear() is Heard.MALFORMED
    listener.close()


def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listener = ueventsocket.listen(deep)
    ueventsocket.send(deep, [b"nonsense"])
    assert listener.hear() is Heard.MALFORMED
    listener.close()


def test_a_directory_that_is_not_there_cannot_be_heard(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be heard") as raised:
        ueventsocket.listen(tmp_path / "no")
    assert raised.value.kind == "enoent"
    ueventsocket.send(tmp_path / "no", [b"nonsense"])


def test_a_function_that_is_plugged_in_later(tmp_path: Path) -> None:
    """As a machine can have it from the beginning."""
    late = fault.Fault(kind=Kind.FALLEN_OFF, target=GPU0, until_s=30.0)
    machine = dataclasses.replace(mockmachine.parsed(), faults=(late,))
    render.render(machine, tmp_path, clock=lambda: 1000.0)
    assert not (tmp_path / "sys/bus/pci/devices" / str(GPU0)).is_symlink()
    listener = ueventsocket.listen(tmp_path)
    timeline = faults.Timeline(tmp_path)
    assert timeline.advance(1029.0) == 1030.0
    assert timeline.advance(1030.0) is None
    assert (tmp_path / "sys/bus/pci/devices" / str(GPU0)).is_symlink()
    assert hear(listener, 2) == [Heard.HEEDED, Heard.HEEDED]
    listener.close()
