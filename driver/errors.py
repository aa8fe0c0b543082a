# SPDX-License-Identifier: Apache-2.0
"""The errors of the driver. Messages name the object (claim, device, path, option) and the next step.

DriverError
+-- ConfigError       argv, environment or configuration file: exit status 2 at start
+-- ClaimError        one claim cannot be served; `retryable` says whether waiting may help
+-- RecordError       the record of prepared claims cannot be used now
+-- StateLostError    the state folder was removed under the agent
+-- SocketError       a socket cannot be had (path too long, taken by a live process)
+-- MpsError          the MPS supervisor is not reached, or cannot do what was asked
+-- ApiError          the API server; see ApiReason
"""

from __future__ import annotations

from enum import StrEnum


class DriverError(Exception):
    """Base of everything the driver raises on purpose."""


class ConfigError(DriverError):
    """Unknown, malformed or contradictory input of the person who runs the agent."""


class ClaimError(DriverError):
    """This claim cannot be prepared or unprepared. `retryable`: the same call may succeed later without a change of the
    claim (API server away, device still being released); callers may wait instead of failing.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable

    def waited(self, seconds: float) -> None:
        """Say as well how long was waited in vain."""
        self.args = (f"{self} (waited {seconds:.0f} s)",)


class RecordError(DriverError):
    """The record of prepared claims cannot be opened, read or written. `retryable`: it may soon, without anybody's help
    (another instance is at work on it).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StateLostError(DriverError):
    """What the locks lie in is gone: two instances would not see each other any more, so the agent has to start anew."""


class SocketError(DriverError):
    """A unix socket cannot be bound or served."""


class MpsError(DriverError):
    """The MPS supervisor is away or did not do what was asked. `retryable`: the same call may succeed later without anyone changing
    anything (it is just starting, a daemon is being restarted).
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class ApiReason(StrEnum):
    """Why the API server did not do what was asked."""

    NOT_FOUND = "not-found"
    CONFLICT = "conflict"
    ALREADY_EXISTS = "already-exists"
    FORBIDDEN = "forbidden"
    INVALID = "invalid"
    GONE = "gone"
    """A watch or list continues from a resource version that the server no longer has (410)."""
    UNAVAILABLE = "unavailable"
    """Not reached, no answer in time, 429 or 5xx: the same call may succeed later."""
    OTHER = "other"


class ApiError(DriverError):
    """A call to the API server failed. `status` is the HTTP status, None when there was no answer."""

    def __init__(self, message: str, *, reason: ApiReason, status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later without anyone changing anything."""
        return self.reason is ApiReason.UNAVAILABLE
