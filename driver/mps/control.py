# SPDX-License-Identifier: Apache-2.0
"""Speaks to a control daemon by its program, in MPS v3 ("MPS v3 Interface") or in legacy MPS ("Legacy MPS v2 Interface").

What the program says it did is not relied on: limits are read back, and a server is looked for in the list of servers, as one whose
GPU is not there is accepted and then gone, and its clients would run without limits (NVIDIA, "Per-GPU Compute and Memory Limits
with MPS").
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import stat
import threading
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from driver.mps import running
from driver.mps.shares import SERVER, Share

SOCKET = "control"
"""In the pipe folder of a daemon, a server and a namespace."""

POLL_S = 0.1
COMMAND_S = 10.0
"""How long the daemon may take for one command; longer, and it hangs."""

_STARTING = frozenset({"initializing", "starting", "pending", "unknown", "-"})
_FAILED = frozenset({"fault", "failed", "error", "stopped", "exited", "dead"})
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+)(?:\.0+)?\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_PID = re.compile(r"[1-9][0-9]{0,9}")
_LISTED = 6
"""Columns of `namespace list` up to the priority: name, server, status, memory, threads, priority."""


class ControlError(Exception):
    """A command was refused, or did not do what it says. `hangs`: the daemon does not answer any more."""

    def __init__(self, message: str, *, hangs: bool = False) -> None:
        super().__init__(message)
        self.hangs = hangs


class ShareError(ControlError):
    """One share could not be had as wanted; the daemon is well."""


class Control(typing.Protocol):
    """The commands to one daemon with one server, which has one device. All raise ControlError."""

    def answers(self) -> None:
        """Nothing, if the daemon answers."""

    def serve(self, stop: threading.Event, *, timeout_s: float) -> None:
        """Start the server, and wait until it is ready for clients."""

    def place(self, share: Share) -> None:
        """Have a share. Idempotent; another one of this id takes its place."""

    def remove(self, share: Share) -> None:
        """Have a share gone, with its clients. Idempotent."""

    def check(self, shares: Iterable[Share]) -> int | None:
        """See that the server lives and has these shares as wanted; the number of clients, None where it does not tell."""

    def quit(self, *, timeout_s: float) -> bool:
        """Ask the daemon to end; whether it was reached."""


class Ask(typing.Protocol):
    """Runs the control program against the daemon."""

    def __call__(self, *arguments: str, given: str = "", timeout_s: float = COMMAND_S) -> running.Result:
        """Raises running.RunningError."""


def asked(ask: Ask, *arguments: str, given: str = "", timeout_s: float = COMMAND_S) -> running.Result:
    """What the control program did. Raises ControlError where it did not end in time."""
    try:
        return ask(*arguments, given=given, timeout_s=timeout_s)
    except running.RunningError as error:
        raise ControlError(f"{' '.join(arguments) or given.strip()}: {error}", hangs=True) from error


class V3:
    """MPS v3: a server of a fixed name, with a namespace for every share. `pipes` is the daemon's pipe folder."""

    def __init__(self, ask: Ask, *, uuid: str, pipes: Path) -> None:
        self._ask = ask
        self._uuid = uuid
        self._pipes = pipes

    def answers(self) -> None:
        """Nothing, if the daemon answers."""
        self._do("server", "list", "--format=csv,noheader")

    def serve(self, stop: threading.Event, *, timeout_s: float) -> None:
        """Create the server, and wait until it is ready: one whose device is not there is never."""
        self._do("server", "create", SERVER, f"--allowed-devices={self._uuid}")
        _until_ready(self._status, stop, timeout_s=timeout_s)

    def place(self, share: Share) -> None:
        """Have the namespace of a share with both its limits: it inherits none from the server, and it is created without any. Its
        folder may be in a container since a former life, so who connected before the limits were there is ended, and a namespace
        that does not take them is none.
        """
        name = share.namespace
        there = self._namespaces()
        if name in there and self._is_as_wanted(share):
            self._open(share)
            return
        known = name in there or self._folder(name).exists()
        if name in there and not self._can_become(share):
            self._delete(name)
            there = {}
        if name not in there:
            self._create(name)
        try:
            self._do("namespace", "set", name, f"--server={SERVER}", *_limits(share), of=share)
            self._compare(share)
            if known:
                self._end_clients(name)
            self._open(share)
        except ShareError:
            self._delete(name)
            raise

    def remove(self, share: Share) -> None:
        """End the clients of a share, and delete its namespace."""
        if share.namespace not in self._namespaces():
            return
        self._end_clients(share.namespace)
        self._delete(share.namespace)

    def check(self, shares: Iterable[Share]) -> int | None:
        """See that the server is listed and every namespace has the limits that it should have."""
        status = self._status()
        if status.casefold() in _FAILED:
            raise ControlError(f"its server is in state {status}")
        there = self._namespaces()
        for share in shares:
            row = there.get(share.namespace)
            if row is None:
                raise ShareError(f"share {share.share_id} is not there any more")
            if len(row) < _LISTED:
                continue
            if share.memory is not None:
                _same(share, "memory", row[3], _size(row[3]), _whole_mebibytes(share.memory))
            if share.compute is not None:
                _same(share, "compute", row[4], _percent(row[4]), float(share.compute))
        return len(self._clients())

    def quit(self, *, timeout_s: float) -> bool:
        """Quit the daemon and its server."""
        return asked(self._ask, "-q", timeout_s=timeout_s).status == 0

    def _status(self) -> str:
        """The state of the server. Raises ControlError where it is gone."""
        told = asked(self._ask, "server", "list", SERVER, "--format=csv,noheader")
        # Columns: name, uid, pid, status, ...
        found = next((row for row in _rows(told.out) if row[0] == SERVER and len(row) > 3), None)
        if found is None:
            raise ControlError(
                f"its server is gone ({told.words}): is {self._uuid} on this node, and not in use without MPS?"
            )
        return found[3]

    def _namespaces(self) -> Mapping[str, Sequence[str]]:
        rows = _rows(self._do("namespace", "list", f"--server={SERVER}", "--format=csv,noheader").out)
        return {row[0]: row for row in rows}

    def _clients(self) -> Sequence[str]:
        rows = _rows(self._do("client", "list", f"--server={SERVER}", "--format=csv,noheader").out)
        return tuple(dict.fromkeys(row[0] for row in rows if _PID.fullmatch(row[0])))

    def _end_clients(self, name: str) -> None:
        for pid in self._clients():
            told = asked(self._ask, "client", "get", pid, "maws-ns")
            if told.status == 0 and told.out.strip() == name:
                # One that ended by itself meanwhile is as good as terminated.
                asked(self._ask, "client", "terminate", pid)

    def _is_as_wanted(self, share: Share) -> bool:
        """Whether a namespace that is there has the limits of a share, and no others."""
        try:
            self._compare(share)
        except ShareError:
            return False
        return self._can_become(share)

    def _compare(self, share: Share) -> None:
        """Raises ShareError where the namespace of a share does not have its limits."""
        name = share.namespace
        if share.memory is not None:
            told = self._get(name, "pinned-memory-limit")
            _same(share, "memory", told, _size(told), _whole_mebibytes(share.memory))
        if share.compute is not None:
            told = self._get(name, "active-thread-percentage")
            _same(share, "compute", told, _percent(told), float(share.compute))
        told = self._get(name, "client-priority")
        _same(share, "priority", told, _PRIORITIES.get(told.casefold()), int(share.below_normal))

    def _can_become(self, share: Share) -> bool:
        """Whether `set` makes a namespace that is there what a share wants: it can change a limit, but not take one away."""
        for wanted, name, read in (
            (share.memory, "pinned-memory-limit", _size),
            (share.compute, "active-thread-percentage", _percent),
        ):
            if wanted is None and read(self._get(share.namespace, name)) not in (None, _WHOLE):
                return False
        return True

    def _create(self, name: str) -> None:
        told = asked(self._ask, "namespace", "create", name, f"--server={SERVER}")
        if told.status == 0:
            return
        # The folder of a former life is kept for those who have it mounted; a daemon that does not take it gets it empty.
        with contextlib.suppress(OSError):
            self._folder(name).rmdir()
        self._do("namespace", "create", name, f"--server={SERVER}")

    def _delete(self, name: str) -> None:
        self._do("namespace", "delete", name, f"--server={SERVER}", "--force")

    def _get(self, name: str, field: str) -> str:
        return self._do("namespace", "get", name, SERVER, field).out.strip()

    def _folder(self, name: str) -> Path:
        return self._pipes / SERVER / name

    def _open(self, share: Share) -> None:
        """See that the socket of a namespace lies where its container will look, and that every user may use it."""
        told = self._get(share.namespace, "pipe-directory")
        folder = self._folder(share.namespace)
        if Path(told) != folder:
            raise ShareError(f"the folder of share {share.share_id} is {told}, and not {folder}")
        try:
            socket = folder / SOCKET
            if not stat.S_ISSOCK(socket.lstat().st_mode):
                raise ShareError(f"{socket} is no socket")
            folder.chmod(0o755)
            socket.chmod(0o666)
        except OSError as error:
            raise ShareError(f"the socket of share {share.share_id} cannot be had: {error}") from error

    def _do(self, *arguments: str, of: Share | None = None) -> running.Result:
        told = asked(self._ask, *arguments)
        if told.status != 0:
            kind = ControlError if of is None else ShareError
            raise kind(f"{' '.join(arguments)}: {told.words}")
        return told


_WHOLE = 100.0
_PRIORITIES = {"0": 0, "normal": 0, "1": 1, "below normal": 1, "below_normal": 1, "belownormal": 1}


class Legacy:
    """Legacy MPS: the server has all shares, and their limits are those of each program, from its environment."""

    def __init__(self, ask: Ask, *, uid: int) -> None:
        self._ask = ask
        self._uid = uid

    def answers(self) -> None:
        """Nothing, if the daemon answers."""
        self._do("get_server_list")

    def serve(self, stop: threading.Event, *, timeout_s: float) -> None:
        """Start the server now and not with the first client, so that one that cannot start is seen."""
        self._do(f"start_server -uid {self._uid}")
        _until_ready(self._status, stop, timeout_s=timeout_s)

    def place(self, _share: Share) -> None:
        """There is nothing to be had for a share."""

    def remove(self, _share: Share) -> None:
        """Whose a client is is not known: those of a share end with their containers."""

    def check(self, _shares: Iterable[Share]) -> int | None:
        """See that the daemon answers. A server may be gone: the next client brings another."""
        clients = 0
        for server in self._servers():
            told = asked(self._ask, given=f"get_client_list {server}\n")
            if told.status != 0:
                return None
            clients += len(_pids(told.out))
        return clients

    def quit(self, *, timeout_s: float) -> bool:
        """Quit the daemon and its server."""
        return asked(self._ask, given="quit\n", timeout_s=timeout_s).status == 0

    def _status(self) -> str:
        servers = self._servers()
        if not servers:
            raise ControlError("its server is gone: is the device on this node, and not in use without MPS?")
        return self._do(f"get_server_status {servers[0]}").out.strip()

    def _servers(self) -> Sequence[str]:
        return _pids(self._do("get_server_list").out)

    def _do(self, command: str) -> running.Result:
        told = asked(self._ask, given=f"{command}\n")
        if told.status != 0:
            raise ControlError(f"{command}: {told.words}")
        return told


def _until_ready(status: Callable[[], str], stop: threading.Event, *, timeout_s: float) -> None:
    """Wait until a server is ready for clients. Raises ControlError when it is gone, has failed, or takes too long."""
    deadline = time.monotonic() + timeout_s
    while (state := status()).casefold() in _STARTING or not state:
        if time.monotonic() >= deadline:
            raise ControlError(f"its server is still {state or 'not there'} after {timeout_s:.0f} s")
        if stop.wait(POLL_S):
            raise ControlError("it is no longer wanted")
    if state.casefold() in _FAILED:
        raise ControlError(f"its server is in state {state}")


def _limits(share: Share) -> list[str]:
    options = [f"--client-priority={int(share.below_normal)}"]
    if share.memory is not None:
        options.append(f"--pinned-memory-limit={_whole_mebibytes(share.memory) >> 20}M")
    if share.compute is not None:
        options.append(f"--active-thread-percentage={share.compute}")
    return options


def _whole_mebibytes(memory: int) -> int:
    """The unit in which limits are given here; never more than the share has."""
    return memory >> 20 << 20


def _same(share: Share, what: str, told: str, read: float | None, wanted: float) -> None:
    if read != wanted:
        raise ShareError(f"the {what} of share {share.share_id} reads {told!r} after it was set to {wanted:.0f}")


def _size(text: str) -> int | None:
    """Bytes; None where it is no size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(match[1]) * _UNITS[match[2].upper()]


def _percent(text: str) -> float | None:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        return None
    return value if 0 < value <= _WHOLE else None


def _rows(text: str) -> list[list[str]]:
    try:
        return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row and row[0].strip()]
    except csv.Error as error:
        raise ControlError(f"a list that cannot be read: {error}") from error


def _pids(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in text.split() if _PID.fullmatch(word)))


def socket_path_fits(pipes: Path, namespace: str | None) -> bool:
    """Whether the sockets below a pipe folder have paths that the kernel takes (unix(7): 107 bytes)."""
    longest = pipes / SOCKET if namespace is None else pipes / SERVER / namespace / SOCKET
    return len(os.fsencode(longest)) <= 107
