# SPDX-License-Identifier: Apache-2.0
"""The control daemon of the stand-in for MPS: its sockets, the processes of its servers, and its faults.

It listens where the real one does, on `control` of its pipe folder, of every server and of every namespace. A command arrives at the
first as a JSON line; a client (mpsclient.py) at the others, where it is told the limits of its namespace and stays connected for as
long as it runs.

Faults, words in the file that CUDA_MPS_MOCK_FAULTS names or that lies beside the program: `no-start` (the daemon ends at once),
`hangs` (no command is answered), `forgets` (all namespaces are gone, once), `refuses` (limits are taken and not kept).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from discovery.mock import mpslegacy, mpsrules, mpswire

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a daemon is started. `known`: the UUIDs of the devices of the node, asked for anew each time; `server`: the program of a
    server.
    """

    pipes: Path
    log: Path
    protocol: int
    multiuser: bool
    known: Callable[[], Sequence[str]]
    faults: Path
    server: Path


class Daemon:
    """A control daemon. `run` serves until it is told to quit; the exit status."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[str, socket.socket] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._quitting = False
        self._journal: TextIO | None = None
        self.state = mpsrules.State(
            pipes=PurePosixPath(setting.pipes),
            multiuser=setting.multiuser,
            start_server=self._start_server,
            end_server=self._end_server,
            open_namespace=self._open_namespace,
            close_namespace=self._close_namespace,
            terminate=self._terminate,
        )
        self.legacy = mpslegacy.Legacy(self.state)

    def run(self) -> int:
        """Serve."""
        self._setting.log.mkdir(parents=True, exist_ok=True)
        self._journal = (self._setting.log / "control.log").open("a", buffering=1)
        if "no-start" in self._faults():
            self._note("Failed to start: the driver said no")
            return 1
        if os.geteuid() != 0 and self._setting.multiuser:
            self._note("Multi-user mode needs superuser")
            return 1
        try:
            self._listen(mpswire.SOCKET)
        except OSError as error:
            self._note(f"Failed to listen on {self._setting.pipes / mpswire.SOCKET}: {error}")
            return 1
        (self._setting.pipes / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
        self._note("Start")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._quit())
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._wake = wake_write
        self._selector.register(wake_read, selectors.EVENT_READ)
        while not self._quitting:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(wake_read, 1)
                    continue
                with contextlib.suppress(OSError):
                    connection, _ = key.data[1].accept()
                    threading.Thread(target=self._serve, args=(key.data[0], connection), daemon=True).start()
        with self._lock:
            for name in list(self.state.servers):
                self._end_server(name)
        self._note("Exit")
        return 0

    def _quit(self) -> None:
        self._quitting = True
        os.write(self._wake, b"x")

    def _serve(self, place: str, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            request = json.loads(connection.makefile("rb").readline(mpswire.LINE_MAX))
            if "client" in request:
                self._client(place, connection, pid, uid, request)
            elif place == mpswire.SOCKET:
                answer = self._command(uid, request)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _command(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        while "hangs" in self._faults():
            time.sleep(0.1)
        if uid not in (0, os.geteuid()):
            return {"status": 1, "out": "", "err": "Permission denied\n"}
        if request.get("quit") or request.get("lines") == ["quit"]:
            self._quit()
            return {"status": 0, "out": "", "err": "", "protocol": self._setting.protocol}
        with self._lock:
            self._reap()
            if "forgets" in self._faults():
                self._forget()
            kept = self._limits() if "refuses" in self._faults() else None
            try:
                if self._setting.protocol == 2:
                    out = "".join(self.legacy.run(uid, line) for line in request.get("lines", ()))
                else:
                    out = mpsrules.run(self.state, uid, request["arguments"])
                status, err = 0, ""
            except (mpsrules.RefusedError, KeyError) as error:
                status, out, err = 1, "", f"{error}\n"
            if kept is not None:
                self._restore(kept)
        self._note(f"User command {request.get('arguments') or request.get('lines')}: {err.strip() or 'done'}")
        return {"status": status, "out": out, "err": err}

    def _client(self, place: str, connection: socket.socket, pid: int, uid: int, request: Mapping[str, Any]) -> None:
        """A program that uses the GPU, until one of both ends."""
        with self._lock:
            self._reap()
            answer = self._admit(place, uid, request)
            if "error" not in answer:
                self.state.clients[pid] = mpsrules.Client(
                    pid=pid, server=answer["server"], namespace=answer["namespace"], command=str(request["client"])
                )
                self._connections[pid] = connection
        connection.sendall(json.dumps(answer).encode() + b"\n")
        if "error" not in answer:
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass
            with self._lock:
                if self._connections.get(pid) is connection:
                    del self._connections[pid], self.state.clients[pid]

    def _admit(self, place: str, uid: int, request: Mapping[str, Any]) -> dict[str, Any]:
        parts = PurePosixPath(place).parts[:-1]
        if not self._setting.multiuser and uid != os.geteuid():
            return {"error": "CUDA_ERROR_NOT_PERMITTED"}
        if not parts:
            if not self.state.servers:
                self.legacy.run(os.geteuid(), f"start_server -uid {os.geteuid()}")
            parts = (next(iter(self.state.servers)),)
        server = self.state.servers.get(parts[0])
        if server is None or server.status != mpsrules.READY:
            return {"error": "CUDA_ERROR_MPS_SERVER_NOT_READY"}
        name = parts[1] if len(parts) > 1 else mpsrules.DEFAULT
        limits = server.namespaces[name]
        memory, threads = limits.memory, limits.threads
        if self._setting.protocol == 2:
            memory, threads = mpslegacy.own_limits(request.get("environment", {}))
        return {
            "server": server.name,
            "namespace": name,
            "devices": server.devices,
            "memory": None if memory is None else memory << 10,
            "threads": threads,
            "priority": limits.priority,
        }

    def _listen(self, place: str) -> None:
        """Listen on a socket below the pipe folder. Raises OSError."""
        path = self._setting.pipes / place
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            other.connect(str(path))
            raise OSError("An instance of this daemon is already running")
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        if self._setting.multiuser and self._setting.protocol == 2:
            path.chmod(0o666)
        listener.listen(64)
        self._sockets[place] = listener
        self._selector.register(listener, selectors.EVENT_READ, (place, listener))

    def _close(self, place: str) -> None:
        listener = self._sockets.pop(place, None)
        if listener is not None:
            self._selector.unregister(listener)
            listener.close()
            (self._setting.pipes / place).unlink(missing_ok=True)

    def _start_server(self, server: mpsrules.Server) -> int:
        for place in (f"{server.name}/{mpswire.SOCKET}", f"{server.name}/{mpsrules.DEFAULT}/{mpswire.SOCKET}"):
            self._listen(place)
        log = self._setting.log / server.name if self._setting.protocol == 3 else self._setting.log
        log.mkdir(parents=True, exist_ok=True)
        # With other devices than those that are visible to the daemon it has none.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        wanted = server.devices.split(",") if server.devices else visible
        known = set(self._setting.known())
        lives = all(device in known and device in visible for device in wanted)
        process = subprocess.Popen(
            [str(self._setting.server), "lives" if lives else "dies", str(log / "server.log")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes[server.name] = process
        threading.Thread(target=self._watch, args=(server, process), daemon=True).start()
        return process.pid

    def _watch(self, server: mpsrules.Server, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if process.stdout.readline():
            with self._lock:
                server.status = mpsrules.READY
        process.wait()
        with self._lock:
            if self._processes.get(server.name) is process:
                self._note(f"Server {process.pid} exited with status {process.returncode}")
                self._end_server(server.name)

    def _end_server(self, name: str) -> None:
        server = self.state.servers.pop(name, None)
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
        if server is not None:
            for client in [client for client in self.state.clients.values() if client.server == name]:
                self._terminate(client.pid)
            for namespace in server.namespaces:
                self._close_namespace(name, namespace)
            self._close(f"{name}/{mpswire.SOCKET}")

    def _open_namespace(self, server: str, name: str) -> None:
        try:
            self._listen(f"{server}/{name}/{mpswire.SOCKET}")
        except OSError as error:
            raise mpsrules.RefusedError(f"Namespace '{name}': {error}") from error

    def _close_namespace(self, server: str, name: str) -> None:
        self._close(f"{server}/{name}/{mpswire.SOCKET}")
        if self._setting.protocol == 3 and not self._quitting:
            shutil.rmtree(self._setting.pipes / server / name, ignore_errors=True)

    def _terminate(self, pid: int) -> None:
        self.state.clients.pop(pid, None)
        connection = self._connections.pop(pid, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _reap(self) -> None:
        """Notice servers that ended just now."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._end_server(name)

    def _forget(self) -> None:
        for server in self.state.servers.values():
            for name in [name for name in server.namespaces if name != mpsrules.DEFAULT]:
                self._close_namespace(server.name, name)
                del server.namespaces[name]
        self._setting.faults.unlink(missing_ok=True)

    def _limits(self) -> dict[tuple[str, str], tuple[int | None, float | None]]:
        return {
            (server.name, name): (limits.memory, limits.threads)
            for server in self.state.servers.values()
            for name, limits in server.namespaces.items()
        }

    def _restore(self, kept: Mapping[tuple[str, str], tuple[int | None, float | None]]) -> None:
        for (server, name), (memory, threads) in kept.items():
            if server in self.state.servers and name in self.state.servers[server].namespaces:
                limits = self.state.servers[server].namespaces[name]
                limits.memory, limits.threads = memory, threads

    def _faults(self) -> Sequence[str]:
        try:
            return self._setting.faults.read_text().split()
        except OSError:
            return ()

    def _note(self, text: str) -> None:
        assert self._journal is not None
        with contextlib.suppress(ValueError):
            self._journal.write(f"[{time.strftime('%F %T')} Control {os.getpid()}] {text}\n")
