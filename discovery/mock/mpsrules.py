# SPDX-License-Identifier: Apache-2.0
"""What the stand-in of nvidia-cuda-mps-control accepts and what it says, in MPS v3: the modules `server`, `namespace` and `client` of NVIDIA's page "MPS v3 Interface". It refuses what that page refuses. Pure: servers and clients are values here, and
mpsdaemon.py has the processes and sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

DEFAULT = "default"
READY = "Ready"
INITIALIZING = "Initializing"
POSITIONAL_MAX = 3
UNSET = "-"

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_LIMIT = re.compile(r"([1-9][0-9]{0,11})([GMK])")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PERCENT_MAX = 100.0


class RefusedError(Exception):
    """A command that is refused; the text is what the program says."""


@dataclass(slots=True, kw_only=True)
class Namespace:
    """The limits of a group of clients; None: none. `memory` in KiB."""

    memory: int | None = None
    threads: float | None = None
    priority: int = 0


@dataclass(slots=True, kw_only=True)
class Server:
    """A server. `devices` as it was told; None: all."""

    name: str
    uid: int
    pid: int
    devices: str | None
    status: str = INITIALIZING
    namespaces: dict[str, Namespace] = field(default_factory=lambda: {DEFAULT: Namespace()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A connected program."""

    pid: int
    server: str
    namespace: str
    command: str


@dataclass(slots=True, kw_only=True)
class State:
    """What a daemon has. `start` and `end` are the processes and sockets behind a server and a namespace."""

    pipes: PurePosixPath
    multiuser: bool
    start_server: Callable[[Server], int]
    end_server: Callable[[str], None]
    open_namespace: Callable[[str, str], None]
    close_namespace: Callable[[str, str], None]
    terminate: Callable[[int], None]
    servers: dict[str, Server] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of a command."""

    positional: tuple[str, ...]
    options: Mapping[str, str]
    flags: frozenset[str]

    def only(self, options: str = "", flags: str = "", *, least: int = 0, most: int = 0) -> None:
        """Refuse what a command does not know."""
        for name in (*self.options, *self.flags):
            if name not in (*options.split(), *flags.split()):
                raise RefusedError(f"Unknown option --{name}")
        for name in self.flags:
            if name not in flags.split():
                raise RefusedError(f"Option --{name} needs a value")
        if not least <= len(self.positional) <= most:
            raise RefusedError(f"{len(self.positional)} arguments where {least} to {most} are taken")


def run(state: State, uid: int, arguments: Sequence[str]) -> str:
    """Do a command of a user; what it prints. Raises RefusedError."""
    if len(arguments) < 2:
        raise RefusedError("A command has a module and a verb")
    module, verb = arguments[:2]
    done = _COMMANDS.get((module, verb))
    if done is None:
        raise RefusedError(f"Unknown command '{module} {verb}'")
    return done(state, uid, _read(arguments[2:]))


def _read(arguments: Sequence[str]) -> _Given:
    positional: list[str] = []
    options: dict[str, str] = {}
    flags: set[str] = set()
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if equals:
            options[name] = value
        elif argument.startswith("--"):
            flags.add(name)
        else:
            positional.append(argument)
    if len(positional) > POSITIONAL_MAX:
        raise RefusedError(f"More than {POSITIONAL_MAX} positional arguments")
    return _Given(tuple(positional), options, frozenset(flags))


def _server_create(state: State, uid: int, given: _Given) -> str:
    given.only("uid allowed-devices locality-domains", most=1)
    owner = _uid(given.options.get("uid", str(uid)))
    if not given.positional and "uid" not in given.options:
        raise RefusedError("Either a name or --uid must be provided")
    if state.multiuser and owner != 0:
        raise RefusedError("In multiuser mode only --uid=0 is allowed")
    name = _name(given.positional[0] if given.positional else f"uid_{owner}", "server")
    if name in state.servers:
        raise RefusedError(f"Server '{name}' already exists")
    server = Server(name=name, uid=owner, pid=0, devices=given.options.get("allowed-devices"))
    state.servers[name] = server
    server.pid = state.start_server(server)
    return ""


def _server_delete(state: State, _uid: int, given: _Given) -> str:
    given.only("", "force", least=1, most=1)
    server = _server(state, given.positional[0])
    there = [client for client in state.clients.values() if client.server == server.name]
    if there and "force" not in given.flags:
        raise RefusedError(f"Server '{server.name}' has active clients")
    for client in there:
        state.terminate(client.pid)
    state.end_server(server.name)
    return ""


def _server_list(state: State, _uid: int, given: _Given) -> str:
    given.only("format", most=1)
    wanted = given.positional[0] if given.positional else None
    rows = [
        (server.name, *(_server_field(state, server, name) for name in _SERVER_FIELDS[1:]), UNSET)
        for server in state.servers.values()
        if wanted in (None, server.name)
    ]
    return _table((*_SERVER_FIELDS, "context-ids"), rows, given)


def _server_set(state: State, _uid: int, given: _Given) -> str:
    given.only("uid pinned-memory-limit active-thread-percentage locality-domains client-priority", least=1, most=1)
    _change(_server(state, given.positional[0]).namespaces[DEFAULT], given)
    return ""


def _server_get(state: State, _uid: int, given: _Given) -> str:
    given.only(least=2, most=2)
    name, wanted = given.positional
    if wanted not in _SERVER_FIELDS:
        raise RefusedError(f"Unknown field '{wanted}'")
    return f"{_server_field(state, _server(state, name), wanted)}\n"


def _namespace_create(state: State, _uid: int, given: _Given) -> str:
    given.only("server", least=1, most=1)
    server, name = _server(state, given.options.get("server")), _name(given.positional[0], "namespace")
    if name in server.namespaces:
        raise RefusedError(f"Namespace '{name}' already exists")
    state.open_namespace(server.name, name)
    server.namespaces[name] = Namespace()
    return ""


def _namespace_delete(state: State, _uid: int, given: _Given) -> str:
    given.only("server", "force", least=1, most=1)
    server = _server(state, given.options.get("server"))
    name = given.positional[0]
    _namespace(server, name)
    if name == DEFAULT:
        raise RefusedError("The default namespace cannot be deleted")
    in_use = any((client.server, client.namespace) == (server.name, name) for client in state.clients.values())
    if in_use and "force" not in given.flags:
        raise RefusedError(f"Namespace '{name}' has active clients")
    state.close_namespace(server.name, name)
    del server.namespaces[name]
    return ""


def _namespace_list(state: State, _uid: int, given: _Given) -> str:
    given.only("server format", most=1)
    wanted = given.positional[0] if given.positional else None
    chosen = [_server(state, given.options["server"])] if "server" in given.options else list(state.servers.values())
    rows = [
        tuple(_namespace_field(state, server, name, column) for column in _NAMESPACE_FIELDS)
        for server in chosen
        for name in server.namespaces
        if wanted in (None, name)
    ]
    return _table(_NAMESPACE_FIELDS, rows, given)


def _namespace_set(state: State, _uid: int, given: _Given) -> str:
    given.only("server pinned-memory-limit active-thread-percentage client-priority", least=1, most=1)
    _change(_namespace(_server(state, given.options.get("server")), given.positional[0]), given)
    return ""


def _namespace_get(state: State, _uid: int, given: _Given) -> str:
    given.only(least=3, most=3)
    name, server, wanted = given.positional
    if wanted not in _NAMESPACE_FIELDS:
        raise RefusedError(f"Unknown field '{wanted}'")
    found = _server(state, server)
    _namespace(found, name)
    return f"{_namespace_field(state, found, name, wanted)}\n"


def _client_list(state: State, _uid: int, given: _Given) -> str:
    given.only("server format", "all", most=0)
    wanted = _server(state, given.options["server"]).name if "server" in given.options else None
    rows = [
        (str(client.pid), client.server, "0", client.namespace, client.command)
        for client in state.clients.values()
        if wanted in (None, client.server)
    ]
    return _table(("pid", "server", "device", "namespace", "command"), rows, given)


def _client_get(state: State, _uid: int, given: _Given) -> str:
    given.only(least=2, most=2)
    client = _client(state, given.positional[0])
    fields = {
        "pid": str(client.pid),
        "server": client.server,
        "device": "0",
        "maws-ns": client.namespace,
        "cmd": client.command,
    }
    if given.positional[1] not in fields:
        raise RefusedError(f"Unknown field '{given.positional[1]}'")
    return f"{fields[given.positional[1]]}\n"


def _client_terminate(state: State, _uid: int, given: _Given) -> str:
    given.only(least=1, most=1)
    state.terminate(_client(state, given.positional[0]).pid)
    return ""


_COMMANDS: Mapping[tuple[str, str], Callable[[State, int, _Given], str]] = {
    ("server", "create"): _server_create,
    ("server", "delete"): _server_delete,
    ("server", "list"): _server_list,
    ("server", "set"): _server_set,
    ("server", "get"): _server_get,
    ("namespace", "create"): _namespace_create,
    ("namespace", "delete"): _namespace_delete,
    ("namespace", "list"): _namespace_list,
    ("namespace", "set"): _namespace_set,
    ("namespace", "get"): _namespace_get,
    ("client", "list"): _client_list,
    ("client", "get"): _client_get,
    ("client", "terminate"): _client_terminate,
}

_SERVER_FIELDS = ("name", "uid", "pid", "status", "pipe-directory", "allowed-devices")
_NAMESPACE_FIELDS = (
    "name",
    "server",
    "server-status",
    "pinned-memory-limit",
    "active-thread-percentage",
    "client-priority",
    "pipe-directory",
)


def _server_field(state: State, server: Server, name: str) -> str:
    return {
        "name": server.name,
        "uid": str(server.uid),
        "pid": str(server.pid),
        "status": server.status,
        "pipe-directory": str(state.pipes / server.name),
        "allowed-devices": server.devices or UNSET,
    }[name]


def _namespace_field(state: State, server: Server, name: str, column: str) -> str:
    limits = server.namespaces[name]
    return {
        "name": name,
        "server": server.name,
        "server-status": server.status,
        "pinned-memory-limit": _shown(limits.memory),
        "active-thread-percentage": UNSET if limits.threads is None else f"{limits.threads:.2f}",
        "client-priority": str(limits.priority),
        "pipe-directory": str(state.pipes / server.name / name),
    }[column]


def _shown(memory: int | None) -> str:
    """A limit in its largest unit, as the documents show it."""
    if memory is None:
        return UNSET
    for unit in "GM":
        if memory << 10 >= _UNITS[unit] and (memory << 10) % _UNITS[unit] == 0:
            return f"{(memory << 10) // _UNITS[unit]}{unit}"
    return f"{memory}K"


def _change(limits: Namespace, given: _Given) -> None:
    """Set limits, all or none."""
    if not given.options.keys() - {"server"}:
        raise RefusedError("At least one option is required")
    memory, threads, priority = limits.memory, limits.threads, limits.priority
    for name, value in given.options.items():
        if name == "pinned-memory-limit":
            memory = parse_limit(value)
        elif name == "active-thread-percentage":
            threads = _threads(value)
        elif name == "client-priority":
            if value not in ("0", "1"):
                raise RefusedError(f"Invalid client priority '{value}'")
            priority = int(value)
    limits.memory, limits.threads, limits.priority = memory, threads, priority


def parse_limit(text: str) -> int:
    """A limit of memory in KiB. Raises RefusedError."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise RefusedError(f"Invalid memory limit '{text}'")
    return int(match[1]) * _UNITS[match[2]] >> 10


def _threads(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= _PERCENT_MAX:
        raise RefusedError(f"Invalid active thread percentage '{text}'")
    return value


def _uid(text: str) -> int:
    if not text.isdecimal():
        raise RefusedError(f"Invalid uid '{text}'")
    return int(text)


def _name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise RefusedError(f"Invalid {what} name '{text}'")
    return text


def _server(state: State, name: str | None) -> Server:
    if name is None:
        raise RefusedError("--server is required")
    if name not in state.servers:
        raise RefusedError(f"Server '{name}' not found")
    return state.servers[name]


def _namespace(server: Server, name: str) -> Namespace:
    if name not in server.namespaces:
        raise RefusedError(f"Namespace '{name}' not found on server '{server.name}'")
    return server.namespaces[name]


def _client(state: State, pid: str) -> Client:
    client = state.clients.get(int(pid)) if pid.isdecimal() else None
    if client is None:
        raise RefusedError(f"Client {pid} not found")
    return client


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], given: _Given) -> str:
    form, _, rest = given.options.get("format", "table").partition(",")
    if form not in ("table", "csv") or rest not in ("", "noheader"):
        raise RefusedError(f"Invalid format '{given.options['format']}'")
    shown = list(rows) if rest else [columns if form == "csv" else [name.upper() for name in columns], *rows]
    separator = "," if form == "csv" else "  "
    return "".join(f"{separator.join(row)}\n" for row in shown)
