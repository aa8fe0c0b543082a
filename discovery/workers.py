# SPDX-License-Identifier: Apache-2.0
"""Changing the hardware from a distance: work.Work done by processes (hands.py), so that a call of NVML that hangs or crashes
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from discovery import codec, errors, frames, mig, options, process, turns, work
from discovery.address import PciAddress

_T = TypeVar("_T")

_IDLE_S = 60.0
"""How long a worker that is not needed stays, beside the one that always does."""

_ORPHAN_S = 15.0
"""How long a worker goes on with a change after its agent was killed: a change of the MIG mode and seven instances take less."""

_DROP_S = 2.0
"""How long a worker may take to say that it let a request go."""


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
        return self._call(gpu, {"verb": "create", **request}, timeout_s, commit)

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:
        """See work.Work."""
        self._call(gpu, {"verb": "destroy", "partitions": [codec.encode(each) for each in partitions]}, timeout_s)

    def whole(self, gpu: PciAddress, *, toggle: bool, timeout_s: float) -> None:
        """See work.Work."""
        self._call(gpu, {"verb": "whole", "toggle": toggle}, timeout_s)

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
    ) -> tuple[mig.MigInstance, ...]:
        call = _Call(gpu, request, timeout_s, self._clock, commit)
        with self._turn(gpu, call):
            return self._converse(call)

    @contextlib.contextmanager
    def _turn(self, gpu: PciAddress, call: _Call) -> Iterator[None]:
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

    def _converse(self, call: _Call) -> tuple[mig.MigInstance, ...]:
        while True:
            worker = self._take(fresh=call.repeated)
            try:
                answer = call.by(worker)
            except _BrokenError as err:
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

        self._divider = hands.divider(source)
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


class _BrokenError(Exception):
    """The conversation with a worker is over without an answer."""

    def __init__(self, err: Exception) -> None:
        super().__init__(str(err))
        self.late = isinstance(err.__cause__, TimeoutError)


class _Call:
    """One conversation, up to its answer, with one worker or with a second one."""

    def __init__(
        self,
        gpu: PciAddress,
        request: dict[str, Any],
        timeout_s: float,
        clock: Callable[[], float],
        commit: Callable[[], None],
    ) -> None:
        self._about = f"{gpu}: {request['verb']}"
        self._request = {**request, "gpu": str(gpu)}
        self._timeout_s = timeout_s
        self._deadline = clock() + timeout_s
        self._clock = clock
        self._commit = commit
        self._began = self._waits = False
        self._changes = request["verb"] != "create"
        self.let_go = False
        """Whether the worker let the request go in order, after `commit` failed."""
        self.repeated = False
        """Whether it is with its second worker, which was started for it."""

    def remaining_s(self) -> float:
        """How long it may still take."""
        return self._deadline - self._clock()

    def late(self) -> errors.WorkError:
        """The error where its turn did not come in time."""
        return self._error(
            f"others for this GPU did not end in {self._timeout_s:g} s; nothing was changed", work.Kind.TIMEOUT
        )

    def by(self, worker: process.Process) -> Any:
        """The answer of a worker. Raises _BrokenError, and what `commit` does."""
        self._began = self._waits = False
        self._spoken(worker.tell, self._request)
        self._heard(worker)
        self._began = True
        while True:
            answer = self._heard(worker)
            if "waits" in answer:
                self._waits = True
            elif "found" in answer:
                self._waits = False
                self._go(worker)
            else:
                return answer

    def may_be_repeated(self, worker: process.Process, err: _BrokenError | None) -> bool:
        """Whether another worker may be asked, which is asked once: this one had worked before, and was killed while it had
        nothing to do, or has loaded the library of a driver that is no longer there.
        """
        idle = err is None or not (self._began or err.late)
        if self.repeated or not idle or not worker.used:
            return False
        self.repeated = True
        return True

    def result(self, answer: Any) -> tuple[mig.MigInstance, ...]:
        """What a worker answered. Raises WorkError."""
        try:
            if "answer" in answer:
                instances: tuple[mig.MigInstance, ...] = codec.decode(_INSTANCES, answer["answer"], place="instances")
                return instances
            if "outlived" in answer:
                raise self._error(f"the NVIDIA driver does not fit its library: {answer['outlived']}")
            raise errors.WorkError(
                str(answer["error"]),
                kind=work.Kind(answer["kind"]),
                retryable=bool(answer["retryable"]),
                clean=answer.get("clean") is True,
            )
        except (errors.DocumentError, KeyError, TypeError, ValueError) as err:
            raise self._error(f"the worker gave an answer that is none: {err}") from err

    def lost(self, worker: process.Process, status: int | None, err: _BrokenError) -> errors.WorkError:
        """The error for a worker that gave no answer."""
        left = "how far it came is not known" if self._changes else "nothing was changed"
        if err.late:
            why = (
                "another process of this node does not end its turn at the GPU"
                if self._waits
                else "a hung call of NVML"
            )
            return self._error(
                f"no answer within {self._timeout_s:g} s ({why}); the worker was killed, and {left}", work.Kind.TIMEOUT
            )
        died = f"the worker {process.ending(status)}" if status is not None else f"the worker is lost ({err})"
        said = worker.last_words()
        return self._error(f"{died}, and {left}" + (f"; its last output: {said}" if said else ""))

    def _go(self, worker: process.Process) -> None:
        since = self._clock()
        try:
            self._commit()
        except BaseException:
            self._deadline = self._clock() + _DROP_S
            with contextlib.suppress(_BrokenError):
                self._spoken(worker.tell, {"go": False})
                self.let_go = "dropped" in self._heard(worker)
            raise
        self._deadline += self._clock() - since
        self._changes = True
        self._spoken(worker.tell, {"go": True})

    def _heard(self, worker: process.Process) -> Any:
        answer = self._spoken(worker.hear, self.remaining_s)
        if not isinstance(answer, dict):
            raise _BrokenError(frames.FrameError("a message that is none"))
        return answer

    def _spoken(self, speak: Callable[[Any], _T], argument: Any) -> _T:
        try:
            return speak(argument)
        except (frames.FrameError, OSError) as err:
            raise _BrokenError(err) from err

    def _error(self, message: str, kind: work.Kind = work.Kind.FAILED) -> errors.WorkError:
        return errors.WorkError(f"{self._about}: {message}", kind=kind, retryable=True)


def _closed() -> errors.WorkError:
    return errors.WorkError("the workers are closed", kind=work.Kind.FAILED, retryable=False)


_INSTANCES: Any = tuple[mig.MigInstance, ...]
