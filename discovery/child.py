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
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from discovery import codec, errors, frames, model, options

logger = logging.getLogger(__name__)

Source = options.Source
ProbeOptions = options.ProbeOptions
_T = TypeVar("_T")

_STOP_S = 0.5
"""How long a child may take to end once its input is closed; then it is killed."""

_REAP_S = 1.0
"""How long to wait for a killed child: one that hangs inside the kernel dies when the kernel lets it."""

_LOGGED_LINES = 100
"""Lines of a child's error output that go to the log; the rest is dropped, but read, so that the child never blocks."""

_LINE_LENGTH = 500


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
        self._child: _Child | None = None
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
            if not self._turn.acquire(timeout=2 * _REAP_S):
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
            answer = child.ask(verb, lambda: deadline - time.monotonic())
            if "error" in answer:
                raise errors.ProbeError(f"{verb}: {answer['error']}", retryable=bool(answer["retryable"]))
            return decode(answer["answer"])
        except (frames.FrameError, OSError, KeyError, TypeError, errors.DocumentError) as err:
            late = isinstance(err.__cause__, TimeoutError)
            status = None if late else child.wait(_STOP_S)
            child.kill()
            child.bury()
            with self._state:
                self._child = None
            if again and not late and child.left_before_it_began:
                return self._ask(verb, timeout_s, deadline, decode, again=False)
            raise self._lost(child, verb, timeout_s, status, err) from err

    def _living(self) -> _Child:
        with self._state:
            if self._closed:
                raise errors.ProbeError("the prober is closed", retryable=False)
            if self._child is not None and not self._child.alive():
                self._child.stop()
                self._child = None
            if self._child is None:
                self._child = _Child(self._arguments, self._overlay)
            return self._child

    def _lost(
        self, child: _Child, verb: str, timeout_s: float, status: int | None, err: Exception
    ) -> errors.ProbeError:
        """The error for a child that gave no usable answer."""
        if self._closed:
            return errors.ProbeError(f"{verb}: the prober was closed", retryable=False)
        if isinstance(err.__cause__, TimeoutError):
            return errors.ProbeError(
                f"{verb}: no answer within {timeout_s:g} s; the process that looks at the hardware was killed (a hung call of "
                "NVML or a hung PCI function), the next look starts a new one"
            )
        died = f"the process that looks at the hardware {_ending(status)}" if status is not None else str(err)
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


class _Child:
    """One child process and its pipes. All but `kill` belong to the thread whose turn it is: a descriptor that is closed under
    another thread may already be somebody else's.
    """

    def __init__(self, arguments: str, overlay: bytes | None) -> None:
        """`overlay` may be longer than the kernel lets an argument be (MAX_ARG_STRLEN), so it is passed as an open file."""
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "discovery.worker", arguments]
        root = str(Path(__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}
        try:
            with _in_memory(overlay) as passed:
                self._process = subprocess.Popen(
                    [*command, *map(str, passed)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    pass_fds=passed,
                    start_new_session=True,  # a Ctrl-C is for us: we close the child in order
                )
        except OSError as err:
            raise errors.ProbeError(f"the process that looks at the hardware cannot be started: {err}") from err
        self._answers = 0
        self._began = False
        self._words: deque[str] = deque(maxlen=5)
        self._listener = threading.Thread(target=self._listen, args=(_pipe(self._process.stderr),), daemon=True)
        self._listener.start()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, verb: str, remaining_s: Callable[[], float]) -> Any:
        """Send a request and wait for its answer. Raises FrameError or OSError."""
        self._began = False
        frames.write(_pipe(self._process.stdin).fileno(), {"verb": verb})
        answers = _pipe(self._process.stdout).fileno()
        frames.read(answers, remaining_s=remaining_s)
        self._began = True
        answer = frames.read(answers, remaining_s=remaining_s)
        self._answers += 1
        return answer

    @property
    def left_before_it_began(self) -> bool:
        """Whether the last request found a process that had worked before and was already on its way out: it was killed
        while idle, or left because only a new one can go on. Another may then be asked, since nothing was begun.
        """
        return self._answers > 0 and not self._began and not self.alive()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status; None when it still runs after that time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Let it end by itself, then make it."""
        _pipe(self._process.stdin).close()
        if self.wait(_STOP_S) is None:
            self.kill()
        self.bury()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def bury(self) -> None:
        """Wait for the end of a process that was told to end, and close its pipes."""
        if self.wait(_REAP_S) is None:
            logger.error("Process %d hangs inside the kernel and cannot be killed yet", self._process.pid)
            threading.Thread(target=self._process.wait, name="reaper", daemon=True).start()
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def last_words(self) -> str:
        """The end of what it printed."""
        self._listener.join(_REAP_S)
        return " | ".join(self._words)

    def _listen(self, errors_of_child: IO[bytes]) -> None:
        """Pass the child's error output on to the log."""
        with errors_of_child:
            for count, line in enumerate(iter(lambda: errors_of_child.readline(_LINE_LENGTH), b"")):
                text = line.decode(errors="replace").strip()
                self._words.append(text)
                if count < _LOGGED_LINES:
                    logger.warning("Probe process %d: %s", self._process.pid, text)
                elif count == _LOGGED_LINES:
                    logger.warning("Probe process %d says more than is logged", self._process.pid)


@contextlib.contextmanager
def _in_memory(content: bytes | None) -> Iterator[tuple[int, ...]]:
    """The descriptor of a file of this content that is in no folder; none without content."""
    if content is None:
        yield ()
        return
    with os.fdopen(os.memfd_create("nearfield-overlay"), "wb") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield (file.fileno(),)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


_SAMPLES: Any = tuple[model.GpuSample, ...]
