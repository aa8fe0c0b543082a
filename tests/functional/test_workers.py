# SPDX-License-Identifier: Apache-2.0
"""The processes that change the hardware, for real.

- a hang costs its deadline and a crash its call; the message says whether anything was changed, and the next call goes on
- an agent that is killed: nothing that it did not commit is begun, what it began is ended, and whoever comes next waits for that
- calls for different GPUs never wait for each other, calls for one GPU take turns, over processes
- one worker stays, others go; one that was killed while it had nothing to do, or that has an old library, costs nothing
"""

from __future__ import annotations

import fcntl
import functools
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
from typing import Any

import pytest

from discovery import errors, mig, options, workers
from discovery.mock import faults
from discovery.mock import mig as admin
from discovery.mock.fault import Fault, Kind
from discovery.work import Kind as Why
from tests.fakes import mockmachine
from tests.fakes import processes as running
from tests.fakes.mockmachine import GPU0, GPU1

PATIENCE_S = 50.0
ONE, THREE = 19, 9
ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine() -> Iterator[Path]:
    """Two H100; in memory where that is possible, since it is made of many files."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        mockmachine.rendered(Path(directory) / "machine")
        yield Path(directory) / "machine"


def source(machine: Path) -> options.Source:
    return options.Source.rendered(machine)


def pool(machine: Path, **settings: float) -> workers.Workers:
    return workers.Workers(source=source(machine), locks=machine.parent / "turns", **settings)  # type: ignore[arg-type]


@pytest.fixture
def work(machine: Path) -> Iterator[workers.Workers]:
    work = pool(machine)
    yield work
    work.close()


def create(
    work: workers.Workers,
    *starts: int,
    gpu: Any = GPU0,
    begun: bool = False,
    commit: Callable[[], None] = lambda: None,
    timeout_s: float = PATIENCE_S,
) -> tuple[mig.MigInstance, ...]:
    """Instances of one slice."""
    wanted = [mig.Partition(gpu=gpu, profile_id=ONE, start=start) for start in starts]
    return work.create(gpu, wanted, begun=begun, toggle=True, commit=commit, timeout_s=timeout_s)


def destroy(work: workers.Workers, *starts: int, gpu: Any = GPU0) -> None:
    places = [mig.Partition(gpu=gpu, profile_id=ONE, start=start) for start in starts]
    work.destroy(gpu, places, timeout_s=PATIENCE_S)


def there(machine: Path, gpu: Any = GPU0) -> list[int] | None:
    """Where instances begin; None while MIG is off."""
    instances = admin.instances(machine)[gpu]
    return None if instances is None else sorted(each.placement.start for each in instances)


def refusal(call: Callable[[], object]) -> errors.WorkError:
    with pytest.raises(errors.WorkError) as caught:
        call()
    return caught.value


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def processes(machine: Path) -> list[int]:
    """The workers of a machine, zombies left out."""
    return running.running("discovery.hands", str(machine))


def awaited(machine: Path) -> bool:
    """Whether somebody waits for the turn at the first GPU (proc(5), /proc/locks: a waiting lock has an arrow)."""
    inode = (machine.parent / "turns" / f"{GPU0}.lock").stat().st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{inode} " in line for line in lines)


class Later(threading.Thread):
    """A call in a thread of its own, with its outcome."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except errors.WorkError as err:
            self.outcome = err

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.outcome


def test_one_worker_does_one_call_after_the_other(machine: Path, work: workers.Workers) -> None:
    work.start()
    (first,) = processes(machine)
    commits: list[bool] = []
    made = create(work, 3, 1, commit=lambda: commits.append(there(machine) is None))
    assert ([each.placement.start for each in made], commits) == ([3, 1], [True])
    assert all(each.whole and len(each.nodes) == 2 for each in made)
    assert refusal(lambda: work.whole(GPU0, toggle=True, timeout_s=PATIENCE_S)).kind == Why.OCCUPIED
    destroy(work, 1, 3)
    work.whole(GPU0, toggle=True, timeout_s=PATIENCE_S)
    assert there(machine) is None
    assert processes(machine) == [first]
    work.close()
    assert processes(machine) == []


def test_a_refusal_crosses_with_its_kind(machine: Path, work: workers.Workers) -> None:
    admin.admin_mode(machine, GPU0, True)
    foreign = admin.admin_create(machine, GPU0, "3g.40gb", 0)
    refused = refusal(lambda: create(work, 2))
    assert (refused.kind, refused.retryable) == (Why.OCCUPIED, False)
    assert foreign.compute[0].uuid in str(refused)


def test_a_commit_that_fails_leaves_worker_and_gpu_as_they_were(machine: Path, work: workers.Workers) -> None:
    work.start()
    before = processes(machine)

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        create(work, 0, commit=fail)
    assert there(machine) is None
    create(work, 0)
    assert processes(machine) == before


# Hangs and crashes


@pytest.mark.parametrize(
    "function", ["nvmlInitWithFlags", "nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstanceProfileInfoV"]
)
def test_a_hang_of_the_look_changes_nothing(machine: Path, work: workers.Workers, function: str) -> None:
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG, function=function)])
    commits: list[int] = []
    refused = refusal(lambda: create(work, 0, commit=lambda: commits.append(1), timeout_s=0.5))
    assert (refused.kind, refused.retryable, commits) == (Why.TIMEOUT, True, [])
    assert "no answer within 0.5 s (a hung call of NVML); the worker was killed, and nothing was changed" in str(
        refused
    )
    faults.apply(machine, [])
    assert (there(machine), processes(machine)) == (None, [])
    assert create(work, 0)


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("nvmlDeviceSetMigMode", None),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", None),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", True),
        ("nvmlGpuInstanceCreateComputeInstance", None),
        ("nvmlGpuInstanceCreateComputeInstance", True),
    ],
)
def test_a_hang_of_the_work_is_gone_on_from(
    machine: Path, work: workers.Workers, function: str, after: bool | None
) -> None:
    work.whole(GPU0, toggle=True, timeout_s=PATIENCE_S)  # its worker is there
    commits: list[int] = []

    def commit() -> None:
        commits.append(1)
        faults.apply(machine, [Fault(kind=Kind.NVML_HANG, function=function, after=after)])

    refused = refusal(lambda: create(work, 0, 2, commit=commit, timeout_s=3.0))
    assert (refused.kind, refused.retryable, commits) == (Why.TIMEOUT, True, [1])
    assert "how far it came is not known" in str(refused)
    faults.apply(machine, [])
    made = create(work, 0, 2, begun=True)
    assert (there(machine), [each.placement.start for each in made]) == ([0, 2], [0, 2])


@pytest.mark.parametrize("function", ["nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"])
@pytest.mark.parametrize("after", [None, True])
def test_a_hang_of_the_removal_is_gone_on_from(
    machine: Path, work: workers.Workers, function: str, after: bool | None
) -> None:
    create(work, 0, 2)
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG, function=function, after=after)])
    places = [mig.Partition(gpu=GPU0, profile_id=ONE, start=start) for start in (0, 2)]
    refused = refusal(lambda: work.destroy(GPU0, places, timeout_s=0.5))
    assert (refused.kind, refused.retryable) == (Why.TIMEOUT, True)
    faults.apply(machine, [])
    destroy(work, 0, 2)
    assert there(machine) == []


@pytest.mark.parametrize(
    ("function", "changed"),
    [("nvmlDeviceGetMigMode", False), ("nvmlDeviceSetMigMode", True), ("nvmlGpuInstanceCreateComputeInstance", True)],
)
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_costs_one_call(
    machine: Path, work: workers.Workers, function: str, changed: bool, number: signal.Signals
) -> None:
    work.start()
    faults.apply(machine, [Fault(kind=Kind.NVML_CRASH, function=function, signal=int(number))])
    commits: list[int] = []
    refused = refusal(lambda: create(work, 0, 1, commit=lambda: commits.append(1)))
    assert (refused.kind, refused.retryable, commits) == (Why.FAILED, True, [1] * changed)
    assert f"the worker was ended by {number.name}" in str(refused)
    assert ("how far it came is not known" if changed else "nothing was changed") in str(refused)
    faults.apply(machine, [])
    assert len(create(work, 0, 1, begun=True)) == 2
    assert there(machine) == [0, 1]


# An agent that is killed


class Agent:
    """A process that makes two instances and waits in its commit to be told to go on."""

    def __init__(self, machine: Path, *, orphan_s: float = PATIENCE_S) -> None:
        program = textwrap.dedent(f"""
            import pathlib, sys
            from discovery import mig, options, workers
            from discovery.address import parse
            machine = pathlib.Path({str(machine)!r})
            source = options.Source.rendered(machine)
            gpu = parse({str(GPU0)!r})
            work = workers.Workers(source=source, locks=machine.parent / "turns", orphan_s={orphan_s})
            work.start()
            def commit():
                print("commit", flush=True)
                sys.stdin.readline()
            print("begins", flush=True)
            wanted = [mig.Partition(gpu=gpu, profile_id={ONE}, start=start) for start in (0, 2)]
            work.create(gpu, wanted, begun=False, toggle=True, commit=commit, timeout_s=600)
        """)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        self.hear("begins")

    def hear(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().decode() == f"{word}\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_killed_while_the_worker_looks(machine: Path) -> None:
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG, function="nvmlDeviceGetMigMode")])
    agent = Agent(machine)
    (worker,) = processes(machine)
    wait_for((machine.parent / "turns" / f"{GPU0}.lock").exists)
    agent.kill()
    wait_for(lambda: worker not in processes(machine))
    assert there(machine) is None


def test_killed_in_its_commit(machine: Path, work: workers.Workers) -> None:
    agent = Agent(machine)
    agent.hear("commit")
    agent.kill()
    assert create(work, 0, 2, begun=True)
    assert there(machine) == [0, 2]


def test_killed_while_the_worker_works(machine: Path, work: workers.Workers) -> None:
    """The orphan has made one of two; whoever comes next waits for its end, and takes what it made for its own."""
    agent = Agent(machine)
    agent.hear("commit")
    hang = Fault(kind=Kind.NVML_HANG, function="nvmlDeviceCreateGpuInstanceWithPlacement", after=True)
    faults.apply(machine, [hang])
    agent.go()
    wait_for(lambda: there(machine) == [0])
    agent.kill()
    commits: list[list[int] | None] = []
    successor = Later(lambda: create(work, 0, 2, begun=True, commit=lambda: commits.append(there(machine))))
    wait_for(lambda: awaited(machine))
    faults.apply(machine, [])
    made = successor.result()
    assert [each.placement.start for each in made] == [0, 2]
    assert (there(machine), commits) == ([0, 2], [[0, 2]]), "the orphan ended what it had begun"
    wait_for(lambda: len(processes(machine)) == 1)


def test_an_orphan_that_hangs_ends_after_a_while(machine: Path, work: workers.Workers) -> None:
    agent = Agent(machine, orphan_s=0.5)
    agent.hear("commit")
    hang = Fault(kind=Kind.NVML_HANG, function="nvmlGpuInstanceCreateComputeInstance")
    faults.apply(machine, [hang])
    agent.go()
    wait_for(lambda: there(machine) == [0])
    agent.kill()
    refused = refusal(lambda: create(work, 0, 2, begun=True, timeout_s=5.0))
    assert refused.kind == Why.TIMEOUT
    faults.apply(machine, [])
    assert len(create(work, 0, 2, begun=True)) == 2


# Turns


def test_gpus_never_wait_for_each_other(machine: Path, work: workers.Workers) -> None:
    hang = Fault(kind=Kind.NVML_HANG, target=GPU0, function="nvmlDeviceCreateGpuInstanceWithPlacement", after=True)
    faults.apply(machine, [hang])
    slow = Later(lambda: create(work, 0))
    wait_for(lambda: there(machine) == [0])
    create(work, 0, 1, gpu=GPU1)
    destroy(work, 0, gpu=GPU1)
    assert there(machine, GPU1) == [1]
    assert slow.is_alive()
    faults.apply(machine, [])
    assert len(slow.result()) == 1


def test_a_gpu_is_changed_by_one_at_a_time(machine: Path, work: workers.Workers) -> None:
    turns = machine.parent / "turns"
    turns.mkdir()
    commits: list[int] = []
    with (turns / f"{GPU0}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        later = Later(lambda: create(work, 0, commit=lambda: commits.append(1)))
        wait_for(lambda: awaited(machine))
        assert commits == []
        create(work, 0, gpu=GPU1)
        refused = refusal(lambda: create(work, 1, timeout_s=0.5, commit=lambda: commits.append(1)))
        assert (refused.kind, refused.retryable, commits) == (Why.TIMEOUT, True, [])
        fcntl.flock(file, fcntl.LOCK_UN)
    assert len(later.result()) == 1
    assert commits == [1]


def test_calls_for_one_gpu_need_one_worker(machine: Path, work: workers.Workers) -> None:
    create(work, *range(5))
    with (machine.parent / "turns" / f"{GPU0}.lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        removals = [Later(functools.partial(destroy, work, start)) for start in range(5)]
        wait_for(lambda: awaited(machine))
        late = refusal(lambda: work.whole(GPU0, toggle=True, timeout_s=0.2))
        assert (late.kind, late.retryable) == (Why.TIMEOUT, True)
        fcntl.flock(file, fcntl.LOCK_UN)
    for removal in removals:
        removal.result()
    assert there(machine) == []
    assert len(processes(machine)) == 1


def test_whose_turn_it_is_stands_in_the_message(machine: Path, work: workers.Workers) -> None:
    create(work, 0)
    with (machine.parent / "turns" / f"{GPU0}.lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = refusal(lambda: work.whole(GPU0, toggle=True, timeout_s=5.0))
    assert "another process of this node does not end its turn at the GPU" in str(refused)


def test_a_turn_needs_a_place(machine: Path) -> None:
    (machine.parent / "turns").write_text("no folder")
    work = pool(machine)
    refused = refusal(lambda: create(work, 0))
    work.close()
    assert (refused.kind, refused.retryable) == (Why.FAILED, True)
    assert "no lock below" in str(refused)
    assert there(machine) is None


# The pool


def test_one_worker_stays_and_others_go(machine: Path) -> None:
    work = pool(machine, idle_s=0.2)
    try:
        here = threading.Barrier(3)

        def meet() -> None:
            here.wait(PATIENCE_S)

        calls = [Later(functools.partial(create, work, 0, gpu=gpu, commit=meet)) for gpu in (GPU0, GPU1)]
        meet()
        assert len(processes(machine)) == 2
        assert all(len(call.result()) == 1 for call in calls)
        wait_for(lambda: len(processes(machine)) == 1)
        (left,) = processes(machine)
        destroy(work, 0)
        assert processes(machine) == [left]
    finally:
        work.close()
    assert processes(machine) == []


def test_a_worker_that_is_killed_while_idle_costs_nothing(machine: Path, work: workers.Workers) -> None:
    create(work, 0)
    (worker,) = processes(machine)
    os.kill(worker, signal.SIGKILL)
    destroy(work, 0)
    assert there(machine) == []


def test_a_driver_replaced_under_a_worker_gets_a_new_worker(machine: Path, work: workers.Workers) -> None:
    create(work, 0)
    (first,) = processes(machine)
    mismatch = Fault(kind=Kind.NVML_ERROR, function="nvmlInitWithFlags", error=18)
    faults.apply(machine, [mismatch])
    refused = refusal(lambda: destroy(work, 0))
    assert (refused.kind, refused.retryable) == (Why.FAILED, True)
    assert "the NVIDIA driver does not fit its library" in str(refused)
    assert first not in processes(machine)
    faults.apply(machine, [])
    destroy(work, 0)


def test_closing_ends_what_is_under_way_and_refuses_more(machine: Path, work: workers.Workers) -> None:
    faults.apply(machine, [Fault(kind=Kind.NVML_HANG, function="nvmlDeviceSetMigMode")])
    committed = threading.Event()
    later = Later(lambda: create(work, 0, commit=committed.set))
    assert committed.wait(PATIENCE_S)
    work.close()
    refused = later.result()
    assert "the workers are closed" in str(refused)
    assert not refused.retryable
    assert "the workers are closed" in str(refusal(lambda: destroy(work, 0)))
    wait_for(lambda: processes(machine) == [])
    work.close()
    work.start()
    assert processes(machine) == []


def test_the_parent_imports_neither_nvml_nor_ctypes(machine: Path) -> None:
    program = textwrap.dedent(f"""
        import pathlib, sys
        from discovery import mig, options, workers
        from discovery.address import parse
        machine = pathlib.Path({str(machine)!r})
        source = options.Source.rendered(machine)
        work = workers.Workers(source=source, locks=machine.parent / "turns")
        gpu = parse({str(GPU0)!r})
        wanted = [mig.Partition(gpu=gpu, profile_id={ONE}, start=0)]
        assert work.create(gpu, wanted, begun=False, toggle=True, commit=lambda: None, timeout_s=50)
        work.close()
        print([name for name in ("pynvml", "psutil", "ctypes", "discovery.dividing") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
