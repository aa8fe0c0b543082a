# SPDX-License-Identifier: Apache-2.0
"""Looking at the hardware from a distance: a child process does it, so that a hang or a crash of NVML, or of a read of
configuration space, costs one look and never the process that serves.

Law: nothing here loads pynvml or psutil into the calling process, except `InProcessProber`, which is for tests and for
commands that end right after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from discovery import codec, errors, frames, model, options, process

Source = options.Source
ProbeOptions = options.ProbeOptions
_T = TypeVar("_T")


class Prober(Protocol):
    """Something that looks at the hardware. Every verb raises ProbeError when nothing came of it in time."""

    def probe(self, *, timeout_s: float) -> model.Snapshot:
        """A full look."""

    def rescan(self, *, timeout_s: float) -> model.Rescan:
        """A cheap look at identity and state."""

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:
        """How busy the GPUs are."""

    def close(self) -> None:
        """End it; idempotent, and from any thread. Calls under way and later ones raise ProbeError."""


class ProbeChild:
    """A Prober whose work is done by a child process, which is started at the first call and again after it died.

    Thread-safe: one call at a time reaches the child, others wait for their turn inside their own time.
    """

    def __init__(self, *, source: Source, options: ProbeOptions) -> None:
        few = dataclasses.replace(options, overlay=None)
        self._arguments = json.dumps({"source": codec.encode(source), "options": codec.encode(few)})
        self._overlay = None if options.overlay is None else json.dumps(codec.encode(options.overlay)).encode()
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._child: process.Process | None = None
        self._closed = False

    def start(self) -> None:
        """Start the child now, so that it loads what it needs while the caller does other things. Not needed, never fails."""
        with contextlib.suppress(errors.ProbeError, OSError):
            self._living()

    def probe(self, *, timeout_s: float) -> model.Snapshot:
        """A full look."""
        return self._call("probe", timeout_s, codec.from_json)

    def rescan(self, *, timeout_s: float) -> model.Rescan:
        """A cheap look at identity and state."""
        return self._call("rescan", timeout_s, lambda answer: codec.decode(model.Rescan, answer, place="rescan"))

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:
        """How busy the GPUs are."""
        return self._call("sample", timeout_s, lambda answer: codec.decode(_SAMPLES, answer, place="sample"))

    def close(self) -> None:
        """End the child, also in the middle of a call."""
        with self._state:
            self._closed = True
            child = self._child
        if not self._turn.acquire(blocking=False):
            if child is not None:
                child.kill()  # the call under way ends with it, and gives the turn back
            if not self._turn.acquire(timeout=2 * process.REAP_S):
                return
        try:
            with self._state:
                child, self._child = self._child, None
            if child is not None:
                child.stop()
        finally:
            self._turn.release()

    def _call(self, verb: str, timeout_s: float, decode: Callable[[Any], _T]) -> _T:
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=max(timeout_s, 0)):
            raise errors.ProbeError(f"{verb}: another look at the hardware did not end within {timeout_s:g} s")
        try:
            return self._ask(verb, timeout_s, deadline, decode)
        finally:
            self._turn.release()

    def _ask(
        self, verb: str, timeout_s: float, deadline: float, decode: Callable[[Any], _T], *, again: bool = True
    ) -> _T:
        child = self._living()
        try:
            answer = child.ask({"verb": verb}, lambda: deadline - time.monotonic())
            if "error" in answer:
                raise errors.ProbeError(f"{verb}: {answer['error']}", retryable=bool(answer["retryable"]))
            return decode(answer["answer"])
        except (frames.FrameError, OSError, KeyError, TypeError, errors.DocumentError) as err:
            late = isinstance(err.__cause__, TimeoutError)
            status = None if late else child.wait(process.STOP_S)
            child.kill()
            child.bury()
            with self._state:
                self._child = None
            if again and not late and child.left_before_it_began:
                return self._ask(verb, timeout_s, deadline, decode, again=False)
            raise self._lost(child, verb, timeout_s, status, err) from err

    def _living(self) -> process.Process:
        with self._state:
            if self._closed:
                raise errors.ProbeError("the prober is closed", retryable=False)
            if self._child is not None and not self._child.alive():
                self._child.stop()
                self._child = None
            if self._child is None:
                self._child = self._started()
            return self._child

    def _started(self) -> process.Process:
        try:
            return process.Process("discovery.worker", [self._arguments], name="Probe process", content=self._overlay)
        except OSError as err:
            raise errors.ProbeError(f"the process that looks at the hardware cannot be started: {err}") from err

    def _lost(
        self, child: process.Process, verb: str, timeout_s: float, status: int | None, err: Exception
    ) -> errors.ProbeError:
        """The error for a child that gave no usable answer."""
        if self._closed:
            return errors.ProbeError(f"{verb}: the prober was closed", retryable=False)
        if isinstance(err.__cause__, TimeoutError):
            return errors.ProbeError(
                f"{verb}: no answer within {timeout_s:g} s; the process that looks at the hardware was killed (a hung call of "
                "NVML or a hung PCI function), the next look starts a new one"
            )
        died = f"the process that looks at the hardware {process.ending(status)}" if status is not None else str(err)
        said = child.last_words()
        return errors.ProbeError(f"{verb}: {died}" + (f"; its last output: {said}" if said else ""))


class InProcessProber:
    """A Prober that looks by itself, without deadlines: for tests, and for commands that end right after."""

    def __init__(self, *, source: Source, options: ProbeOptions, clock: Callable[[], float] = time.time) -> None:
        from discovery import probe, sysfs  # noqa: PLC0415 - see the law of this module

        library = None
        if source.mock is not None:
            from discovery.mock import library as mock_library  # noqa: PLC0415 - as above

            library = mock_library.load_library(source.mock)
        self._machine = probe.Machine(
            files=sysfs.Sysfs(sys=source.sys, proc=source.proc),
            dev=source.dev,
            library=library,
            origin=source.origin,
            options=options,
            clock=clock,
            driver_root=source.driver_root,
        )
        self._turn = threading.Lock()
        self._closed = False

    def probe(self, *, timeout_s: float) -> model.Snapshot:  # noqa: ARG002 - part of the Protocol
        """A full look."""
        with self._turn:
            self._check()
            return self._machine.probe()

    def rescan(self, *, timeout_s: float) -> model.Rescan:  # noqa: ARG002 - part of the Protocol
        """A cheap look at identity and state."""
        with self._turn:
            self._check()
            return self._machine.rescan()

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:  # noqa: ARG002 - part of the Protocol
        """How busy the GPUs are."""
        with self._turn:
            self._check()
            return self._machine.sample()

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise errors.ProbeError("the prober is closed", retryable=False)


_SAMPLES: Any = tuple[model.GpuSample, ...]
