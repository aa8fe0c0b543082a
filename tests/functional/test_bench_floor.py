# SPDX-License-Identifier: Apache-2.0
"""The floor of the benchmark, on a real socket, a real connection, a real database and real files.

- every step does its work: the claim is read on one connection, the row is in the database, the spec is in its file
- a claim that cannot be read is said; the server process ends with its context
"""

from __future__ import annotations

import http.server
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hack.bench import apiserver, floor
from hack.bench.errors import BenchError


class _Claims(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    connections: ClassVar[set[tuple[str, int]]] = set()

    def do_GET(self) -> None:
        self.connections.add(self.client_address)
        body = b'{"kind": "ResourceClaim"}' if self.path == "/claim" else b"{}"
        self.send_response(200 if self.path == "/claim" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Claims.connections.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Claims) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def directory() -> Iterator[Path]:
    short = Path(tempfile.mkdtemp(prefix="nff-"))
    yield short / "floor"
    shutil.rmtree(short)


def test_every_step_does_its_work(url: str, directory: Path) -> None:
    with floor.Floor(directory, apiserver.Address(url=url, token="t")) as the_floor:
        taken = [the_floor.run("/claim") for _ in range(70)]
    for steps in taken:
        assert min(steps.rpc, steps.get, steps.commit, steps.file) > 0
        assert steps.total == pytest.approx(steps.rpc + steps.get + steps.commit + steps.file)
    assert len(_Claims.connections) == 1
    assert len(list(directory.glob("spec-*.json"))) == 64
    assert list(directory.glob("*.tmp")) == []
    with sqlite3.connect(directory / "floor.sqlite") as database:
        assert database.execute("SELECT count(*) FROM claims").fetchone() == (64,)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_a_claim_that_cannot_be_read_is_said(url: str, directory: Path) -> None:
    with (
        floor.Floor(directory, apiserver.Address(url=url, token="t")) as the_floor,
        pytest.raises(BenchError, match="GET /other: 404"),
    ):
        the_floor.run("/other")
