# SPDX-License-Identifier: Apache-2.0
"""Changing the hardware from a distance: work.Work and limits.Limiting done by processes (hands.py), so that a call of NVML that hangs or crashes
costs that call and nobody else's.

Law: nothing here loads pynvml into the calling process, except `InProcessWork`, which is for tests and for commands that end
right after.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from discovery import codec, errors, limits, mig, options, process, turns, work, workcall
from discovery.address import PciAddress

_T = TypeVar("_T")

_INSTANCES: Any = tuple[mig.MigInstance, ...]
_USES: Any = Mapping[str, limits.MemoryUse]

_IDLE_S = 60.0
"""How long a worker that is not needed stays, beside the one that always does."""

_ORPHAN_S = 15.0
"""How long a worker goes on with a change after its agent was killed: a change of the MIG mode and seven instances take less."""


class Workers:
    """Work by a pool of processes, as many as there are GPUs worked at: calls for one GPU take turns, and wait for no other. One
    that is idle is used again, one is kept for the next call, and others end after a while.
    """

    def __init__(
        self,
        *,
        source: options.Source,
        locks: Path,
        idle_s: float = _IDLE_S,
        orphan_s: float = _ORPHAN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`locks`: the folder of the lock files, the same for all agents of the node; it is made when it is first needed."""
        self._arguments = json.dumps({"source": codec.encode(source), "locks": str(locks), "orphan_s": orphan_s})
        self._idle_s = idle_s
        self._clock = clock
        self._state = threading.Lock()
        self._idle: list[tuple[process.Process, float]] = []
        self._busy: set[process.Process] = set()
        self._turns: defaultdict[PciAddress, threading.Lock] = defaultdict(threading.Lock)
        self._timer: threading.Timer | None = None
        self._closed = False

    def start(self) -> None:
        """Start a worker now, so that the first call finds one. Not needed, never fails."""
        with contextlib.suppress(errors.WorkError):
            self._give(self._take(fresh=True))

    def create(
        self,
        gpu: PciAddress,
        wanted: Sequence[mig.Partition],
        *,
        begun: bool,
        toggle: bool,
        commit: Callable[[], None],
        timeout_s: float,
    ) -> tuple[mig.MigInstance, ...]:
        """See work.Work."""
        check(gpu, wanted)
        request = {"begun": begun, "toggle": toggle, "partitions": [codec.encode(each) for each in wanted]}
        made: tuple[mig.MigInstance, ...] = self._call(gpu, {"verb": "create", **request}, timeout_s, commit)
        return made

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:
        """See work.Work."""
        self._call(gpu, {"verb": "destroy", "partitions": [codec.encode(each) for each in partitions]}, timeout_s)

    def whole(self, gpu: PciAddress, *, toggle: bool, timeout_s: float) -> None:
        """See work.Work."""
        self._call(gpu, {"verb": "whole", "toggle": toggle}, timeout_s)

    def limit_memory(self, gpu: PciAddress, wanted: Mapping[str, limits.MemoryLimit], *, timeout_s: float) -> None:
        """See limits.Limiting."""
        limits.check(wanted.values())
        self._call(gpu, {"verb": "limit-memory", "limits": codec.encode(wanted)}, timeout_s)

    def memory_use(
        self, gpu: PciAddress, cgroups: Sequence[str], *, timeout_s: float
    ) -> Mapping[str, limits.MemoryUse]:
        """See limits.Limiting."""
        request = {"verb": "memory-use", "cgroups": list(cgroups)}
        told: Mapping[str, limits.MemoryUse] = self._call(gpu, request, timeout_s, answers=_USES)
        return told

    def set_compute_mode(self, gpu: PciAddress, mode: limits.ComputeMode, *, timeout_s: float) -> limits.ComputeMode:
        """See limits.Limiting."""
        request = {"verb": "compute-mode", "mode": mode.value}
        before: limits.ComputeMode = self._call(gpu, request, timeout_s, answers=limits.ComputeMode)
        return before

    def close(self) -> None:
        """End the workers; idempotent, and from any thread. Those at work are killed, and their turns end with them."""
        with self._state:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
            if self._timer is not None:
                self._timer.cancel()
        for worker, _ in idle:
            worker.stop()

    def _call(
        self,
        gpu: PciAddress,
        request: dict[str, Any],
        timeout_s: float,
        commit: Callable[[], None] = lambda: None,
        answers: Any = _INSTANCES,
    ) -> Any:
        call = workcall.Call(gpu, request, timeout_s, self._clock, commit=commit, answers=answers)
        with self._turn(gpu, call):
            return self._converse(call)

    @contextlib.contextmanager
    def _turn(self, gpu: PciAddress, call: workcall.Call) -> Iterator[None]:
        """The turn at a GPU among the calls of this process: a node that ends all its pods at once needs no worker for each."""
        with self._state:
            mine = self._turns[gpu]
        if not mine.acquire(timeout=max(0.0, call.remaining_s())):
            raise call.late()
        try:
            if self._closed:
                raise _closed()
            yield
        finally:
            mine.release()

    def _converse(self, call: workcall.Call) -> Any:
        while True:
            worker = self._take(fresh=call.repeated)
            try:
                answer = call.by(worker)
            except workcall.BrokenError as err:
                status = None if err.late else worker.wait(process.STOP_S)
                self._lose(worker)
                if call.may_be_repeated(worker, err):
                    continue
                if self._closed:
                    raise _closed() from err
                raise call.lost(worker, status, err) from err
            except BaseException:  # of `commit`
                if call.let_go:
                    worker.used = True
                    self._give(worker)
                else:
                    self._lose(worker)
                raise
            if "outlived" in answer:
                self._lose(worker)
                if call.may_be_repeated(worker, None):
                    continue
            else:
                worker.used = True
                self._give(worker)
            return call.result(answer)

    def _take(self, *, fresh: bool) -> process.Process:
        worker = None
        with self._state:
            while self._idle and not fresh and worker is None:
                worker, _ = self._idle.pop()
                if not worker.alive():
                    worker.stop()
                    worker = None
        worker = worker or self._started()
        with self._state:
            if not self._closed:
                self._busy.add(worker)
                return worker
        worker.stop()
        raise _closed()

    def _started(self) -> process.Process:
        try:
            return process.Process("discovery.hands", [self._arguments], name="Worker process")
        except OSError as err:
            raise errors.WorkError(
                f"no process to change the hardware can be started: {err}", kind=work.Kind.FAILED, retryable=True
            ) from err

    def _give(self, worker: process.Process) -> None:
        with self._state:
            self._busy.discard(worker)
            if not self._closed:
                self._idle.append((worker, self._clock()))
                self._time()
                return
        worker.stop()

    def _lose(self, worker: process.Process) -> None:
        worker.kill()
        worker.bury()
        with self._state:
            self._busy.discard(worker)

    def _time(self) -> None:
        """Wake up when the next worker is idle for too long; the newest stays."""
        if self._timer is None and len(self._idle) > 1:
            self._timer = threading.Timer(self._idle_s, self._thin)
            self._timer.daemon = True
            self._timer.start()

    def _thin(self) -> None:
        with self._state:
            self._timer = None
            old = [each for each in self._idle[:-1] if self._clock() - each[1] >= self._idle_s]
            self._idle = [each for each in self._idle if each not in old]
            if not self._closed:
                self._time()
        for worker, _ in old:
            worker.stop()


class InProcessWork:
    """Work in this process, one call after the other and without deadlines: for tests, and for commands that end right after."""

    def __init__(self, *, source: options.Source, locks: Path | None = None) -> None:
        """`locks`: as for Workers; None where nobody else works."""
        from discovery import hands  # noqa: PLC0415 - see the law of this module

        self._divider, self._limiter = hands.tools(source)
        self._locks = locks
        self._state = threading.Lock()
        self._closed = False

    def create(
        self,
        gpu: PciAddress,
        wanted: Sequence[mig.Partition],
        *,
        begun: bool,
        toggle: bool,
        commit: Callable[[], None],
        timeout_s: float,  # noqa: ARG002 - part of the Protocol
    ) -> tuple[mig.MigInstance, ...]:
        """See work.Work."""
        check(gpu, wanted)
        return self._do(gpu, lambda: self._divider.create(gpu, wanted, begun=begun, toggle=toggle, commit=commit))

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:  # noqa: ARG002 - as above
        """See work.Work."""
        self._do(gpu, lambda: self._divider.destroy(gpu, partitions))

    def whole(self, gpu: PciAddress, *, toggle: bool, timeout_s: float) -> None:  # noqa: ARG002 - as above
        """See work.Work."""
        self._do(gpu, lambda: self._divider.whole(gpu, toggle=toggle))

    def limit_memory(
        self,
        gpu: PciAddress,
        wanted: Mapping[str, limits.MemoryLimit],
        *,
        timeout_s: float,  # noqa: ARG002 - as above
    ) -> None:
        """See limits.Limiting."""
        limits.check(wanted.values())
        self._do(gpu, lambda: self._limiter.limit_memory(gpu, wanted))

    def memory_use(
        self,
        gpu: PciAddress,
        cgroups: Sequence[str],
        *,
        timeout_s: float,  # noqa: ARG002 - as above
    ) -> Mapping[str, limits.MemoryUse]:
        """See limits.Limiting."""
        return self._do(gpu, lambda: self._limiter.memory_use(gpu, cgroups))

    def set_compute_mode(
        self,
        gpu: PciAddress,
        mode: limits.ComputeMode,
        *,
        timeout_s: float,  # noqa: ARG002 - as above
    ) -> limits.ComputeMode:
        """See limits.Limiting."""
        return self._do(gpu, lambda: self._limiter.set_compute_mode(gpu, mode))

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _do(self, gpu: PciAddress, do: Callable[[], _T]) -> _T:
        with self._state, contextlib.ExitStack() as stack:
            if self._closed:
                raise _closed()
            if self._locks is not None:
                stack.enter_context(turns.turn(self._locks, gpu, lambda: None))
            return do()


def check(gpu: PciAddress, wanted: Sequence[mig.Partition]) -> None:
    """ValueError for partitions that no create can be about."""
    if not wanted or len(set(wanted)) < len(wanted) or any(each.gpu != gpu for each in wanted):
        raise ValueError(f"no different partitions of {gpu}: {wanted}")


def _closed() -> errors.WorkError:
    return errors.WorkError("the workers are closed", kind=work.Kind.FAILED, retryable=False)
