# SPDX-License-Identifier: Apache-2.0
"""The stand-in API server as a process of its own, and what the benchmark asks of it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.bench import claims
from hack.bench.errors import BenchError

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = "/api/v1/nodes"
START_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEvent:
    """A watch event of a ResourceSlice. `at`: when it came, on the clock of time.perf_counter."""

    at: float
    kind: str
    slice: Mapping[str, Any]


class ApiServer:
    """Starts the server; a context manager. The methods are not for several threads."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.kubeconfig = directory / "kubeconfig"
        with (directory / "log").open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "driver.standin.apiserver", "--kubeconfig", str(self.kubeconfig)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        try:
            started = json.loads(line)
        except ValueError as error:
            self._popen.kill()
            raise BenchError(f"The stand-in API server did not start: {(directory / 'log').read_text()}") from error
        self.url: str = started["url"]
        self.token: str = started.get("token") or ""
        self._http = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._popen.terminate()
        self._popen.wait(timeout=START_TIMEOUT_S)
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=REQUEST_TIMEOUT_S)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; the decoded answer. BenchError where the server refuses."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        self._http.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = self._http.getresponse()
        content = response.read()
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise BenchError(f"{method} {path}: {response.status} {content[:500]!r}")
        answer: dict[str, Any] = json.loads(content or b"{}")
        return answer

    def create_node(self, name: str) -> None:
        """A Node, so that slices have an owner."""
        self.call("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    def create_claims(
        self,
        names: Iterable[str],
        *,
        driver: str,
        node: str,
        devices: Callable[[int], tuple[str, ...]],
        admin: bool = False,
    ) -> list[claims.Claim]:
        """Claims as the scheduler leaves them; the n-th is allocated the devices that `devices(n)` names."""
        made = []
        for index, name in enumerate(names):
            wanted = devices(index)
            stored = self.call("POST", claims.collection_path(), claims.body(name, count=len(wanted), admin=admin))
            claim = claims.Claim(uid=stored["metadata"]["uid"], name=name)
            self.call(
                "PUT",
                f"{claim.path}/status",
                claims.allocated(stored, driver=driver, node=node, devices=wanted, admin=admin),
            )
            made.append(claim)
        return made

    def delete_claims(self, unwanted: Iterable[claims.Claim]) -> None:
        """Claims whose pods are gone."""
        for claim in unwanted:
            self.call("DELETE", claim.path)

    def slices(self, *, node: str) -> list[dict[str, Any]]:
        """The slices of a node."""
        selector = urllib.parse.urlencode({"fieldSelector": f"spec.nodeName={node}"})
        items: list[dict[str, Any]] = self.call("GET", f"{SLICES}?{selector}")["items"]
        return items

    def writes(self) -> int:
        """How many writes it has taken since its start, of objects of any kind; dry ones are none."""
        return sum(self.call("GET", "/standin/counters")["writes"].values())

    def claim_reads(self) -> int:
        """How often a claim was read since its start."""
        return int(self.call("GET", "/standin/counters")["requests"].get("get resourceclaims", 0))

    def watch_slices(self) -> SliceWatch:
        """A watch of all slices from now on."""
        version = self.call("GET", SLICES)["metadata"]["resourceVersion"]
        connection = self._connect()
        query = urllib.parse.urlencode({"watch": "true", "resourceVersion": version, "timeoutSeconds": 3600})
        connection.request("GET", f"{SLICES}?{query}", headers={"Authorization": f"Bearer {self.token}"})
        stream = connection.sock
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise BenchError(f"watch of slices: {response.status} {response.read()[:500]!r}")
        stream.settimeout(None)
        return SliceWatch(connection, stream, response)


class SliceWatch:
    """The events of all slices, each with the time at which it came. A context manager."""

    def __init__(
        self, connection: http.client.HTTPConnection, stream: socket.socket, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._events: queue.SimpleQueue[SliceEvent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(response,), name="slices", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A close alone would wait for the reading thread, which waits for the server.
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        try:
            for line in response:
                at = time.perf_counter()
                event = json.loads(line)
                if event["type"] != "BOOKMARK":
                    self._events.put(SliceEvent(at=at, kind=event["type"], slice=event["object"]))
        except (OSError, ValueError, http.client.HTTPException):
            return

    def take(self) -> list[SliceEvent]:
        """What came since the last call, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def wait(self, wanted: Callable[[SliceEvent], bool], *, timeout_s: float) -> SliceEvent | None:
        """The next event that is wanted, those before it dropped; None when none comes in time."""
        deadline = time.perf_counter() + timeout_s
        while (left := deadline - time.perf_counter()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if wanted(event):
                return event
        return None
