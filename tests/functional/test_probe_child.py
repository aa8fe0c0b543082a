# SPDX-License-Identifier: Apache-2.0
"""The child process that looks at the hardware, for real: this machine, a rendered one, hangs, crashes, kills, broken
answers, death of the parent, and what the parent must never import.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from discovery import check, child, codec, errors, frames, model
from discovery.address import parse
from discovery.mock import fault, faults, render, zoo
from tests.fakes import processes

GPU = parse("0000:01:00.0")
PATIENCE_S = 60.0


@pytest.fixture
def mock() -> Iterator[Path]:
    """A rendered workstation with one GPU; in memory where that is possible, since it is made of many files."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        tree = render.render(zoo.load("workstation-rtx"), Path(directory) / "machine")
        yield tree.directory


def source(mock: Path) -> child.Source:
    return child.Source.rendered(mock)


@pytest.fixture
def prober(mock: Path) -> Iterator[child.ProbeChild]:
    prober = child.ProbeChild(source=source(mock), options=child.ProbeOptions())
    yield prober
    prober.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def workers(arguments: str) -> list[int]:
    """The worker processes that were started with `arguments`, zombies left out."""
    return processes.running("discovery.worker", arguments)


def failure(call: Callable[[], object]) -> errors.ProbeError:
    with pytest.raises(errors.ProbeError) as caught:
        call()
    return caught.value


def test_this_machine_is_read_as_its_sysfs_shows_it() -> None:
    prober = child.ProbeChild(source=child.Source(), options=child.ProbeOptions())
    try:
        snapshot = prober.probe(timeout_s=PATIENCE_S)
        scanned = prober.rescan(timeout_s=PATIENCE_S)
    finally:
        prober.close()
    assert check.violations(snapshot) == ()
    assert snapshot.origin is model.Origin.THIS_NODE
    assert snapshot.host.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    devices = Path("/sys/bus/pci/devices")
    names = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    classes = {name: int((devices / name / "class").read_text(), 16) >> 16 for name in names}
    vendors = {name: int((devices / name / "vendor").read_text(), 16) for name in names}
    assert {str(nic.address) for nic in snapshot.nics} >= {name for name in names if classes[name] == 0x02}
    assert {str(gpu.address) for gpu in snapshot.gpus} == {
        name
        for name in names
        if classes[name] == 0x03 and vendors[name] == 0x10DE and not (devices / name / "physfn").exists()
    }
    for function in check.functions(snapshot):
        own = devices / str(function.address)
        parents = [part for part in str(own.readlink()).split("/") if part.count(":") == 2]
        assert [str(bridge) for bridge in function.bridges] == parents[:-1][-len(function.bridges) :]
        numa = int((own / "numa_node").read_text())
        assert function.numa_node == (None if numa < 0 else numa)
        assert function.driver == ((own / "driver").readlink().name if (own / "driver").exists() else None)
    assert {reading.address for reading in scanned.gpus} == {gpu.address for gpu in snapshot.gpus}


def test_every_verb_of_a_rendered_machine(prober: child.ProbeChild, mock: Path) -> None:
    snapshot = prober.probe(timeout_s=PATIENCE_S)
    (gpu,) = snapshot.gpus
    assert (gpu.address, gpu.state) == (GPU, model.GpuState.READY)
    assert snapshot.origin is model.Origin.RECORDING
    (reading,) = prober.rescan(timeout_s=PATIENCE_S).gpus
    assert (reading.address, reading.state, reading.uuid) == (GPU, model.GpuState.READY, gpu.uuid)
    (sample,) = prober.sample(timeout_s=PATIENCE_S)
    assert sample.address == GPU
    in_process = child.InProcessProber(source=source(mock), options=child.ProbeOptions())
    assert codec.same_content(in_process.probe(timeout_s=PATIENCE_S), snapshot)
    assert in_process.rescan(timeout_s=PATIENCE_S) == prober.rescan(timeout_s=PATIENCE_S)
    assert in_process.sample(timeout_s=PATIENCE_S) == (sample,)
    in_process.close()
    assert not failure(lambda: in_process.probe(timeout_s=PATIENCE_S)).retryable


def test_a_hang_costs_one_look(prober: child.ProbeChild, mock: Path) -> None:
    healthy = prober.probe(timeout_s=PATIENCE_S)
    faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    err = failure(lambda: prober.rescan(timeout_s=0.5))
    assert "no answer within 0.5 s" in str(err)
    assert err.retryable
    faults.apply(mock, [])
    assert codec.same_content(prober.probe(timeout_s=PATIENCE_S), healthy)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_of_nvml_costs_one_look_and_leaves_a_trace(
    prober: child.ProbeChild, mock: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_CRASH, signal=int(number))])
    with caplog.at_level(logging.WARNING, logger="discovery.process"):
        err = failure(lambda: prober.probe(timeout_s=PATIENCE_S))
    assert f"was ended by {number.name}" in str(err)
    if number is not signal.SIGKILL:
        assert "discovery/nvml.py" in caplog.text  # faulthandler tells where
    faults.apply(mock, [])
    assert len(prober.probe(timeout_s=PATIENCE_S).gpus) == 1


def test_a_driver_replaced_under_the_worker_gets_a_new_worker(prober: child.ProbeChild, mock: Path) -> None:
    prober.rescan(timeout_s=PATIENCE_S)
    (first,) = workers(str(mock))
    faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_ERROR, error=18)])  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
    (gpu,) = prober.probe(timeout_s=PATIENCE_S).gpus
    assert gpu.state is model.GpuState.UNREADABLE
    faults.apply(mock, [])
    (reading,) = prober.rescan(timeout_s=PATIENCE_S).gpus
    assert reading.state is model.GpuState.READY
    (second,) = workers(str(mock))
    assert second != first


def test_a_worker_that_talks_without_end_is_heard_out_but_not_logged(
    mock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nfor _ in range(1000): print('x' * 2000, file=sys.stderr)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prober = child.ProbeChild(source=source(mock), options=child.ProbeOptions())
    with caplog.at_level(logging.WARNING, logger="discovery.process"):
        assert len(prober.rescan(timeout_s=PATIENCE_S).gpus) == 1
        prober.close()
    assert len(caplog.records) == 101
    assert "says more than is logged" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 600


def test_a_worker_that_is_killed_between_two_looks_is_replaced_in_silence(prober: child.ProbeChild, mock: Path) -> None:
    prober.rescan(timeout_s=PATIENCE_S)
    (worker,) = workers(str(mock))
    os.kill(worker, signal.SIGKILL)
    assert len(prober.rescan(timeout_s=PATIENCE_S).gpus) == 1


def test_a_root_that_is_missing_is_an_error_that_repeating_does_not_mend(tmp_path: Path) -> None:
    prober = child.ProbeChild(source=child.Source(sys=tmp_path / "no", proc=tmp_path), options=child.ProbeOptions())
    try:
        err = failure(lambda: prober.probe(timeout_s=PATIENCE_S))
    finally:
        prober.close()
    assert "(for /sys) is no directory" in str(err)
    assert not err.retryable


def test_a_mock_that_is_none_is_said_with_the_last_words_of_the_worker(tmp_path: Path) -> None:
    prober = child.ProbeChild(source=child.Source(mock=tmp_path / "no"), options=child.ProbeOptions())
    try:
        err = failure(lambda: prober.probe(timeout_s=PATIENCE_S))
    finally:
        prober.close()
    assert "ended with status 1" in str(err)
    assert str(tmp_path) in str(err)


def test_others_wait_for_their_turn_inside_their_own_time(prober: child.ProbeChild, mock: Path) -> None:
    prober.rescan(timeout_s=PATIENCE_S)
    faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    outcomes: list[str] = []
    slow = threading.Thread(target=lambda: outcomes.append(str(failure(lambda: prober.probe(timeout_s=3)))))
    slow.start()
    wait_for(prober._turn.locked)
    assert "another look at the hardware did not end" in str(failure(lambda: prober.sample(timeout_s=0.1)))
    slow.join()
    assert "no answer within 3 s" in outcomes[0]


def test_closing_ends_a_look_under_way_and_refuses_later_ones(prober: child.ProbeChild, mock: Path) -> None:
    prober.rescan(timeout_s=PATIENCE_S)
    faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    outcomes: list[errors.ProbeError] = []
    under_way = threading.Thread(target=lambda: outcomes.append(failure(lambda: prober.probe(timeout_s=PATIENCE_S))))
    under_way.start()
    wait_for(prober._turn.locked)
    prober.close()
    under_way.join()
    assert "closed" in str(outcomes[0])
    assert "closed" in str(failure(lambda: prober.probe(timeout_s=PATIENCE_S)))
    assert workers(str(mock)) == []
    prober.close()


@pytest.mark.parametrize("hanging", [False, True])
def test_the_worker_dies_with_its_parent(mock: Path, *, hanging: bool) -> None:
    program = textwrap.dedent(f"""
        import pathlib, sys
        from discovery import child
        mock = pathlib.Path({str(mock)!r})
        source = child.Source.rendered(mock)
        prober = child.ProbeChild(source=source, options=child.ProbeOptions())
        prober.rescan(timeout_s=30)
        print("ready", flush=True)
        sys.stdin.readline()
        prober.probe(timeout_s=600)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    assert len(workers(str(mock))) == 1
    if hanging:
        faults.apply(mock, [fault.Fault(kind=fault.Kind.NVML_HANG)])
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        time.sleep(0.5)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not workers(str(mock)))


def test_the_parent_imports_neither_nvml_nor_psutil(mock: Path) -> None:
    program = textwrap.dedent(f"""
        import pathlib, sys
        from discovery import child
        mock = pathlib.Path({str(mock)!r})
        source = child.Source.rendered(mock)
        prober = child.ProbeChild(source=source, options=child.ProbeOptions())
        assert prober.probe(timeout_s=30).gpus
        prober.close()
        print([name for name in ("pynvml", "psutil", "ctypes", "discovery.probe") if name in sys.modules])
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_what_is_printed_in_the_worker_does_not_disturb_its_answers(mock: Path) -> None:
    read, write = os.pipe()
    arguments = child.ProbeChild(source=source(mock), options=child.ProbeOptions())._arguments
    program = "import os; os.write(1, b'early\\n'); from discovery import worker; worker.VERBS['sample'] = lambda _: print('stray') or []; worker.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, arguments],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    os.close(write)
    assert process.stdin is not None
    assert os.read(read, 6) == b"early\n"
    frames.write(process.stdin.fileno(), {"verb": "sample"})
    assert frames.read(read, remaining_s=lambda: PATIENCE_S) == {"began": True}
    assert frames.read(read, remaining_s=lambda: PATIENCE_S) == {"answer": []}
    frames.write(process.stdin.fileno(), {"verb": "nonsense"})
    assert frames.read(read, remaining_s=lambda: PATIENCE_S) == {"began": True}
    assert frames.read(read, remaining_s=lambda: PATIENCE_S) == {"error": "KeyError: 'nonsense'", "retryable": True}
    _, said = process.communicate(timeout=PATIENCE_S)
    assert b"stray" in said
    assert process.returncode == 0
    os.close(read)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed"),
        (b"\x00\x00", "closed"),
        (b"\x00\x00\x00\x05abc", "closed"),
        (b"\x00\x00\x00\x03abc", "no JSON"),
        (b"\x00\x00\x00\x02\xff\xff", "no JSON"),
        (b"\x00\x00\x40\x00" + b"[" * 16384, "no JSON"),
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes"),
    ],
)
def test_a_broken_message_is_an_error(data: bytes, message: str) -> None:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    with pytest.raises(frames.FrameError, match=message):
        frames.read(read)
    os.close(read)


def test_a_message_that_does_not_come_in_time_is_an_error() -> None:
    read, write = os.pipe()
    os.write(write, b"\x00\x00")
    with pytest.raises(frames.FrameError) as caught:
        frames.read(read, remaining_s=lambda: 0.01)
    assert isinstance(caught.value.__cause__, TimeoutError)
    os.close(read)
    os.close(write)
