# SPDX-License-Identifier: Apache-2.0
"""The floor: what a Prepare cannot do without, in the plainest Python, done step by step. FROZEN: never change what a step
does, or figures of before and after cannot be compared.

1. `rpc`: an empty call to a grpcio server of a process of its own, on a unix socket. Kubelet speaks gRPC.
2. `get`: GET of the claim with http.client on a kept connection, and its JSON decoded. Kubelet sends only the claim's name.
3. `commit`: one row into SQLite (WAL, synchronous=FULL). The answer must be on the disk before it is given.
4. `file`: the CDI spec written to a temporary name, fsync, rename. The container runtime must never see half of it.

A driver may beat the sum by doing steps side by side. `python -m hack.bench.floor SOCKET` is the server of step 1; its
parent ends it by closing its standard input.
"""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from hack.bench import apiserver
from hack.bench.errors import BenchError

METHOD = "/floor.Floor/Nothing"
SERVER_THREADS = 16
START_TIMEOUT_S = 20.0
RPC_TIMEOUT_S = 10.0

CDI_SPEC_BYTES = 1500
"""The size of a claim's CDI spec with the record in its annotation."""

ROW_BYTES = 600
"""The size of a claim's row in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of each step, done one after the other."""

    rpc: float
    get: float
    commit: float
    file: float

    @property
    def total(self) -> float:
        """The floor."""
        return self.rpc + self.get + self.commit + self.file


class Floor:
    """Does the steps. A context manager; not for several threads."""

    def __init__(self, directory: Path, address: apiserver.Address) -> None:
        directory.mkdir()
        socket = directory / "floor.sock"
        self._server = subprocess.Popen([sys.executable, "-m", __name__, str(socket)], stdin=subprocess.PIPE)
        pauses = [(f"grpc.{kind}_reconnect_backoff_ms", 20) for kind in ("initial", "min", "max")]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=pauses)
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(METHOD)
        self._http = address.connect(timeout_s=RPC_TIMEOUT_S)
        self._headers = {"Authorization": f"Bearer {address.token}", "Accept": "application/json"}
        self._database = sqlite3.connect(directory / "floor.sqlite", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE claims (uid TEXT PRIMARY KEY, row TEXT)")
        self._directory = directory
        self._count = 0
        try:
            self._call(b"", timeout=START_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            self.close()
            raise BenchError(f"The server of the floor did not start: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and close what is open."""
        self._channel.close()
        self._http.close()
        self._database.close()
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server.wait(timeout=START_TIMEOUT_S)

    def run(self, claim_path: str) -> Steps:
        """All steps once, for the claim of this API path. Rows and files never grow in number beyond 64."""
        self._count += 1
        slot = self._count % 64
        began = time.perf_counter()
        self._call(b"", timeout=RPC_TIMEOUT_S)
        called = time.perf_counter()
        self._get(claim_path)
        got = time.perf_counter()
        self._database.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (str(slot), "x" * ROW_BYTES))
        committed = time.perf_counter()
        self._write(self._directory / f"spec-{slot}.json", b"x" * CDI_SPEC_BYTES)
        written = time.perf_counter()
        return Steps(rpc=called - began, get=got - called, commit=committed - got, file=written - committed)

    def _get(self, path: str) -> None:
        try:
            self._http.request("GET", path, headers=self._headers)
            response = self._http.getresponse()
        except apiserver.STALE:
            # A server ends a connection that nobody used while claims were prepared; that turn is one of the warm-up.
            self._http.close()
            self._http.request("GET", path, headers=self._headers)
            response = self._http.getresponse()
        body = response.read()
        if response.status != http.HTTPStatus.OK:
            raise BenchError(f"GET {path}: {response.status} {body[:200]!r}")
        json.loads(body)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)


def _nothing(request: bytes, _: grpc.ServicerContext) -> bytes:
    return request


def _serve(socket: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=SERVER_THREADS))
    service, method = METHOD.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_nothing)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    sys.stdin.read()
    server.stop(grace=None).wait()


if __name__ == "__main__":
    _serve(sys.argv[1])
