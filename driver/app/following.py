# SPDX-License-Identifier: Apache-2.0
"""The configuration file while the agent runs: read again when it changes, and on SIGHUP.

What can change under way (`sharing`, `publish`) does; for the rest a person is told that it takes a restart. A file that is not
valid changes nothing and is told of until it is, or is as it was.

The file is watched by looking at it every few seconds, which costs a system call and sees everything: an editor, a rename, and
the link that kubelet swaps for a ConfigMap, which makes another file of the same path.
"""

from __future__ import annotations

import logging
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from discovery import model
from driver import condition, config
from driver.errors import ConfigError

logger = logging.getLogger(__name__)

WATCH_S = 3.0
SETTLE_S = 0.5
"""How long a file must have stayed as it is: half of a YAML file may be a valid one with fewer rules. Longer than the steps of
the times that file systems keep, so that a change right after the look is not missed.
"""

GONE_S = 10.0
"""How long a file may be away that somebody is replacing."""

ENDING_S = 1.0
_SHOWN = 3
"""How many problems of a file a Finding shows; the log has all."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What tells one state of a file from another: which file stands at the path, and when it was changed. Of a file that
    cannot be looked at, why.
    """

    identity: tuple[int, ...] = ()
    regular: bool = False
    missing: str | None = None


class Following:
    """`start` and `stop` once each. `again` from a signal handler, `in_effect` and `findings` from any thread."""

    def __init__(
        self,
        path: Path | None,
        *,
        running: config.AgentConfig,
        load: Callable[[Path], config.AgentConfig],
        changed: Callable[[], None],
        refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`running`: what the agent was started with. `load` raises ConfigError. `changed` is called when `in_effect` is another,
        `refused` with a sentence for people when the file is newly, or otherwise, not valid.
        """
        self._path = path
        self._load = load
        self._changed = changed
        self._tell = refused
        self._clock = clock
        self._started_with = running
        self._in_effect = running
        self._restart: str | None = None
        self._refused = condition.Condition(logger, recovered="The configuration file is valid again")
        self._read: _Seen | None = None
        """The file as it was when it was last read."""
        self._settling: tuple[_Seen, float] | None = None
        first = None if path is None else _see(path)
        self._pipe = first is not None and first.missing is None and not first.regular
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Made for signal handlers: what they interrupt may be putting, too. True: read again; False: end."""
        self._thread = threading.Thread(target=self._run, name="configuration", daemon=True)

    @property
    def in_effect(self) -> config.AgentConfig:
        """What the agent does now; sections that cannot change under way are those of the start."""
        return self._in_effect

    @property
    def refused(self) -> bool:
        """Whether the file is not valid now, so that what was read before stays in effect."""
        return self._refused.text is not None

    def findings(self) -> tuple[model.Finding, ...]:
        """What a person has to do about the file."""
        told = (("config-refused", self._refused.text), ("config-restart-needed", self._restart))
        return tuple(
            model.Finding(code=code, severity=model.Severity.WARNING, subject=str(self._path), message=message)
            for code, message in told
            if message is not None
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._asked.put(False)
        if self._thread.is_alive():
            self._thread.join(ENDING_S)

    def again(self) -> None:
        """Read the file again soon, whether it has changed or not. May be called by a signal handler."""
        self._asked.put(True)

    def _run(self) -> None:
        pause_s = self.look()
        while True:
            try:
                asked = self._asked.get(timeout=pause_s)
            except queue.Empty:
                pause_s = self.look()
                continue
            while asked and not self._asked.empty():
                asked = self._asked.get()
            if not asked:
                return
            pause_s = self.look(asked=True)

    def look(self, *, asked: bool = False) -> float | None:
        """See whether the file has changed, and read it if it has settled or somebody `asked`. In how many seconds to look
        again; None: when somebody asks.
        """
        if self._path is None:
            if asked:
                logger.warning(
                    "SIGHUP: there is no configuration file to read again: the agent was started without --config"
                )
            return None
        if self._pipe:
            if asked:
                logger.warning("SIGHUP: %s was a pipe at the start and cannot be read again", self._path)
            return None
        now = _see(self._path)
        if not asked and (pause_s := self._unsettled(now)) is not None:
            return pause_s
        self._settling = None
        self._read = now
        self._take(self._path, now, asked=asked)
        return WATCH_S

    def _unsettled(self, now: _Seen) -> float | None:
        """How long to wait before the file may be read; None: not at all."""
        if now == self._read:
            self._settling = None
            return WATCH_S
        if self._settling is None or self._settling[0] != now:
            self._settling = (now, self._clock())
        left_s = self._settling[1] + (GONE_S if now.missing else SETTLE_S) - self._clock()
        return min(left_s, SETTLE_S) if left_s > 0 else None

    def _take(self, path: Path, now: _Seen, *, asked: bool) -> None:
        if not now.regular:
            self._refuse([f"{path}: {now.missing or 'is no regular file'}"], asked=asked)
            return
        try:
            fresh = self._load(path)
        except ConfigError as error:
            self._refuse(str(error).splitlines(), asked=asked)
            return
        except Exception as error:
            # The last door: whatever is wrong with a file, the agent goes on as it was.
            logger.exception("The configuration file could not be read")
            self._refuse([f"{path}: {type(error).__name__}: {error}"], asked=asked)
            return
        self._refused.passed()
        self._apply(path, fresh, asked=asked)

    def _refuse(self, problems: list[str], *, asked: bool) -> None:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        message = (
            "The configuration file is not valid, and what was read before stays in effect: "
            f"{'; '.join(problems[:_SHOWN])}{more}"
        )
        if self._refused.text != message:
            for problem in problems[_SHOWN:]:
                logger.warning("%s", problem)
            self._tell(message)
        elif asked:
            logger.warning("SIGHUP: %s", message)
        self._refused.failed(message)

    def _apply(self, path: Path, fresh: config.AgentConfig, *, asked: bool) -> None:
        restart = None
        if fresh.topology != self._started_with.topology:
            restart = f"Section topology of {path} has changed, which takes a restart of the agent"
        if restart is not None and self._restart is None:
            logger.warning("%s", restart)
        self._restart = restart
        before = self._in_effect
        self._in_effect = replace(before, publish=fresh.publish, sharing=fresh.sharing)
        sections = [name for name in ("publish", "sharing") if getattr(before, name) != getattr(fresh, name)]
        if sections:
            logger.info("The configuration file has changed: section %s", ", ".join(sections))
            self._changed()
        elif asked:
            logger.info("SIGHUP: the configuration file was read again, and changes nothing")


def _see(path: Path) -> _Seen:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        return _Seen(missing=getattr(error, "strerror", None) or str(error))
    return _Seen(
        identity=(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns),
        regular=stat.S_ISREG(found.st_mode),
    )
