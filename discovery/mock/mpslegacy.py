# SPDX-License-Identifier: Apache-2.0
"""The commands of legacy MPS in the stand-in: lines of an interactive shell, as NVIDIA's page "Legacy MPS v2 Interface" has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from discovery.mock import mpsrules

_SERVER = "legacy"
_STATUS = {mpsrules.INITIALIZING: "INITIALIZING", mpsrules.READY: "ACTIVE"}
_LIMIT = re.compile(r"[1-9][0-9]*[GM]")


class Legacy:
    """One server at a time, for one user."""

    def __init__(self, state: mpsrules.State) -> None:
        self._state = state
        self._threads = "100.0"
        self._limits: dict[str, str] = {}

    def run(self, uid: int, line: str) -> str:
        """Do one command of a user. Raises RefusedError."""
        words = line.split()
        command, arguments = (words[0], words[1:]) if words else ("", [])
        servers = list(self._state.servers.values())
        match command, arguments:
            case "get_server_list", []:
                return "".join(f"{server.pid}\n" for server in servers)
            case "start_server", ["-uid", owner]:
                if servers:
                    raise mpsrules.RefusedError("A server is already running")
                if self._state.multiuser and owner != "0":
                    raise mpsrules.RefusedError("In multi-user mode the server belongs to root")
                server = mpsrules.Server(name=_SERVER, uid=int(owner), pid=0, devices=None)
                self._state.servers[_SERVER] = server
                server.pid = self._state.start_server(server)
                return ""
            case "get_server_status", [pid]:
                return next(f"{_STATUS[server.status]}\n" for server in self._server(pid))
            case "get_client_list", [pid]:
                self._server(pid)
                return "".join(f"{client}\n" for client in self._state.clients)
            case "terminate_client", [pid, client]:
                self._server(pid)
                self._state.terminate(int(client))
                return ""
            case "set_default_active_thread_percentage", [percentage]:
                self._threads = f"{float(percentage):.1f}"
                return f"{self._threads}\n"
            case "get_default_active_thread_percentage", []:
                return f"{self._threads}\n"
            case "set_default_device_pinned_mem_limit", [device, value]:
                if _LIMIT.fullmatch(value) is None:
                    raise mpsrules.RefusedError(f"Invalid limit {value}")
                self._limits[device] = value
                return ""
            case "get_default_device_pinned_mem_limit", [device]:
                return f"{self._limits.get(device, 'no limit')}\n"
            case _:
                raise mpsrules.RefusedError(f"Unknown command {line!r} of user {uid}")

    def _server(self, pid: str) -> list[mpsrules.Server]:
        found = [server for server in self._state.servers.values() if str(server.pid) == pid]
        if not found:
            raise mpsrules.RefusedError(f"Server {pid} not found")
        return found


def own_limits(environment: Mapping[str, str]) -> tuple[int | None, float | None]:
    """The limits that a client puts on itself, memory in KiB: those of its environment."""
    memory = environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").rpartition("=")[2]
    threads = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    return (mpsrules.parse_limit(memory) if memory else None, float(threads) if threads else None)
