# SPDX-License-Identifier: Apache-2.0
"""Keeps the daemon of one device: there while it has shares, with all of them in place, and started again when it ends.

One thread does everything that touches the daemon; callers say what they want and wait for it. The first restart comes at once, the
next ones after a growing while; somebody who asks for a share makes the wait shorter, as the reason may be gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from driver.errors import MpsError
from driver.mps import control, values
from driver.mps import daemon as lives
from driver.mps.shares import SERVER, Share

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """In seconds. `first` and `last`: how long to wait before a daemon is started again, at first and at most; `steady`: after how long
    a life counts as a good one; `check`: how often a running daemon is looked at, and a share that failed is tried again.
    """

    first: float = 1.0
    last: float = 30.0
    steady: float = 60.0
    check: float = 15.0


Make = Callable[[Share, Callable[[], None]], lives.Daemon]
"""Makes a daemon for the device of a share, which calls back when it ends."""


class Keeper:
    """The keeper of one device. `folder`: what belongs to the device; with its last share it is given to `clear`."""

    def __init__(
        self,
        device: str,
        folder: Path,
        make: Make,
        *,
        changed: Callable[[], None],
        pace: Pace,
        clear: Callable[[Path], None],
    ) -> None:
        self.device = device
        self._folder = folder
        self._make = make
        self._tell = changed
        self._pace = pace
        self._clear = clear
        self._condition = threading.Condition()
        self._wanted: dict[str, Share] = {}
        self._present: dict[str, Share] = {}
        """What the daemon may have."""
        self._placed: dict[str, Share] = {}
        """What it has as it was wanted."""
        self._failed: dict[str, tuple[str, float]] = {}
        """Share id -> why it could not be placed, and when to try again."""
        self._failures = 0
        self._last_failure = 0.0
        self._abandon = threading.Event()
        self._stopping = False
        self._asked = False
        self._dirty = False
        """Whether there may be anything of a daemon: processes, or files."""
        self._state = values.DaemonState.STARTING
        self._since = time.monotonic()
        self._restarts = 0
        self._clients: int | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"mps {device}", daemon=True)
        self._thread.start()

    def place(self, share: Share, *, timeout_s: float) -> None:
        """Want a share, and wait until it is in place. Raises MpsError; it is wanted all the same, unless it cannot be."""
        with self._condition:
            if self._stopping:
                raise MpsError("The MPS supervisor is ending", retryable=True)
            for other in self._wanted.values():
                if (other.uuid, other.protocol) != (share.uuid, share.protocol) and other.share_id != share.share_id:
                    raise MpsError(
                        f"Device {self.device} is shared as {other.uuid} by MPS {other.protocol}, and not as {share.uuid} by"
                        f" MPS {share.protocol}, while share {other.share_id} is there",
                        retryable=False,
                    )
            if self._wanted.get(share.share_id) != share:
                self._wanted[share.share_id] = share
                self._tell()
            self._failed.pop(share.share_id, None)
            self._abandon.clear()
            self._asked = True
            failures = self._failures
            self._condition.notify_all()

            def settled() -> bool:
                return (
                    self._placed.get(share.share_id) == share
                    or self._failures > failures
                    or share.share_id in self._failed
                    or self._wanted.get(share.share_id) != share
                    or self._stopping
                )

            self._condition.wait_for(settled, timeout_s)
            if self._placed.get(share.share_id) == share:
                return
            why = self._failed.get(share.share_id, (self._error, 0.0))[0] or f"it is still {self._state}"
        raise MpsError(
            f"The MPS daemon of device {self.device} does not have share {share.share_id}: {why}", retryable=True
        )

    def remove(self, share_id: str, *, timeout_s: float) -> None:
        """Want a share no more, and wait until it is gone. Raises MpsError."""
        with self._condition:
            if self._wanted.pop(share_id, None) is not None:
                self._tell()
            self._failed.pop(share_id, None)
            if not self._wanted:
                self._abandon.set()
            self._condition.notify_all()

            def gone() -> bool:
                return share_id not in self._present and (bool(self._wanted) or not self._dirty)

            if not self._condition.wait_for(gone, timeout_s):
                raise MpsError(
                    f"The MPS daemon of device {self.device} still has share {share_id} after {timeout_s:.0f} s",
                    retryable=True,
                )

    def stop(self) -> None:
        """End the daemon, whatever it has. `join` waits for that."""
        with self._condition:
            self._stopping = True
            self._abandon.set()
            self._condition.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether all has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def daemon(self) -> values.Daemon | None:
        """How it is, None where there is no daemon and none is wanted."""
        with self._condition:
            share = next(iter((self._wanted or self._present).values()), None)
            if share is None:
                return None
            failed = next((text for text, _ in self._failed.values()), None)
            return values.Daemon(
                device=self.device,
                uuid=share.uuid,
                protocol=share.protocol,
                state=self._state,
                restarts=self._restarts,
                since_s=max(0.0, time.monotonic() - self._since),
                shares=tuple(self._wanted),
                clients=self._clients,
                error=failed or self._error,
            )

    def _run(self) -> None:
        tries = 0
        while (share := self._next(self._wait_s(tries))) is not None:
            began = time.monotonic()
            if tries:
                self._restarts += 1
            try:
                self._live(share)
            except (lives.DaemonError, control.ControlError) as error:
                why = str(error)
            except Exception as error:
                logger.exception("The MPS daemon of device %s cannot be kept", self.device)
                why = f"{type(error).__name__}: {error}"
            else:
                why = ""
            if not why or self._abandon.is_set():
                tries = self._restarts = 0
                continue
            logger.error("The MPS daemon of device %s: %s", self.device, why)
            tries = 1 if time.monotonic() - began >= self._pace.steady else tries + 1
            self._fails(why)

    def _wait_s(self, tries: int) -> float:
        """How long to wait after so many lives in a row that ended by themselves: not at all after one."""
        return 0.0 if tries < 2 else min(self._pace.last, self._pace.first * 2.0 ** min(tries - 2, 30))

    def _next(self, wait_s: float) -> Share | None:
        """Wait until there is a daemon to start; one of its shares. None when it is over."""
        end = time.monotonic() + wait_s
        while True:
            with self._condition:
                self._asked = False
                while not self._stopping and self._wanted:
                    soonest = min(end, self._last_failure + self._pace.first) if self._asked else end
                    left = soonest - time.monotonic()
                    if left <= 0:
                        self._dirty = True
                        self._enter(values.DaemonState.STARTING)
                        return next(iter(self._wanted.values()))
                    self._condition.wait(left)
                if self._stopping:
                    return None
                self._error = None
                end = 0.0
                if not self._dirty:
                    self._condition.wait()
                    continue
            self._clear(self._folder)
            with self._condition:
                self._dirty = False
                self._condition.notify_all()

    def _live(self, share: Share) -> None:
        """One life of the daemon. Returns when it was ended because nobody wants it. Raises DaemonError or ControlError."""
        daemon = self._make(share, self._wake)
        daemon.start(self._abandon)
        try:
            self._serve(daemon)
        except control.ControlError as error:
            why = str(error) if daemon.alive else daemon.how_it_ended()
            raise control.ControlError(f"{why}; the end of its log: {daemon.last_words()}") from error
        finally:
            daemon.end()
            with self._condition:
                self._present.clear()
                self._placed.clear()
                self._clients = None
                self._condition.notify_all()

    def _serve(self, daemon: lives.Daemon) -> None:
        checked = time.monotonic()
        while True:
            with self._condition:
                due = checked + self._pace.check
                while not self._must_act(daemon) and (left := due - time.monotonic()) > 0:
                    self._condition.wait(left)
                if self._stopping or not self._wanted:
                    return
                wanted = dict(self._wanted)
                missing = [share for share in wanted.values() if self._may_try(share)]
                surplus = [share for share_id, share in self._present.items() if share_id not in wanted]
            if not daemon.alive:
                raise control.ControlError(daemon.how_it_ended())
            for share in surplus:
                daemon.control.remove(share)
                with contextlib.suppress(OSError):
                    (daemon.pipes / SERVER / share.namespace).rmdir()
                self._is_gone(share)
            for share in missing:
                self._try(daemon, share)
            if time.monotonic() >= due:
                checked = time.monotonic()
                self._look(daemon)
            with self._condition:
                self._settle()

    def _must_act(self, daemon: lives.Daemon) -> bool:
        return (
            self._stopping
            or not self._wanted
            or not daemon.alive
            or bool(self._present.keys() - self._wanted.keys())
            or any(map(self._may_try, self._wanted.values()))
        )

    def _may_try(self, share: Share) -> bool:
        """Whether a share has to be placed now."""
        if self._placed.get(share.share_id) == share:
            return False
        failed = self._failed.get(share.share_id)
        return failed is None or time.monotonic() >= failed[1]

    def _try(self, daemon: lives.Daemon, share: Share) -> None:
        with self._condition:
            self._present[share.share_id] = share
        try:
            daemon.control.place(share)
        except control.ShareError as error:
            logger.error("The MPS daemon of device %s: %s", self.device, error)
            with self._condition:
                self._failed[share.share_id] = (str(error), time.monotonic() + self._pace.check)
                self._placed.pop(share.share_id, None)
                self._tell()
                self._settle()
                self._condition.notify_all()
        else:
            with self._condition:
                self._placed[share.share_id] = share
                self._failed.pop(share.share_id, None)
                self._settle()
                self._condition.notify_all()

    def _is_gone(self, share: Share) -> None:
        with self._condition:
            for shares in (self._present, self._placed):
                shares.pop(share.share_id, None)
            self._condition.notify_all()

    def _look(self, daemon: lives.Daemon) -> None:
        """See that a daemon has what it was given. What it does not have is given to it again."""
        daemon.trim_logs()
        with self._condition:
            placed = dict(self._placed)
        try:
            clients = daemon.control.check(placed.values())
        except control.ShareError as error:
            logger.error("The MPS daemon of device %s: %s; its shares are set again", self.device, error)
            with self._condition:
                self._placed.clear()
                self._error = str(error)
                self._tell()
            return
        with self._condition:
            self._clients = clients

    def _settle(self) -> None:
        """Note whether all is as wanted. With the condition held."""
        if self._failed:
            self._enter(values.DaemonState.WAITING)
        elif self._placed == self._wanted:
            self._enter(values.DaemonState.RUNNING)

    def _fails(self, why: str) -> None:
        with self._condition:
            self._failures += 1
            self._last_failure = time.monotonic()
            self._error = why
            self._enter(values.DaemonState.WAITING)
            self._condition.notify_all()

    def _enter(self, state: values.DaemonState) -> None:
        """With the condition held."""
        if self._state is not state:
            self._state = state
            self._since = time.monotonic()
            self._tell()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()
