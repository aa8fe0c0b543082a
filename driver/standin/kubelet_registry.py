# SPDX-License-Identifier: Apache-2.0
"""How kubelet finds plugins: sockets that appear in its registry directory, and the handshake on each
(pkg/kubelet/pluginmanager of Kubernetes 1.37: pluginwatcher, reconciler, operationexecutor).

Kubelet watches by inotify; this looks at the directory every 0.1 s, which sees the same and needs no more than the
standard library. Kubelet reconciles once a second; here a look and a reconciliation are one.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import grpc

from driver.standin.kubelet_client import Connection, KubeletError, describe, open_channel
from proto.pluginregistration.v1 import api_pb2 as registration_v1
from proto.pluginregistration.v1 import api_pb2_grpc as registration_v1_grpc

DIAL_TIMEOUT_S = 10.0
GET_INFO_TIMEOUT_S = 1.0
NOTIFY_TIMEOUT_S = 5.0
_DIAL_LOOK_S = 0.05
BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 122.0

PLUGIN_TYPE = "DRAPlugin"

SocketId: TypeAlias = tuple[int, int]
"""Inode and time of creation: a socket made anew at the same path is another socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """What a plugin says of itself in GetInfo, with the socket it said it on."""

    socket: Path
    driver: str
    endpoint: Path
    services: tuple[str, ...]


class Registry(Protocol):
    """Who keeps the registered plugins."""

    def add(self, info: PluginInfo) -> None:
        """Register; raises KubeletError with the reason that the plugin is told."""

    def remove(self, socket: Path) -> None:
        """Unregister what came through this socket, if anything did."""


def sockets_in(directory: Path) -> Mapping[Path, SocketId]:
    """The sockets below `directory` that kubelet would look at: no name with a dot in front, at any depth."""
    return dict(_walk(directory))


def _walk(directory: Path) -> Iterator[tuple[Path, SocketId]]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    yield from _walk(Path(entry.path))
                elif stat.S_ISSOCK(found.st_mode):
                    yield Path(entry.path), (found.st_ino, found.st_mtime_ns)
    except FileNotFoundError:
        return


def register(
    socket: Path, registry: Registry, *, stop: threading.Event, dial_timeout_s: float = DIAL_TIMEOUT_S
) -> PluginInfo:
    """The whole handshake. Raises KubeletError when it did not end with a registered plugin; `stop` ends the dialling."""
    if not _dial(socket, stop, dial_timeout_s):
        raise KubeletError(f"RegisterPlugin: dial failed at socket {socket}")
    channel = open_channel(socket)
    try:
        stub = registration_v1_grpc.RegistrationStub(channel)
        try:
            said = stub.GetInfo(registration_v1.InfoRequest(), timeout=GET_INFO_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            raise KubeletError(f"RegisterPlugin: GetInfo at socket {socket}: {describe(error)}") from error
        info = PluginInfo(
            socket=socket,
            driver=said.name,
            endpoint=Path(said.endpoint or socket),
            services=tuple(said.supported_versions),
        )
        try:
            _require_type(said.type)
            registry.add(info)
        except KubeletError as refusal:
            _notify(stub, socket, registered=False, error=str(refusal))
            raise
        try:
            _notify(stub, socket, registered=True, error="")
        except KubeletError:
            registry.remove(socket)
            raise
    finally:
        channel.close()
    return info


def _require_type(plugin_type: str) -> None:
    if plugin_type != PLUGIN_TYPE:
        raise KubeletError(f"no handler registered for plugin type: {plugin_type}")


def _dial(socket: Path, stop: threading.Event, timeout_s: float) -> bool:
    connection = Connection(socket)
    deadline = time.monotonic() + timeout_s
    try:
        while not connection.alive():
            if time.monotonic() >= deadline or stop.wait(_DIAL_LOOK_S):
                return False
    finally:
        connection.close()
    return True


def _notify(stub: registration_v1_grpc.RegistrationStub, socket: Path, *, registered: bool, error: str) -> None:
    status = registration_v1.RegistrationStatus(plugin_registered=registered, error=error)
    try:
        stub.NotifyRegistrationStatus(status, timeout=NOTIFY_TIMEOUT_S)
    except grpc.RpcError as failure:
        text = f"failed to send registration status at socket {socket}: {describe(failure)}"
        raise KubeletError(f"{error}; {text}" if error else text) from failure


@dataclass(slots=True)
class Backoff:
    """Pauses between handshakes that failed, by socket path; a socket made anew keeps the pause of its path."""

    first_s: float = BACKOFF_FIRST_S
    clock: Callable[[], float] = time.monotonic
    _pauses: dict[Path, tuple[float, float]] = field(default_factory=dict)

    def failed(self, socket: Path) -> None:
        """Twice as long as the last time."""
        _, last = self._pauses.get(socket, (0.0, self.first_s / 2))
        self._pauses[socket] = (self.clock(), min(last * 2, BACKOFF_LAST_S))

    def succeeded(self, socket: Path) -> None:
        """Forget the failures."""
        self._pauses.pop(socket, None)

    def waiting(self, socket: Path) -> bool:
        """Whether the pause is not over yet."""
        failed_at, pause = self._pauses.get(socket, (0.0, 0.0))
        return self.clock() - failed_at < pause
