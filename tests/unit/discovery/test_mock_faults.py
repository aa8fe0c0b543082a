# SPDX-License-Identifier: Apache-2.0
"""Faults on a rendered machine.

- each kind has its effect on the files, on NVML, or on both
- a fault that heals leaves not one byte behind
- times: before, during, after; faults of the future take effect by themselves
- a hang hangs until it is lifted, a crash ends the process that called and nothing else
- what cannot be is refused
"""

from __future__ import annotations

import dataclasses
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from discovery.errors import DocumentError
from discovery.mock import abi, fault, faults, library, live, recording, view
from discovery.mock.fault import Fault, Kind, Placed
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1, NIC, NVME
from tests.fakes.publishing import until

ANY_FAULTS = [
    Fault(kind=Kind.FALLEN_OFF, target=GPU0),
    Fault(kind=Kind.FALLEN_OFF, target=NIC),
    Fault(kind=Kind.FALLEN_OFF, target=NVME),
    Fault(kind=Kind.LINK_DOWN, target=NIC),
    Fault(kind=Kind.LINK_DOWN, target=GPU1, link=1),
    Fault(kind=Kind.NARROW_LINK, target=GPU1, width=4),
    Fault(kind=Kind.NUMA_UNKNOWN),
    Fault(kind=Kind.NUMA_UNKNOWN, target=GPU0),
    Fault(kind=Kind.NUMA_WRONG, node=1),
    Fault(kind=Kind.NUMA_WRONG, target=GPU0, node=1),
    Fault(kind=Kind.VFIO_BOUND, target=GPU0),
    Fault(kind=Kind.VFIO_BOUND, target=NIC),
    Fault(kind=Kind.NO_DRIVER),
    Fault(kind=Kind.NO_DRIVER, target=GPU1),
]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """The small machine on disk, with its library in pynvml and a session open."""
    mockmachine.rendered(tmp_path)
    pynvml.nvmlLib = library.Library(tmp_path)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInit()
    yield tmp_path
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def _changed(
    directory: Path, before: dict[str, bytes | str]
) -> dict[str, tuple[bytes | str | None, bytes | str | None]]:
    after = mockmachine.snapshot_of_files(directory)
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


def _fails(status: int, function: Any, *arguments: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        function(*arguments)
    assert raised.value.value == status


def test_a_lost_gpu_answers_nothing_and_stays_on_the_bus(machine: Path) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = mockmachine.snapshot_of_files(machine)
    faults.apply(machine, [Fault(kind=Kind.GPU_LOST, target=GPU0)])
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetName, handle)
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetHandleByIndex, 0)
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetHandleByPciBusId, str(GPU0))
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1))
    assert _changed(machine, before) == {}
    faults.apply(machine, [])
    assert pynvml.nvmlDeviceGetName(handle)


def test_a_gpu_that_fell_off_is_gone_everywhere(machine: Path) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    faults.apply(machine, [Fault(kind=Kind.FALLEN_OFF, target=GPU0)])
    assert [path for path in mockmachine.snapshot_of_files(machine) if str(GPU0) in path] == []
    assert not (machine / "dev/nvidia0").exists()
    assert not any(str(GPU0) in str(path) for path in machine.rglob("*"))
    assert (machine / "dev/nvidia1").exists()
    assert pynvml.nvmlDeviceGetCount() == 1
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetName, handle)
    _fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByPciBusId, str(GPU0))


def test_a_gpu_that_is_plugged_in_shows_in_a_new_session(machine: Path) -> None:
    pynvml.nvmlShutdown()
    faults.apply(machine, [Fault(kind=Kind.FALLEN_OFF, target=GPU0)])
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    faults.apply(machine, [])
    assert pynvml.nvmlDeviceGetCount() == 1
    _fails(abi.NOT_FOUND, pynvml.nvmlDeviceGetHandleByPciBusId, str(GPU0))
    pynvml.nvmlInit()  # a second user of the same session
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)) == uuid


def test_a_gpu_that_was_away_is_lost_to_the_session_that_had_it(machine: Path) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    faults.apply(machine, [Fault(kind=Kind.FALLEN_OFF, target=GPU0)])
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetName, handle)
    faults.apply(machine, [])
    _fails(abi.GPU_IS_LOST, pynvml.nvmlDeviceGetName, handle)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetName(handle)


def test_a_nic_that_fell_off_takes_its_interfaces_along(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.FALLEN_OFF, target=NIC)])
    assert {path.name for path in (machine / "sys/class/net").iterdir()} == {"lo"}
    assert list((machine / "sys/class/infiniband").iterdir()) == []


def test_a_nic_whose_link_is_down(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.LINK_DOWN, target=NIC)])
    net, rdma = machine / "sys/class/net/ibp26s0", machine / "sys/class/infiniband/mlx5_0/ports/1"
    assert ((net / "operstate").read_text(), (net / "carrier").read_text()) == ("down\n", "0\n")
    assert not (net / "speed").exists()
    assert ((rdma / "state").read_text(), (rdma / "phys_state").read_text()) == ("1: DOWN\n", "2: Polling\n")


def test_an_nvlink_that_is_down(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.LINK_DOWN, target=GPU0, link=2)])
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    far = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert [pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(4)] == [1, 1, 0, 1]
    assert [pynvml.nvmlDeviceGetNvLinkState(far, link) for link in range(4)] == [1, 1, 0, 1]
    faults.apply(machine, [Fault(kind=Kind.LINK_DOWN, target=GPU0)])
    for end in (handle, far):
        assert [pynvml.nvmlDeviceGetNvLinkState(end, link) for link in range(4)] == [0, 0, 0, 0]


def test_a_link_that_is_narrow(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.NARROW_LINK, target=GPU1, width=4)])
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle) == 4
    assert pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle) == 16
    function = (machine / f"sys/bus/pci/devices/{GPU1}").resolve()
    for end in (function, function.parent):
        assert (end / "current_link_width").read_text() == "4\n"
        (status,) = struct.unpack_from("<H", (end / "config").read_bytes(), 0x60 + 0x12)
        assert status >> 4 & 0x3F == 4
    faults.apply(machine, [])
    assert (function.parent / "current_link_width").read_text() == "16\n"


def test_no_numa_node_is_named(machine: Path) -> None:
    before = mockmachine.snapshot_of_files(machine)
    faults.apply(machine, [Fault(kind=Kind.NUMA_UNKNOWN, target=GPU1)])
    changed = {path.rpartition("/")[2]: new for path, (_old, new) in _changed(machine, before).items()}
    assert changed == {"numa_node": b"-1\n", "local_cpulist": b"0-7\n", "local_cpus": b"ff\n"}
    faults.apply(machine, [Fault(kind=Kind.NUMA_UNKNOWN)])
    assert {path.read_text() for path in machine.glob("sys/bus/pci/devices/*/numa_node")} == {"-1\n"}


def test_a_wrong_numa_node_is_named(machine: Path) -> None:
    before = mockmachine.snapshot_of_files(machine)
    faults.apply(machine, [Fault(kind=Kind.NUMA_WRONG, target=GPU1, node=1)])
    changed = {path.rpartition("/")[2]: new for path, (_old, new) in _changed(machine, before).items()}
    assert changed == {"numa_node": b"1\n", "local_cpulist": b"2-3,6-7\n", "local_cpus": b"cc\n"}
    faults.apply(machine, [Fault(kind=Kind.NUMA_WRONG, node=1)])
    for name in ("devices/*/numa_node", "devices/*/local_cpulist"):
        assert len({path.read_text() for path in machine.glob(f"sys/bus/pci/{name}")}) == 1
    assert {path.read_text() for path in machine.glob("sys/class/pci_bus/*/cpulistaffinity")} == {"2-3,6-7\n"}


def test_a_gpu_bound_to_vfio(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.VFIO_BOUND, target=GPU0)])
    function = machine / f"sys/bus/pci/devices/{GPU0}"
    assert (function / "driver").resolve() == machine / "sys/bus/pci/drivers/vfio-pci"
    assert not (machine / f"sys/bus/pci/drivers/nvidia/{GPU0}").is_symlink()
    group = (function / "iommu_group").resolve().name
    assert (machine / "dev/vfio" / group).exists()
    assert not (machine / f"proc/driver/nvidia/gpus/{GPU0}").exists()
    assert pynvml.nvmlDeviceGetCount() == 1


def test_a_node_whose_driver_comes_later(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.NO_DRIVER, until_s=1000)], clock=lambda: 10.0)
    timeline = faults.Timeline(machine)
    assert timeline.advance(11.0) == 1010.0
    assert not list(machine.glob("dev/nvidia*"))
    assert not (machine / "proc/driver/nvidia").exists()
    assert not (machine / "sys/module/nvidia").exists()
    assert not (machine / f"sys/bus/pci/devices/{GPU0}/driver").is_symlink()
    assert "nvidia" not in (machine / "proc/devices").read_text()
    assert timeline.advance(1010.0) is None
    assert (machine / "dev/nvidia0").exists()
    assert (machine / "proc/driver/nvidia/version").exists()


def test_nvml_without_a_driver(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.NO_DRIVER)])
    _fails(abi.DRIVER_NOT_LOADED, pynvml.nvmlInit)
    faults.apply(machine, [])
    pynvml.nvmlInit()


def test_memory_errors_and_heat(machine: Path) -> None:
    faults.apply(
        machine, [Fault(kind=Kind.ECC, target=GPU0, count=3), Fault(kind=Kind.THERMAL, target=GPU0, temperature_c=91)]
    )
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert [pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, counter) for counter in (0, 1)] == [3, 3]
    assert pynvml.nvmlDeviceGetRemappedRows(handle) == (0, 1, 1, 0)
    assert pynvml.nvmlDeviceGetTemperature(handle, 0) == 91
    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    assert reasons & pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert pynvml.nvmlDeviceGetTotalEccErrors(pynvml.nvmlDeviceGetHandleByIndex(1), 1, 0) == 0


def test_errors_of_single_functions(machine: Path) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    faults.apply(machine, [Fault(kind=Kind.NVML_ERROR, target=GPU0, function="nvmlDeviceGetName", error=999)])
    _fails(999, pynvml.nvmlDeviceGetName, handle)
    assert pynvml.nvmlDeviceGetUUID(handle)
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1))
    faults.apply(machine, [Fault(kind=Kind.NVML_ERROR, error=18, function="nvmlInitWithFlags")])
    _fails(18, pynvml.nvmlInit)


def test_a_hang_lasts_until_it_is_lifted(machine: Path) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG, target=GPU0, function="nvmlDeviceGetName")])
    answered = threading.Event()

    def ask() -> None:
        pynvml.nvmlDeviceGetName(handle)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    assert not answered.wait(0.2)
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1))
    faults.apply(machine, [])
    assert answered.wait(40)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_crash_ends_the_process_that_called(tmp_path: Path, number: signal.Signals) -> None:
    mockmachine.rendered(tmp_path)
    faults.apply(tmp_path, [Fault(kind=Kind.NVML_CRASH, signal=number)])
    program = (
        "import ctypes, pathlib, sys; from discovery.mock import library;"
        "library.load_library(pathlib.Path(sys.argv[1])).nvmlInitWithFlags(0)"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], check=False, capture_output=True)
    assert ended.returncode == -number
    faults.apply(tmp_path, [])
    assert subprocess.run([sys.executable, "-c", program, tmp_path], check=False, capture_output=True).returncode == 0


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from(ANY_FAULTS), max_size=4), min_size=1, max_size=4))
def test_a_fault_that_heals_leaves_nothing_behind(tmp_path: Path, steps: list[list[Fault]]) -> None:
    """Through any sequence of faults, and back: the tree is the recorded one, to the byte."""
    base = mockmachine.parsed().files
    mockmachine.rendered(tmp_path)
    for step in [*steps, []]:
        faults.apply(tmp_path, step)
        wanted = {path: entry for path, entry in {**base, **faults.effects(base, step)}.items() if entry is not None}
        assert mockmachine.snapshot_of_files(tmp_path) == {
            path: entry.target
            if isinstance(entry, recording.Link)
            else entry.encode()
            if isinstance(entry, str)
            else entry
            for path, entry in wanted.items()
        }


def test_a_fault_of_the_future_takes_effect_by_itself(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    loaded = library.load_library(tmp_path)
    link = tmp_path / f"sys/bus/pci/devices/{GPU0}"
    for at_s, until_s, there in ((1000.0, 2000.0, True), (0.2, 1000.0, False), (0.0, 0.2, True)):
        faults.apply(tmp_path, [Fault(kind=Kind.FALLEN_OFF, target=GPU0, at_s=at_s, until_s=until_s)])
        until(lambda there=there: link.is_symlink() is there)  # type: ignore[misc]
    assert isinstance(loaded, library.Library)


@pytest.mark.parametrize(("now", "on"), [(99.0, False), (109.9, False), (110.0, True), (119.9, True), (120.0, False)])
def test_when_a_fault_is_on(now: float, on: bool) -> None:
    placed = Placed(fault=Fault(kind=Kind.GPU_LOST, target=GPU0, at_s=10, until_s=20), since=100.0)
    assert placed.on(now) is on
    nvml = mockmachine.parsed().nvml
    seen = view.view(live.Live(recording="", nvml=nvml, faults=(placed,)), now=now)
    assert (GPU0 in seen.lost) is on


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Fault(kind=Kind.XID, target=GPU0), "xid needs xid"),
        (Fault(kind=Kind.GPU_LOST), "gpu-lost needs target"),
        (Fault(kind=Kind.GPU_LOST, target=GPU0, width=4), "gpu-lost takes no width"),
        (Fault(kind=Kind.NARROW_LINK, target=GPU0, width=64), "width 64 is not between 1 and 32"),
        (Fault(kind=Kind.ECC, target=GPU0, at_s=-1), "cannot begin before it is put in place"),
        (Fault(kind=Kind.ECC, target=GPU0, at_s=5, until_s=5), "must end after it begins"),
        (Fault(kind=Kind.XID, target=GPU0, xid=79, until_s=5), "an Xid is an event and does not end"),
        (Fault(kind=Kind.GPU_LOST, target=GPU0._replace(bus=0xFF)), "no PCI function 0000:ff:00.0"),
        (Fault(kind=Kind.NUMA_WRONG), "numa-wrong needs node"),
        (Fault(kind=Kind.NUMA_WRONG, node=2), "no NUMA node 2 on this machine"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_and_changes_nothing(tmp_path: Path, wrong: Fault, why: str) -> None:
    mockmachine.rendered(tmp_path)
    with pytest.raises(DocumentError, match=why):
        faults.apply(tmp_path, [Fault(kind=Kind.NUMA_UNKNOWN), wrong])
    assert faults.current(tmp_path) == ()


def test_a_directory_that_is_no_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"recording\.json: cannot be read"):
        faults.apply(tmp_path, [])
    with pytest.raises(DocumentError, match="not the state of a rendered machine"):
        faults.Timeline(tmp_path).advance(0.0)


def test_every_kind_has_a_rule() -> None:
    assert set(fault.RULES) == set(Kind)
    assert {field.name for field in dataclasses.fields(Fault)} == fault.PARAMETERS | {"kind", "at_s", "until_s"}
