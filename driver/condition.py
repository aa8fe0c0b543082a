# SPDX-License-Identifier: Apache-2.0
"""A condition that may last: said when it begins, when it changes and when it ends, and counted in between."""

from __future__ import annotations

import logging
import threading


class Condition:
    """One thing that can go wrong again and again, such as a server that is away. Safe to use from every thread."""

    def __init__(self, logger: logging.Logger, *, recovered: str) -> None:
        self._logger = logger
        self._recovered = recovered
        self._lock = threading.Lock()
        self._text: str | None = None
        self._count = 0

    def failed(self, text: str) -> None:
        """It is so, described by `text`: a warning, unless the last one said the same."""
        with self._lock:
            self._count += 1
            if text == self._text:
                return
            self._text = text
        self._logger.warning("%s", text)

    def passed(self) -> None:
        """It is over: said once, with how often it was met."""
        with self._lock:
            if self._text is None:
                return
            count, self._text, self._count = self._count, None, 0
        self._logger.info("%s (after %d failures)", self._recovered, count)

    @property
    def text(self) -> str | None:
        """What is wrong now, None when nothing is."""
        with self._lock:
            return self._text
