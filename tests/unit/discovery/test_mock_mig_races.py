# SPDX-License-Identifier: Apache-2.0
"""MIG of the mock among several processes, and in the middle of things.

- of two processes that want one place exactly one gets it; GPUs do not wait for each other, nor does anybody for the hardware
- killed at any moment a process leaves a state that reads, and files that are right again at the next look
- faults by name, before a call did anything and after
- capability files follow the instances through faults, renderings and machines that begin with some
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import abi, fault, faults, library, live, mig, migfiles, mighardware, migrules, render, state, zoo
from discovery.mock.fault import Kind
from discovery.mock.status import StatusError
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

G1 = 19

PROGRAM = """
import ctypes, pathlib, sys
import pynvml
from discovery.mock import library

def create(index, start):
    place = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, 1))
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 19, place)
    return instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)

def destroy(instance, compute):
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)

pynvml.nvmlLib = library.load_library(pathlib.Path(sys.argv[1]))
pynvml.nvmlInit()
print("ready", flush=True)
sys.stdin.readline()
"""

ALL_PLACES = """
for start in range(7):
    try:
        create(0, start)
    except pynvml.NVMLError as err:
        print(start, err.value)
    else:
        print(start, 0)
"""

FOR_EVER = """
while True:
    for start in range(7):
        destroy(*create(0, start))
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """The small machine with both GPUs in MIG mode, and its library in pynvml."""
    mockmachine.rendered(tmp_path)
    for pci in (GPU0, GPU1):
        mig.admin_mode(tmp_path, pci, True)
    pynvml.nvmlLib = library.Library(tmp_path)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInit()
    yield tmp_path
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def program(machine: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that have loaded the library and wait for a line."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + text, str(machine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    """Lets a process begin."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def placed(start: int, *, on: int = 0) -> Any:
    """A GPU instance of one slice."""
    place = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start, 1))
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(pynvml.nvmlDeviceGetHandleByIndex(on), G1, place)


def times(directory: Path, pci: PciAddress, **seconds: float) -> None:
    """How long a GPU takes."""

    def changed(now: live.Live) -> live.Live:
        assert now.nvml is not None
        gpus = tuple(
            dataclasses.replace(each, mig=dataclasses.replace(each.mig, times=state.MigTimes(**seconds)))
            if each.pci == pci and each.mig is not None
            else each
            for each in now.nvml.gpus
        )
        return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=gpus))

    live.LiveFile(directory).update(changed)


def files(directory: Path) -> set[str]:
    """The capability files that are there."""
    return {path for path in migfiles._there(directory) if not path.endswith("mig-minors")}


def wanted(directory: Path) -> set[str]:
    """The capability files that the state asks for."""
    nvml = live.LiveFile(directory).read().nvml
    assert nvml is not None
    return {path for gpu in nvml.gpus for path in migfiles.of_gpu(gpu)}


def starts(directory: Path, pci: PciAddress = GPU0) -> list[int]:
    """Where instances of a GPU begin."""
    return sorted(each.placement.start for each in mig.instances(directory)[pci] or ())


def working(directory: Path, pci: PciAddress) -> None:
    """Waits until somebody changes a GPU."""
    lock = os.open(directory / mighardware.LOCKS / f"{pci}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            fcntl.flock(lock, fcntl.LOCK_UN)
            threading.Event().wait(0.002)
    finally:
        os.close(lock)


def test_of_two_processes_exactly_one_gets_a_place(
    machine: Path, program: Callable[[str], subprocess.Popen[str]]
) -> None:
    times(machine, GPU0, create_s=0.01)
    both = [program(ALL_PLACES) for _ in range(2)]
    for process in both:
        go(process)
    told = [[line.split() for line in process.communicate()[0].splitlines()] for process in both]
    assert [len(each) for each in told] == [7, 7]
    for start in range(7):
        assert sorted(int(each[start][1]) for each in told) == [abi.SUCCESS, abi.INSUFFICIENT_RESOURCES]
    assert starts(machine) == list(range(7))
    assert files(machine) == wanted(machine)


def test_nobody_waits_for_the_hardware_of_another_gpu(
    machine: Path, program: Callable[[str], subprocess.Popen[str]]
) -> None:
    times(machine, GPU0, create_s=600.0)
    slow = program(ALL_PLACES)
    go(slow)
    working(machine, GPU0)
    placed(3, on=1)
    pynvml.nvmlGpuInstanceDestroy(placed(4, on=1))
    mig.admin_create(machine, GPU1, "3g.40gb", 4)
    assert starts(machine, GPU1) == [3, 4]
    assert pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0)) == [1, 1]
    assert starts(machine) == []
    slow.kill()
    slow.wait()
    times(machine, GPU0)
    placed(0)
    assert starts(machine) == [0]
    assert files(machine) == wanted(machine)


def test_what_the_hardware_refuses_it_refuses_at_once(machine: Path) -> None:
    times(machine, GPU0, create_s=600.0, destroy_s=600.0, mode_s=600.0)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    mig.admin_use(machine, GPU0, [state.Process(pid=1)])
    for function, *arguments in (
        (pynvml.nvmlDeviceCreateGpuInstance, gpu, 77),
        (pynvml.nvmlDeviceSetMigMode, gpu, 0),
    ):
        with pytest.raises(pynvml.NVMLError):
            function(*arguments)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == abi.SUCCESS


def test_what_happens_while_the_hardware_works_counts(machine: Path) -> None:
    """A GPU that is lost meanwhile makes nothing."""
    hand = mighardware.Hand(machine, live.LiveFile(machine))
    asked: list[state.Gpu] = []

    def rule(gpu: state.Gpu) -> tuple[state.Gpu, state.MigInstance]:
        if not asked:
            faults.apply(machine, [fault.Fault(kind=Kind.GPU_LOST, target=GPU0)])
        asked.append(gpu)
        return migrules.create(gpu, G1, None)

    with pytest.raises(StatusError, match="GPU is lost"):
        hand.change(GPU0, rule)
    assert len(asked) == 1
    assert starts(machine) == []
    assert files(machine) == set()


def test_killed_at_any_moment_it_leaves_a_machine(
    machine: Path, program: Callable[[str], subprocess.Popen[str]]
) -> None:
    draw = random.Random(6)
    known = {path.name for path in machine.iterdir()} - {"locks"}
    for _ in range(6):
        process = program(FOR_EVER)
        go(process)
        working(machine, GPU0)
        threading.Event().wait(draw.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = mig.instances(machine)[GPU0]
        assert left is not None
        assert len(left) <= 1
        library.load_library(machine)
        assert files(machine) == wanted(machine)
        for instance in left:
            mig.admin_destroy(machine, GPU0, "1g.10gb", instance.placement.start)
        assert files(machine) == set()
    (machine / "new").unlink(missing_ok=True)
    (machine / "nvml.json.new").unlink(missing_ok=True)
    assert sorted(path.name for path in machine.iterdir()) == sorted([*known, "locks"])


def test_files_that_do_not_fit_are_right_again_at_the_next_look(machine: Path) -> None:
    made = mig.admin_create(machine, GPU0, "1g.10gb", 2)
    here = machine / f"proc/driver/nvidia/capabilities/gpu0/mig/gi{made.id}"
    right = files(machine)
    for look in (library.load_library, lambda directory: render.render(mockmachine.parsed(), directory)):
        (here / "access").unlink()
        other = machine / "proc/driver/nvidia/capabilities/gpu1/mig/gi9/access"
        other.parent.mkdir(parents=True)
        other.write_text("x")
        (machine / "dev/nvidia-caps/nvidia-cap999").write_text("")
        look(machine)
        assert files(machine) == right
        assert not other.parent.exists()
    assert starts(machine) == [2]


def test_a_call_hangs_before_or_after_it_did_its_work(machine: Path) -> None:
    name = "nvmlDeviceCreateGpuInstanceWithPlacement"
    for start, after in ((0, None), (1, True)):
        faults.apply(machine, [fault.Fault(kind=Kind.NVML_HANG, target=GPU0, function=name, after=after)])
        made: list[Any] = []
        thread = threading.Thread(target=lambda start=start, made=made: made.append(placed(start)))
        thread.start()
        if after:
            while starts(machine) != [0, 1]:
                threading.Event().wait(0.005)
        assert (made, starts(machine)) == ([], [0, 1] if after else [])
        placed(5, on=1) if after else None
        faults.apply(machine, [])
        thread.join()
        assert pynvml.nvmlGpuInstanceGetInfo(made[0]).placement.start == start
    assert starts(machine) == [0, 1]


def test_a_call_fails_before_or_after_it_did_its_work(machine: Path) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    cases: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("nvmlDeviceCreateGpuInstanceWithPlacement", lambda: placed(0)),
        ("nvmlGpuInstanceDestroy", lambda: pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu, 7))),
    )
    for name, function in cases:
        for after in (None, True):
            before = starts(machine)
            item = fault.Fault(kind=Kind.NVML_ERROR, target=GPU0, function=name, error=abi.UNKNOWN, after=after)
            faults.apply(machine, [item])
            with pytest.raises(pynvml.NVMLError_Unknown):
                function()
            assert (starts(machine) != before) == bool(after)
        faults.apply(machine, [])


def test_a_crash_after_the_work_leaves_the_work(machine: Path, program: Callable[[str], subprocess.Popen[str]]) -> None:
    name = "nvmlGpuInstanceCreateComputeInstance"
    for after, compute in ((None, 0), (True, 1)):
        item = fault.Fault(kind=Kind.NVML_CRASH, function=name, signal=signal.SIGKILL, after=after)
        faults.apply(machine, [item])
        process = program(ALL_PLACES)
        go(process)
        assert process.wait() == -signal.SIGKILL
        faults.apply(machine, [])
        (left,) = mig.instances(machine)[GPU0] or ()
        assert len(left.compute) == compute
        mig.admin_destroy(machine, GPU0, "1g.10gb", 0)


def test_a_gpu_that_its_driver_leaves_has_no_instances_any_more(machine: Path) -> None:
    for item in (
        fault.Fault(kind=Kind.VFIO_BOUND, target=GPU0),
        fault.Fault(kind=Kind.FALLEN_OFF, target=GPU0),
        fault.Fault(kind=Kind.NO_DRIVER),
    ):
        for pci in (GPU0, GPU1):
            if not starts(machine, pci):
                mig.admin_create(machine, pci, "1g.10gb", 0)
        faults.apply(machine, [item])
        assert [path for path in files(machine) if "gpu0" in path] == []
        assert bool(files(machine)) == (item.target is not None)
        faults.apply(machine, [])
        assert (starts(machine), starts(machine, GPU1)) == ([], [0] if item.target else [])
        assert files(machine) == wanted(machine)
    assert mig.instances(machine) == {GPU0: (), GPU1: ()}


def test_a_machine_may_begin_with_instances(tmp_path: Path) -> None:
    machine = zoo.load("dgx-h100-mig")
    links = {path: entry for path, entry in machine.files.items() if path.startswith("sys/bus/pci/devices/")}
    machine = dataclasses.replace(machine, files=links)
    render.render(machine, tmp_path)
    there = mig.instances(tmp_path)
    assert sum(len(each or ()) for each in there.values()) > 7
    assert files(tmp_path) == wanted(tmp_path) != set()
    (pci, before), *_ = [(pci, each) for pci, each in there.items() if each and len(each) == 7]
    mig.admin_destroy(tmp_path, pci, "1g.10gb", 2)
    render.render(machine, tmp_path)
    after = mig.instances(tmp_path)[pci]
    assert after is not None
    assert {each.id for each in before} - {each.id for each in after} == {9}
    assert files(tmp_path) == wanted(tmp_path)
    made = mig.admin_create(tmp_path, pci, "1g.10gb", 2)
    (again,) = [each for each in before if each.id == 9]
    assert [each.uuid for each in made.compute] == [each.uuid for each in again.compute]


def test_the_admin_says_what_is_in_the_way(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*arguments: str) -> tuple[int, str, str]:
        status = mig.main([str(machine), *arguments])
        told = capsys.readouterr()
        return status, told.out, told.err

    assert ran("create", "0", "3g.40gb", "4") == (0, "", "")
    assert ran("create", str(GPU0), "1g.10gb") == (0, "", "")
    status, _, problem = ran("create", "0", "2g.20gb", "4")
    assert (status, "3g.40gb at 4 (GPU instance 2)" in problem) == (1, True)
    assert ran("create", "0", "9g.1gb")[::2] == (
        1,
        f"GPU {GPU0}: it has no profile 9g.1gb; it has 1g.10gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb, 1g.10gb+me, 1g.20gb\n",
    )
    assert "cannot begin at 3; it can at 0, 2, 4" in ran("create", "0", "2g.20gb", "3")[2]
    assert "In use by another client" in ran("mode", "0", "off")[2]
    assert ran("use", "1", "41", "42") == (0, "", "")
    lines = ran("list")[1].splitlines()
    assert lines[0] == f"0  {GPU0}  MIG on"
    assert lines[3] == f"1  {GPU1}  MIG on, in use by 41, 42"
    assert ran("use", "1") == (0, "", "")
    assert ran("mode", "1", "off") == (0, "", "")
    assert ran("destroy", "0", "3g.40gb", "4") == (0, "", "")
    assert "there is no 3g.40gb at 4" in ran("destroy", "0", "3g.40gb", "4")[2]
    assert "there is no GPU 9" in ran("mode", "9", "on")[2]
    assert ran("explode")[0] == 2
    assert mig.main([str(machine / "nowhere"), "list"]) == 1
    with pytest.raises(DocumentError, match="Not Supported"):
        mig.admin_create(machine, GPU1, "1g.10gb")
