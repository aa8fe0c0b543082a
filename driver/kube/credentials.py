# SPDX-License-Identifier: Apache-2.0
"""Who we are to the API server, renewed while running: token files, tokens and certificates of credential plugins.

A renewal that takes its time (a plugin that asks a cloud) runs on a thread of its own; who needs it waits no longer than
its own time limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from driver import errors
from driver.kube import access, connections

TOKEN_FILE_S = 60.0
"""How often a token file is read again. Kubelet renews it when a fifth of its life is left, at least two minutes."""

BEFORE_EXPIRY_S = 30.0
BETWEEN_RELOADS_S = 10.0
"""A server that refuses whatever it is shown must not make us start a loader for every call."""


@dataclass(frozen=True, slots=True)
class Session:
    """Connections and the headers that go with them."""

    connections: connections.Connections
    headers: dict[str, str]


class _Reload:
    """One renewal under way."""

    def __init__(self, reload: Callable[[], access.Access], done: Callable[[access.Access], None]) -> None:
        self.finished = threading.Event()
        self.error: errors.DriverError | None = None
        self._reload = reload
        self._done = done
        threading.Thread(target=self._run, name="credentials", daemon=True).start()

    def _run(self) -> None:
        try:
            self._done(self._reload())
        except errors.DriverError as error:
            self.error = error
        finally:
            self.finished.set()


class Credentials:
    """The present session of one client. Safe from every thread."""

    def __init__(
        self,
        opened: access.Access | None,
        *,
        user_agent: str,
        reload: Callable[[], access.Access] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._headers = {"Accept": "application/json", "User-Agent": user_agent}
        self._reload = reload
        self._clock = clock
        self._lock = threading.Lock()
        self._access = opened
        self._connections = connections.Connections(opened) if opened is not None else None
        self._session: Session | None = None
        self._fresh_until = 0.0
        self._reloading: _Reload | None = None
        self._reload_after = 0.0

    @property
    def server(self) -> str:
        """Where the server is, for messages."""
        return self._access.server if self._access is not None else "the API server (no credentials yet)"

    def session(self, *, timeout_s: float) -> Session:
        """What to talk with now. Raises ApiError (retryable) when there are no credentials yet or any more."""
        session = self._session
        if session is not None and self._clock() < self._fresh_until:
            return session
        if self._access is None or self._expired(self._access):
            self._run_reload(timeout_s)
        return self._read()

    def renew(self, refused: Session, *, timeout_s: float) -> bool:
        """The server refused what this session showed. Whether there is something else to show now."""
        if self._session is refused and self._reload is not None:
            self._run_reload(timeout_s)
        return self._read() is not refused

    def close(self) -> None:
        """Close idle connections."""
        if self._connections is not None:
            self._connections.close()

    def _expired(self, opened: access.Access) -> bool:
        return opened.expires_at is not None and self._clock() >= opened.expires_at - BEFORE_EXPIRY_S

    def _run_reload(self, timeout_s: float) -> None:
        """Renew the Access, or wait for the renewal that runs already. What comes of it is seen by `_read`."""
        if self._reload is None:
            return
        with self._lock:
            running = self._reloading
            if running is None or running.finished.is_set():
                if self._clock() < self._reload_after:
                    return
                self._reload_after = self._clock() + BETWEEN_RELOADS_S
                running = self._reloading = _Reload(self._reload, self._replace)
        running.finished.wait(timeout_s)

    def _replace(self, opened: access.Access) -> None:
        with self._lock:
            # Connections of the same place stay good where only the token changed, but a certificate is part of them.
            old, self._connections = self._connections, connections.Connections(opened)
            self._access = opened
            self._session = None
        if old is not None:
            old.close()

    def _read(self) -> Session:
        """The session of the present Access, with the token as its file is now."""
        with self._lock:
            opened, kept, before, reloading = self._access, self._connections, self._session, self._reloading
            if opened is None or kept is None:
                why = reloading.error if reloading is not None and reloading.error is not None else "no credentials yet"
                raise errors.ApiError(str(why), reason=errors.ApiReason.UNAVAILABLE)
            try:
                authorization = opened.header()
            except OSError as error:
                raise errors.ApiError(
                    f"The token file {opened.token_file} cannot be read: {error}", reason=errors.ApiReason.UNAVAILABLE
                ) from error
            headers = self._headers | ({"Authorization": authorization} if authorization is not None else {})
            if before is None or before.connections is not kept or before.headers != headers:
                before = self._session = Session(kept, headers)
            self._fresh_until = self._clock() + TOKEN_FILE_S
            if opened.expires_at is not None:
                self._fresh_until = min(self._fresh_until, opened.expires_at - BEFORE_EXPIRY_S)
            return before
