# SPDX-License-Identifier: Apache-2.0
"""The kubelet side of the agent as one thing that starts and stops: lock, service socket, registration socket, their watch.

The service socket serves before registration is announced, as kubelet calls at once; registration is announced by the
caller, when what it stands for is ready. Stop is the reverse. Kubelet repeats what it tried before or after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from driver import condition
from driver.errors import SocketError
from driver.kubelet import endpoint, plugin, sockets
from driver.kubelet import health as health_stream
from driver.kubelet import registration as registrar

logger = logging.getLogger(__name__)

CALLS = 120
"""Calls at a time. Kubelet makes one call a pod, and a node has 110 pods: a Prepare that waits for a device must never
keep out the Unprepare that frees it. Threads are made as they are needed.
"""

REGISTRATION_CALLS = 4

LOCK_TIMEOUT_S = 5.0
"""How long a start waits for a predecessor of the same name that is just ending."""

WATCH_INTERVAL_S = 2.0
"""A lost socket is made again within this: soon enough, and it costs next to nothing."""

HURRY_ROUNDS = 3
"""Kubelet notices within a second or two that an instance has gone, and empties the health of the whole driver then."""

STOP_GRACE_S = 1.0


class KubeletServer:
    """`start`, `registration`, `stop`: once each, in this order, from one thread; `status` at any time.

    Serves `preparer` and `health` to kubelet. The sockets lie in `registry_dir` and `plugin_dir`, with `pod_uid` in their
    names, which lets two instances run side by side.
    """

    def __init__(
        self,
        *,
        driver_name: str,
        registry_dir: Path,
        plugin_dir: Path,
        pod_uid: str | None,
        preparer: plugin.Preparer,
        health: health_stream.HealthSource,
        observer: plugin.RpcObserver,
        clock: Callable[[], float] = time.monotonic,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        refresh_s: float = health_stream.REFRESH_S,
        watch_interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        """Touches nothing yet. Raises SocketError when there are no paths for the sockets."""
        self.paths = sockets.socket_paths(
            driver_name=driver_name, registry_dir=registry_dir, plugin_dir=plugin_dir, pod_uid=pod_uid
        )
        self._lock_timeout_s = lock_timeout_s
        self._watch_interval_s = watch_interval_s
        self._lock = sockets.InstanceLock(self.paths, clock=clock)
        self._health = health_stream.HealthService(health, refresh_s=refresh_s)
        plugin_service = plugin.PluginService(preparer, observer=observer, clock=clock)
        self._registration = registrar.RegistrationService(
            driver_name=driver_name, socket=self.paths.registration, endpoint=self.paths.service
        )
        self._endpoint = endpoint.Endpoint(
            (self.paths.service, self.paths.registration),
            handlers=lambda: [
                *plugin_service.handlers(),
                *self._health.handlers(),
                *self._registration.handlers(),
            ],
            workers=CALLS + health_stream.MAX_STREAMS + REGISTRATION_CALLS,
        )
        self._stopping = threading.Event()
        self._changing = threading.Lock()
        self._trouble = condition.Condition(logger, recovered="The sockets are in order again")
        self._watcher = threading.Thread(target=self._watch, name="sockets", daemon=True)

    def start(self) -> None:
        """Serve on the service socket. Raises SocketError, with everything taken back.

        Sockets of instances that were killed are removed; a live one is never taken over.
        """
        try:
            sockets.make_directory(self.paths.lock.parent)
            self._lock.acquire(timeout_s=self._lock_timeout_s, stop=self._stopping)
            self._remove_stale()
            self._health.start()
            self._endpoint.open()
            self._endpoint.show(self.paths.service)
        except SocketError:
            self.stop(0)
            raise
        logger.info("Serving kubelet on %s", self.paths.service)
        self._watcher.start()

    def registration(self) -> None:
        """Let kubelet find the driver. Raises SocketError."""
        with self._changing:
            self._endpoint.show(self.paths.registration)

    def status(self) -> registrar.RegistrationState:
        """Whether kubelet can call: it said so, and the sockets lie where it looks for them."""
        if (trouble := self._trouble.text) is not None:
            return registrar.RegistrationState(registered=False, error=trouble)
        return self._registration.state()

    def resend_health(self) -> None:
        """Tell kubelet the health of all devices now: there are others than before. From any thread."""
        self._health.resend()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the health streams, remove what is ours, give calls under way `grace_s` to end. May be called again."""
        self._stopping.set()
        with self._changing:
            self._health.stop()
            self._endpoint.close(grace_s=grace_s)
            self._lock.release()

    def _watch(self) -> None:
        known = sockets.siblings(self.paths)
        hurry = 0
        while not self._stopping.wait(self._watch_interval_s):
            present = sockets.siblings(self.paths)
            with self._changing:
                if self._stopping.is_set():
                    return
                try:
                    self._look_after_sockets()
                    if present:
                        self._remove_stale()
                except SocketError as error:
                    self._trouble.failed(f"The sockets are not in order: {error}")
                except Exception:
                    # The last door of this loop: without it a lost socket would stay lost.
                    logger.exception("The sockets cannot be looked after")
                else:
                    self._trouble.passed()
            left = sockets.siblings(self.paths) if present else present
            hurry = HURRY_ROUNDS if (known | present) - left else max(0, hurry - 1)
            known = left
            if hurry:
                self._health.resend()

    def _look_after_sockets(self) -> None:
        if not self._lock.held():
            sockets.make_directory(self.paths.lock.parent)
            self._lock.acquire(timeout_s=0, stop=self._stopping)
        for path in self._endpoint.lost():
            reason = f"Socket {path} was removed by somebody else"
            if path == self.paths.registration:
                self._registration.lost(f"{reason}; it was made again for kubelet to find")
            else:
                logger.warning("%s; making it again", reason)
            self._endpoint.reopen(path)

    def _remove_stale(self) -> None:
        for path in sockets.remove_stale(self.paths):
            logger.info("Removed socket %s of an instance that is gone", path)
