# SPDX-License-Identifier: Apache-2.0
"""Hears of hardware that changes, and asks for a look. One thread, which sleeps while nothing is said.

Without the kernel's messages nothing is lost but time: the rescan of every interval finds the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from discovery import uevents
from discovery.errors import SourceError

logger = logging.getLogger(__name__)

ENDING_S = 1.0
"""How long `stop` waits for the thread, which ends at once unless the machine is very busy."""


class HintObserver(Protocol):
    """Who counts messages."""

    def uevent(self, result: str) -> None:
        """A message came; `result` is what became of it."""


class Changes:
    """`start` once, when there is something to hear; `stop` at any time, idempotent."""

    def __init__(
        self, listen: Callable[[], uevents.Listener], *, stir: Callable[[], None], observer: HintObserver
    ) -> None:
        """`listen` opens the socket and may raise SourceError; `stir` asks for a look."""
        self._listen = listen
        self._stir = stir
        self._observer = observer
        self._lock = threading.Lock()
        self._stopped = False
        self._listener: uevents.Listener | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen. After this no change is missed, so the first look comes after it."""
        with self._lock:
            if self._stopped:
                return
            try:
                listener = self._listen()
            except SourceError as error:
                logger.info("%s; changes of the hardware are found by the look of every interval", error)
                return
            self._listener = listener
            self._thread = threading.Thread(target=self._run, args=(listener,), name="uevents", daemon=True)
            self._thread.start()
        logger.info("Listening to uevents: changes of the hardware are published when they have ended")

    def stop(self) -> None:
        """End the thread, and give the socket back."""
        with self._lock:
            self._stopped = True
            if self._listener is not None:
                self._listener.stop()
        if self._thread is not None:
            self._thread.join(ENDING_S)

    def _run(self, listener: uevents.Listener) -> None:
        try:
            while (heard := listener.hear()) is not None:
                self._observer.uevent(heard)
                if heard.hint:
                    self._stir()
        except SourceError as error:
            logger.warning("%s; from now on changes of the hardware are found by the look of every interval", error)
            self._stir()
        finally:
            with self._lock:
                self._listener = None
                listener.close()
