# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the stand-in API server, on order: slow, refusing, mute, cut, or changing what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from driver.standin import apiserver_http as http
from driver.standin import apiserver_status as status


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request as the API understands it. `verb` as RBAC names it."""

    verb: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with a Status instead of doing anything."""

    code: int
    reason: str
    message: str = "refused by a fault of the stand-in"
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """Do it, but later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DelayAnswer:
    """Do it at once, but say so later: watches may tell of it first."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Take the request and never answer, as behind a network that drops packets."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection without an answer and without doing anything."""


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """Do it, then close the connection without an answer."""


@dataclass(frozen=True, slots=True)
class Mutate:
    """Change the object that was sent, as a mutating webhook does."""

    change: Callable[[dict[str, Any]], None]


Effect = Refuse | Delay | DelayAnswer | Hang | Disconnect | LoseAnswer | Mutate


class Injection:
    """One fault in force. `remove` ends it, and lets go whoever hangs in it."""

    def __init__(self, effect: Effect, wanted: Mapping[str, object], times: int | None) -> None:
        self.effect = effect
        self.ended = threading.Event()
        self._wanted = wanted
        self._left = times
        self._lock = threading.Lock()

    def takes(self, call: ApiCall) -> bool:
        """Whether this call is hit; counts it."""
        if self.ended.is_set() or any(getattr(call, key) != value for key, value in self._wanted.items()):
            return False
        with self._lock:
            if self._left == 0:
                return False
            if self._left is not None:
                self._left -= 1
            return True

    def remove(self) -> None:
        """End it."""
        self.ended.set()


class Faults:
    """All faults in force. `silent_watches`: every watch keeps its connection and says nothing more."""

    def __init__(self) -> None:
        self.silent_watches = False
        self._stopping = threading.Event()
        self._injections: tuple[Injection, ...] = ()

    def inject(
        self,
        effect: Effect,
        *,
        verb: str | None = None,
        resource: str | None = None,
        name: str | None = None,
        dry_run: bool | None = None,
        times: int | None = None,
    ) -> Injection:
        """Put a fault in force for the calls that fit, at most `times` times."""
        given = {"verb": verb, "resource": resource, "name": name, "dry_run": dry_run}
        injection = Injection(effect, {key: value for key, value in given.items() if value is not None}, times)
        self._injections = (*(other for other in self._injections if not other.ended.is_set()), injection)
        return injection

    def clear(self) -> None:
        """End all faults."""
        injections, self._injections = self._injections, ()
        for injection in injections:
            injection.remove()
        self.silent_watches = False

    def hold(self, *, open_again: bool) -> None:
        """While the server stops nobody may hang in a fault; `open_again` when it serves once more."""
        if open_again:
            self._stopping.clear()
        else:
            self._stopping.set()

    def strike(self, call: ApiCall) -> tuple[Effect, ...]:
        """Let the faults happen that come before the work; what comes with or after it is returned (`finish`, Mutate)."""
        later: list[Effect] = []
        for injection in self._injections:
            if not injection.takes(call):
                continue
            match injection.effect:
                case Refuse(code, reason, message, retry_after_s):
                    raise status.StatusError(code, reason, message, retry_after_s=retry_after_s)
                case Delay(seconds):
                    self._stopping.wait(seconds)
                case Hang():
                    while not self._stopping.wait(0.05) and not injection.ended.is_set():
                        pass
                    raise http.Hangup
                case Disconnect():
                    raise http.Hangup
                case LoseAnswer() | DelayAnswer() | Mutate():
                    later.append(injection.effect)
        return tuple(later)

    def finish(self, effects: Iterable[Effect]) -> None:
        """Let the faults happen that come after the work."""
        for effect in effects:
            match effect:
                case DelayAnswer(seconds):
                    self._stopping.wait(seconds)
                case LoseAnswer():
                    raise http.Hangup
