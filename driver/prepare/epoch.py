# SPDX-License-Identifier: Apache-2.0
"""Which of two instances of the agent leads, while one replaces the other.

Every instance takes the next epoch from the record and holds its byte of a lock file while it lives. The highest epoch that
is held leads: it publishes, reconciles and collects. So the newer one leads from the moment it has its epoch, and the older
one again should the newer one die.
"""

from __future__ import annotations

import logging
from pathlib import Path

from driver.errors import RecordError
from driver.prepare import locks, store

logger = logging.getLogger(__name__)


class Epoch:
    """This instance's place in the order."""

    def __init__(self, state: Path) -> None:
        self._locks = locks.NumberLocks(locks.directory(state) / "epochs.lock")
        self._number: int | None = None

    @property
    def number(self) -> int | None:
        """The epoch, None before it was taken."""
        return self._number

    def take(self, record: store.Store) -> bool:
        """Take an epoch if there is none yet; whether there is one now. An instance that cannot use the record has none."""
        while self._number is None:
            try:
                number = record.next_epoch(self._locks.highest())
            except RecordError as error:
                logger.warning("This instance cannot lead: %s", error)
                return False
            if self._locks.hold(number):
                self._number = number
                logger.info("This instance has epoch %d", number)
        return True

    def leads(self) -> bool:
        """Whether no newer instance lives. One system call: asked before each write."""
        return self._number is not None and not self._locks.held_above(self._number)

    def close(self) -> None:
        """Let go of the epoch: an older instance leads again, if there is one."""
        self._number = None
        self._locks.close()
