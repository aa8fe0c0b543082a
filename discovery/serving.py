# SPDX-License-Identifier: Apache-2.0
"""The side of a child process in the conversation with its parent (process.py): requests come on standard input, answers go
to what was standard output, and anything that prints lands on standard error.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any, NoReturn

from discovery import frames


class Requests:
    """What the parent says, None once it is gone. The process is then ended `grace_s` later, even in the middle of a call that
    hangs; that may be set to what the work under way is worth.
    """

    def __init__(self, *, grace_s: float) -> None:
        """Takes the pipes from everybody who prints or reads. Once in a process."""
        self._in, self._out = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Otherwise a line would be seen late, or never where a call hangs.
            sys.stdout.reconfigure(line_buffering=True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self.grace_s = grace_s
        self._leaving = threading.Lock()
        threading.Thread(target=self._receive, name="requests", daemon=True).start()

    def next(self) -> Any:
        """Wait for the next request."""
        return self._inbox.get()

    def answer(self, message: Any) -> None:
        """Send an answer. Raises BrokenPipeError when the parent is gone."""
        frames.write(self._out, message)

    def leave(self) -> NoReturn:
        """End the process, unless its time is over just now: one thread does so, and none takes the interpreter apart under threads
        that are in foreign code.
        """
        # Before, as a reader that hangs must not keep the other thread from ending it.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
        self._leaving.acquire()
        os._exit(0)

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(frames.read(self._in))
        except frames.FrameError:
            self._inbox.put(None)
        time.sleep(self.grace_s)
        self._leaving.acquire()
        os._exit(0)
