# SPDX-License-Identifier: Apache-2.0
"""A stand-in for kubelet: it registers DRA plugins, calls them and listens to them as kubelet 1.37 does, without pods.

What kubelet decides by itself it decides here too: which plugin to call, which service version, what it refuses and with
which words, when the slices of a driver are wiped (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go). What it does because
of a pod (prepare, unprepare, again after a failure) is a method, so that a test says when.

`kubelet_commands` runs it as a process of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

import grpc

from driver import values
from driver.standin import kubelet_client, kubelet_health, kubelet_pods, kubelet_registry
from driver.standin.kubelet_client import KubeletError

logger = logging.getLogger(__name__)

SliceWiper: TypeAlias = Callable[[str | None], None]
"""Deletes the ResourceSlices of this node: those of one driver, or all. Whatever it raises, it is called again."""

POLL_S: Final = 0.1
WIPE_DELAY_S: Final = 30.0
_WIPE_RETRY_FIRST_S: Final = 1.0
_WIPE_RETRY_LAST_S: Final = 300.0

DRA_SERVICES: Final[Mapping[str, kubelet_client.Version]] = {"v1.DRAPlugin": "v1", "v1beta1.DRAPlugin": "v1beta1"}


@dataclass(slots=True, kw_only=True)
class _Plugin:
    """One registered instance of a driver."""

    info: kubelet_registry.PluginInfo
    version: kubelet_client.Version
    channel: grpc.Channel
    client: kubelet_client.DraClient
    listener: kubelet_health.HealthListener | None
    connection: kubelet_client.Connection
    connected: bool


class StandInKubelet:
    """Watches `<kubelet_dir>/plugins_registry`. `start` and `stop` may alternate: that is a restart of kubelet.

    `services` are the DRA services it knows: a kubelet of another age knows fewer. `wipe_slices` stands for the API server.
    """

    def __init__(
        self,
        kubelet_dir: Path,
        *,
        wipe_slices: SliceWiper | None = None,
        wipe_delay_s: float = WIPE_DELAY_S,
        services: Mapping[str, kubelet_client.Version] = DRA_SERVICES,
        health_services: Sequence[str] = kubelet_health.SERVICES,
        poll_s: float = POLL_S,
        dial_timeout_s: float = kubelet_registry.DIAL_TIMEOUT_S,
        backoff_s: float = kubelet_registry.BACKOFF_FIRST_S,
        health_retry_s: float = kubelet_health.RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        pods: kubelet_pods.PodCgroups | None = None,
    ) -> None:
        self.registry_dir = kubelet_dir / "plugins_registry"
        self.health = kubelet_health.HealthBook(clock=clock)
        self._wipe_slices = wipe_slices
        self._wipe_delay_s = wipe_delay_s
        self._services = services
        self._health_services = health_services
        self._poll_s = poll_s
        self._dial_timeout_s = dial_timeout_s
        self._backoff_s = backoff_s
        self._health_retry_s = health_retry_s
        self._clock = clock
        self._pods = pods
        self._changed = threading.Condition(threading.RLock())
        self._reset()

    def _reset(self) -> None:
        self._stopping = threading.Event()
        self._plugins: dict[str, list[_Plugin]] = {}
        self._registered: dict[Path, kubelet_registry.SocketId] = {}
        self._refused: dict[Path, str] = {}
        self._busy: set[Path] = set()
        self._backoff = kubelet_registry.Backoff(first_s=self._backoff_s, clock=self._clock)
        self._wipe_at: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        self._pool = futures.ThreadPoolExecutor(8, thread_name_prefix="kubelet-register")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Wipe the node's slices, and look for plugins from now on."""
        self._reset()
        self.registry_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        if self._wipe_slices is not None:
            self._spawn(self._wipe, None)
        self._spawn(self._run)

    def stop(self) -> None:
        """End every connection and thread; plugins stay as they are, as when kubelet ends."""
        self._stopping.set()
        with self._changed:
            plugins = [plugin for instances in self._plugins.values() for plugin in instances]
            self._plugins = {}
            self._changed.notify_all()
        for plugin in plugins:
            _close(plugin)
            if plugin.listener is not None:
                plugin.listener.join()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()

    def restart(self) -> None:
        """What `systemctl restart kubelet` does to plugins."""
        self.stop()
        self.start()

    def plugins(self, driver: str) -> tuple[kubelet_registry.PluginInfo, ...]:
        """The registered instances of a driver, oldest first."""
        with self._changed:
            return tuple(plugin.info for plugin in self._plugins.get(driver, ()))

    def refused(self) -> Mapping[Path, str]:
        """Why the last handshake on a socket failed, where it did."""
        with self._changed:
            return dict(self._refused)

    def wait_registered(
        self, driver: str, *, instances: int = 1, timeout_s: float = 90.0
    ) -> tuple[kubelet_registry.PluginInfo, ...]:
        """Wait until exactly so many instances are registered, told so, and connected; KubeletError with what is known."""

        def there() -> bool:
            plugins = self._plugins.get(driver, ())
            return len(plugins) == instances and all(
                plugin.connected and plugin.info.socket in self._registered for plugin in plugins
            )

        with self._changed:
            if not self._changed.wait_for(there, timeout_s):
                raise KubeletError(
                    f"{len(self._plugins.get(driver, ()))} of {instances} instances of {driver} are registered after"
                    f" {timeout_s} s; refused: {self._refused or 'none'}"
                )
            return self.plugins(driver)

    def prepare(
        self,
        driver: str,
        claims: Sequence[values.ClaimRef],
        *,
        pod: str | None = None,
        timeout_s: float = kubelet_client.CALL_TIMEOUT_S,
    ) -> kubelet_client.Prepared:
        """One NodePrepareResources call for claims of a pod. Raises KubeletError as kubelet would fail the pod. `pod`: its UID; its
        cgroup is made before, as kubelet does (kubelet.go, SyncPod).
        """
        if pod is not None:
            self._cgroups().make(pod)
        plugin = self._choose(driver)
        return plugin.client.prepare(claims, version=plugin.version, timeout_s=timeout_s)

    def unprepare(
        self,
        driver: str,
        claims: Sequence[values.ClaimRef],
        *,
        pod: str | None = None,
        timeout_s: float = kubelet_client.CALL_TIMEOUT_S,
    ) -> kubelet_client.Unprepared:
        """One NodeUnprepareResources call. `pod`: the UID of the pod that ended; its cgroup is removed after the call, unless a claim
        could not be unprepared (kubelet.go, SyncTerminatingPod before SyncTerminatedPod).
        """
        plugin = self._choose(driver)
        answers = plugin.client.unprepare(claims, version=plugin.version, timeout_s=timeout_s)
        if pod is not None and not any(isinstance(answer, values.Failed) for answer in answers.values()):
            self._cgroups().remove(pod)
        return answers

    def _cgroups(self) -> kubelet_pods.PodCgroups:
        if self._pods is None:
            raise KubeletError("this kubelet has no cgroups for pods: give it a cgroup root")
        return self._pods

    def chosen(self, driver: str) -> tuple[kubelet_registry.PluginInfo, kubelet_client.Version]:
        """Which instance would be called now, in which version: the last registered of those connected, else the last."""
        plugin = self._choose(driver)
        return plugin.info, plugin.version

    def wipe_in_s(self, driver: str) -> float | None:
        """Seconds until the slices of a driver that cannot be called are wiped; None where that is not to come."""
        with self._changed:
            at = self._wipe_at.get(driver)
            return None if at is None else at - self._clock()

    def _choose(self, driver: str) -> _Plugin:
        with self._changed:
            plugins = self._plugins.get(driver, [])
            if not plugins:
                raise KubeletError(f"DRA driver {driver} is not registered")
            return next((plugin for plugin in reversed(plugins) if plugin.connected), plugins[-1])

    # kubelet_registry.Registry

    def add(self, info: kubelet_registry.PluginInfo) -> None:
        """Take a plugin on. Raises KubeletError with the reason why not."""
        where = f"DRA driver plugin {info.driver} at endpoint {info.endpoint}"
        if not info.services:
            raise KubeletError(f"plugin validation failed: {where} lists no supported gRPC services")
        version = next((self._services[service] for service in info.services if service in self._services), None)
        if version is None:
            raise KubeletError(
                f"plugin validation failed: none of the services of {where} ({', '.join(info.services)}) are supported"
                f" by the kubelet ({', '.join(self._services)})"
            )
        with self._changed:
            if self._stopping.is_set():
                raise KubeletError("kubelet is shutting down")
            if any(plugin.info.endpoint == info.endpoint for plugin in self._plugins.get(info.driver, ())):
                raise KubeletError(
                    f"plugin registration failed: endpoint {info.endpoint} already registered for {where}"
                )
            plugin = self._connect(info, version)
            self._plugins.setdefault(info.driver, []).append(plugin)
            self._sync(info.driver)
        if plugin.listener is not None:
            plugin.listener.start()

    def remove(self, socket: Path) -> None:
        """Forget what came through a socket, and its health."""
        with self._changed:
            found = [(d, p) for d, plugins in self._plugins.items() for p in plugins if p.info.socket == socket]
            for driver, plugin in found:
                self._plugins[driver].remove(plugin)
                self._sync(driver)
        for _, plugin in found:
            _close(plugin)

    def _connect(self, info: kubelet_registry.PluginInfo, version: kubelet_client.Version) -> _Plugin:
        channel = kubelet_client.open_channel(info.endpoint)
        service = next((service for service in self._health_services if service in info.services), None)
        listener = None
        if service is not None:
            listener = kubelet_health.HealthListener(
                channel, driver=info.driver, service=service, book=self.health, retry_s=self._health_retry_s
            )
        connection = kubelet_client.Connection(info.endpoint)
        return _Plugin(
            info=info,
            version=version,
            channel=channel,
            client=kubelet_client.DraClient(info.endpoint, channel=channel),
            listener=listener,
            connection=connection,
            connected=connection.alive(),
        )

    def _sync(self, driver: str) -> None:
        """After every change of a plugin: its slices may be wiped, or must no longer be."""
        if any(plugin.connected for plugin in self._plugins.get(driver, ())):
            self._wipe_at.pop(driver, None)
        elif self._wipe_slices is not None:
            self._wipe_at.setdefault(driver, self._clock() + self._wipe_delay_s)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._reconcile(kubelet_registry.sockets_in(self.registry_dir))
            if self._stopping.wait(self._poll_s):
                return

    def _reconcile(self, found: Mapping[Path, kubelet_registry.SocketId]) -> None:
        with self._changed:
            gone = [socket for socket, made in self._registered.items() if found.get(socket) != made]
            for socket in gone:
                del self._registered[socket]
            due = [driver for driver, at in self._wipe_at.items() if self._clock() >= at]
            for driver in due:
                del self._wipe_at[driver]
            for driver, plugins in self._plugins.items():
                for plugin in plugins:
                    if plugin.connected != plugin.connection.alive():
                        plugin.connected = not plugin.connected
                        self._sync(driver)
        for socket in gone:
            self.remove(socket)
        for driver in due:
            self._spawn(self._wipe, driver)
        for socket, made in found.items():
            with self._changed:
                if socket in self._registered or socket in self._busy or self._backoff.waiting(socket):
                    continue
                self._busy.add(socket)
            self._pool.submit(self._register, socket, made)

    def _register(self, socket: Path, made: kubelet_registry.SocketId) -> None:
        try:
            info = kubelet_registry.register(socket, self, stop=self._stopping, dial_timeout_s=self._dial_timeout_s)
        except KubeletError as error:
            logger.info("%s", error)
            with self._changed:
                self._refused[socket] = str(error)
                self._backoff.failed(socket)
        else:
            logger.info("Registered %s at %s", info.driver, info.endpoint)
            with self._changed:
                self._registered[socket] = made
                self._refused.pop(socket, None)
                self._backoff.succeeded(socket)
        finally:
            with self._changed:
                self._busy.discard(socket)
                self._changed.notify_all()

    def _wipe(self, driver: str | None) -> None:
        assert self._wipe_slices is not None
        pause = _WIPE_RETRY_FIRST_S
        while not self._stopping.is_set():
            try:
                self._wipe_slices(driver)
            except Exception as error:  # noqa: BLE001 -- kubelet goes on for as long as it lives, whatever is wrong
                logger.info("Slices of %s cannot be wiped yet: %s", driver or "all drivers", error)
                self._stopping.wait(pause)
                pause = min(pause * 2, _WIPE_RETRY_LAST_S)
            else:
                return

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="kubelet", daemon=True)
        self._threads.append(thread)
        thread.start()


def _close(plugin: _Plugin) -> None:
    if plugin.listener is not None:
        plugin.listener.stop()
    plugin.connection.close()
    plugin.channel.close()
