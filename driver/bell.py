# SPDX-License-Identifier: Apache-2.0
"""What the main thread of a process that serves waits for: a bell that signal handlers and other threads ring.

threading.Event is not for that: `set` in a handler takes a lock that the interrupted `wait` may hold, and a signal that arrives
just before the main thread sleeps on a lock wakes nobody (Python's signal module, set_wakeup_fd).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time


class Bell:
    """Rings once, for good. `wait` belongs to the main thread, `ring` to everybody."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rung = False

    def wake_by_signals(self) -> None:
        """Have every signal that has a handler wake the main thread, so that the handler runs. For the main thread."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def ring(self) -> None:
        """Never waits, takes no lock, never raises."""
        self._rung = True
        with contextlib.suppress(OSError):  # it is full: whoever waits is awake
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the bell, or for so long; whether it has rung."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._rung:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            select.select([self._reader], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        return True
