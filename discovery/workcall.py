# SPDX-License-Identifier: Apache-2.0
"""One call of workers.Workers: what is said with the process that does it, and what that means for the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from discovery import codec, errors, frames, process, work
from discovery.address import PciAddress

_T = TypeVar("_T")

_DROP_S = 2.0
"""How long a worker may take to say that it let a request go."""


class BrokenError(Exception):
    """The conversation with a worker is over without an answer."""

    def __init__(self, err: Exception) -> None:
        super().__init__(str(err))
        self.late = isinstance(err.__cause__, TimeoutError)


class Call:
    """One conversation, up to its answer, with one worker or with a second one."""

    def __init__(
        self,
        gpu: PciAddress,
        request: dict[str, Any],
        timeout_s: float,
        clock: Callable[[], float],
        *,
        commit: Callable[[], None],
        answers: Any,
    ) -> None:
        """`answers`: the type of the answer."""
        self._about = f"{gpu}: {request['verb']}"
        self._request = {**request, "gpu": str(gpu)}
        self._timeout_s = timeout_s
        self._deadline = clock() + timeout_s
        self._clock = clock
        self._commit = commit
        self._answers = answers
        self._began = self._waits = False
        self._changes = request["verb"] not in ("create", "memory-use")
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
        """The answer of a worker. Raises BrokenError, and what `commit` does."""
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

    def may_be_repeated(self, worker: process.Process, err: BrokenError | None) -> bool:
        """Whether another worker may be asked, which is asked once: this one had worked before, and was killed while it had
        nothing to do, or has loaded the library of a driver that is no longer there.
        """
        idle = err is None or not (self._began or err.late)
        if self.repeated or not idle or not worker.used:
            return False
        self.repeated = True
        return True

    def result(self, answer: Any) -> Any:
        """What a worker answered. Raises WorkError."""
        try:
            if "answer" in answer:
                return codec.decode(self._answers, answer["answer"], place="answer")
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

    def lost(self, worker: process.Process, status: int | None, err: BrokenError) -> errors.WorkError:
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
            with contextlib.suppress(BrokenError):
                self._spoken(worker.tell, {"go": False})
                self.let_go = "dropped" in self._heard(worker)
            raise
        self._deadline += self._clock() - since
        self._changes = True
        self._spoken(worker.tell, {"go": True})

    def _heard(self, worker: process.Process) -> Any:
        answer = self._spoken(worker.hear, self.remaining_s)
        if not isinstance(answer, dict):
            raise BrokenError(frames.FrameError("a message that is none"))
        return answer

    def _spoken(self, speak: Callable[[Any], _T], argument: Any) -> _T:
        try:
            return speak(argument)
        except (frames.FrameError, OSError) as err:
            raise BrokenError(err) from err

    def _error(self, message: str, kind: work.Kind = work.Kind.FAILED) -> errors.WorkError:
        return errors.WorkError(f"{self._about}: {message}", kind=kind, retryable=True)
