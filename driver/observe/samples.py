# SPDX-License-Identifier: Apache-2.0
"""How busy the GPUs are, read when somebody scrapes and at most every 15 s.

Nobody scrapes: nothing is read. A hung driver costs a scrape a bounded wait and its series, nothing else: the reading goes
on behind, one at a time, and what is too old to speak for now is not shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from discovery import model
from discovery.errors import ProbeError
from driver.condition import Condition

logger = logging.getLogger(__name__)

INTERVAL_S = 15.0
"""No two readings begin closer together than this."""

VALID_S = 45.0
"""A reading older than this is not shown; a scrape may come a little before the next reading is due."""

PATIENCE_S = 2.0
"""How long a scrape waits for a reading under way. Prometheus gives up after 10 s."""

READ_TIMEOUT_S = 10.0


class Sampled(Protocol):
    """What reads the GPUs."""

    def sample(self, *, timeout_s: float) -> tuple[model.GpuSample, ...]:
        """One reading of every GPU that answers. Raises ProbeError."""


class Sampler:
    """Keeps the newest reading. `failed` is told of every reading that gave nothing."""

    def __init__(
        self,
        source: Sampled,
        *,
        failed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._source = source
        self._failed = failed
        self._clock = clock
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._reading = False
        self._began: float | None = None
        self._read_at: float | None = None
        self._samples: tuple[model.GpuSample, ...] = ()
        self._trouble = Condition(logger, recovered="GPU utilization can be read again")

    def samples(self) -> tuple[model.GpuSample, ...]:
        """The newest readings; none where there is none that speaks for now."""
        with self._changed:
            now = self._clock()
            if not self._reading and (self._began is None or now - self._began >= INTERVAL_S):
                self._reading, self._began = True, now
                threading.Thread(target=self._read, name="gpu-sample", daemon=True).start()
            self._changed.wait_for(lambda: not self._reading, self._patience_s)
            if self._read_at is None or self._clock() - self._read_at > VALID_S:
                return ()
            return self._samples

    def _read(self) -> None:
        try:
            samples = self._source.sample(timeout_s=READ_TIMEOUT_S)
        except ProbeError as err:
            self._trouble.failed(f"GPU utilization cannot be read: {err}")
            self._failed()
            samples = None
        except Exception:
            # The door of this thread: the next scrape must find that no reading is under way.
            logger.exception("GPU utilization cannot be read")
            self._failed()
            samples = None
        else:
            self._trouble.passed()
        with self._changed:
            self._reading = False
            if samples is not None:
                self._samples, self._read_at = samples, self._clock()
            self._changed.notify_all()
