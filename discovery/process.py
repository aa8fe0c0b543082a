# SPDX-License-Identifier: Apache-2.0
"""A child process that answers: `python -m MODULE ARGUMENTS`, spoken to in frames over its pipes (serving.py is its side of
them). What it prints goes to the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from discovery import frames

logger = logging.getLogger(__name__)

STOP_S = 0.5
"""How long a child may take to end once its input is closed; then it is killed."""

REAP_S = 1.0
"""How long to wait for a killed child: one that hangs inside the kernel dies when the kernel lets it."""

_LOGGED_LINES = 100
"""Lines of a child's error output that go to the log; the rest is dropped, but read, so that the child never blocks."""

_LINE_LENGTH = 500


class Process:
    """One child process and its pipes. All but `kill` belong to the thread whose turn it is: a descriptor that is closed under
    another thread may already be somebody else's.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, name: str, content: bytes | None = None) -> None:
        """`name`: what it is called in the log. `content`: what may be longer than the kernel lets an argument be
        (MAX_ARG_STRLEN); it is passed as an open file, whose descriptor is the last argument. Raises OSError.
        """
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments]
        root = str(Path(__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}
        with _in_memory(content) as passed:
            self._process = subprocess.Popen(
                [*command, *map(str, passed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=passed,
                start_new_session=True,  # a Ctrl-C is for us: we close the child in order
            )
        self._name = name
        self.used = False
        """Whether it has answered a request."""
        self._began = False
        self._words: deque[str] = deque(maxlen=5)
        self._listener = threading.Thread(target=self._listen, args=(_pipe(self._process.stderr),), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, message: Any, remaining_s: Callable[[], float]) -> Any:
        """Send a request and wait for the first answer. Raises FrameError or OSError."""
        self._began = False
        self.tell(message)
        self.hear(remaining_s)
        self._began = True
        answer = self.hear(remaining_s)
        self.used = True
        return answer

    def tell(self, message: Any) -> None:
        """Send a message. Raises OSError."""
        frames.write(_pipe(self._process.stdin).fileno(), message)

    def hear(self, remaining_s: Callable[[], float]) -> Any:
        """Wait for a message. Raises FrameError or OSError."""
        return frames.read(_pipe(self._process.stdout).fileno(), remaining_s=remaining_s)

    @property
    def left_before_it_began(self) -> bool:
        """Whether the last request found a process that had worked before and was already on its way out: it was killed
        while idle, or left because only a new one can go on. Another may then be asked, since nothing was begun.
        """
        return self.used and not self._began and not self.alive()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status; None when it still runs after that time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Let it end by itself, then make it."""
        _pipe(self._process.stdin).close()
        if self.wait(STOP_S) is None:
            self.kill()
        self.bury()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def bury(self) -> None:
        """Wait for the end of a process that was told to end, and close its pipes."""
        if self.wait(REAP_S) is None:
            logger.error("%s %d hangs inside the kernel and cannot be killed yet", self._name, self._process.pid)
            threading.Thread(target=self._process.wait, name="reaper", daemon=True).start()
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def last_words(self) -> str:
        """The end of what it printed."""
        self._listener.join(REAP_S)
        return " | ".join(self._words)

    def _listen(self, errors_of_child: IO[bytes]) -> None:
        """Pass the child's error output on to the log."""
        with errors_of_child:
            for count, line in enumerate(iter(lambda: errors_of_child.readline(_LINE_LENGTH), b"")):
                text = line.decode(errors="replace").strip()
                self._words.append(text)
                if count < _LOGGED_LINES:
                    logger.warning("%s %d: %s", self._name, self._process.pid, text)
                elif count == _LOGGED_LINES:
                    logger.warning("%s %d says more than is logged", self._name, self._process.pid)


def ending(status: int) -> str:
    """How a process ended, for a sentence about it."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


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
