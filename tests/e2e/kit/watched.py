# SPDX-License-Identifier: Apache-2.0
"""Something that must hold all the time, looked at all the time while pods come and go."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from tests.e2e.kit import load
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

_PAUSE_S = 0.05
_FILES_MORE = 10


class Watched(ABC):
    """Looks again and again for the block. `wrong`: what was not as it must be; `most`: of what there was at once."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched", daemon=True)
        self.wrong: list[str] = []
        self.most = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._look()

    @abstractmethod
    def _look(self) -> None:
        """Once."""


def many_pods(site: Site, space: Space, watching: Watched, asks: Sequence[Json], *, pods: int) -> None:
    """So many pods come and go, one request each. Fails where one does not end well, a Prepare fails, the agent starts anew, or has
    more files open after them than after the first ones.
    """
    restarts = site.agent.restarts()
    with watching as watched, load.running(space, workers=6, seconds=0.1, asks=asks) as running:
        running.more(6)
        before = site.agent.metrics()
        running.more(pods - 6, timeout_s=1200)
        told = running.finish()
    assert (watched.wrong, told.wrong, told.retried) == ([], [], [])
    after = site.agent.metrics()
    assert site.agent.restarts() == restarts
    for name in ("nearfield_prepare_total", "nearfield_unprepare_total"):
        assert after.total(name, result="error") == before.total(name, result="error"), name
    assert after.one("process_open_fds") <= before.one("process_open_fds") + _FILES_MORE
