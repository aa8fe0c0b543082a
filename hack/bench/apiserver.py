# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of an API server, over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.bench import claims
from hack.bench.errors import BenchError

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = "/api/v1/nodes"
REQUEST_TIMEOUT_S = 60.0
STALE = (ConnectionError, ssl.SSLEOFError)
"""What a request meets on a connection that the server has closed; http.client.RemoteDisconnected is among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A watch event. `at`: when it came, on the clock of time.perf_counter."""

    at: float
    kind: str
    object: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an API server is, and what it knows us by. `authority`: who signed its certificate."""

    url: str
    token: str = field(repr=False)
    authority: Path | None = None

    def connect(self, *, timeout_s: float) -> http.client.HTTPConnection:
        """A connection of its own, opened by its first request."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
        context = ssl.create_default_context(cafile=self.authority)
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)


class ApiServer:
    """An API server, as its administrator. A context manager; the methods are not for several threads.

    `holder`: the pod that claims are reserved for.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.holder = claims.NOBODY
        self._http = address.connect(timeout_s=REQUEST_TIMEOUT_S)
        self._headers = {"Authorization": f"Bearer {address.token}", "User-Agent": "bench"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._http.close()

    def get(self, path: str) -> bytes:
        """The body of a GET. BenchError where the server refuses."""
        return self._ask("GET", path, None)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; the decoded answer. BenchError where the server refuses."""
        answer: dict[str, Any] = json.loads(self._ask(method, path, body) or b"{}")
        return answer

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        sent = None if body is None else json.dumps(body)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {**self._headers, "Content-Type": kind}
        try:
            status, content = self._exchange(method, path, sent, headers)
        except STALE:
            # A server ends a connection that is idle for long; the next request opens another.
            self._http.close()
            status, content = self._exchange(method, path, sent, headers)
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise BenchError(f"{method} {path}: {status} {content[:500]!r}")
        return content

    def _exchange(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self._http.request(method, path, body=body, headers=headers)
            response = self._http.getresponse()
            return response.status, response.read()
        except BaseException:
            self._http.close()  # one that was left in the middle takes no other request
            raise

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
        share: Mapping[str, str] | None = None,
    ) -> list[claims.Claim]:
        """Claims as the scheduler leaves them; the n-th is allocated the devices that `devices(n)` names, or a share of each that
        takes so much of its capacities.
        """
        made = []
        for index, name in enumerate(names):
            wanted = devices(index)
            stored = self.call("POST", claims.collection_path(), claims.body(name, count=len(wanted), admin=admin))
            claim = claims.Claim(uid=stored["metadata"]["uid"], name=name)
            self.call(
                "PUT",
                f"{claim.path}/status",
                claims.allocated(
                    stored, driver=driver, node=node, devices=wanted, admin=admin, share=share, holder=self.holder
                ),
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

    def watch_slices(self, *, node: str) -> Watch:
        """A watch of the slices of a node from now on."""
        return self.watch(SLICES, fieldSelector=f"spec.nodeName={node}")

    def watch(self, collection: str, **selectors: str) -> Watch:
        """A watch of a collection from now on."""
        version = self.call("GET", f"{collection}?limit=1")["metadata"]["resourceVersion"]
        connection = self.address.connect(timeout_s=REQUEST_TIMEOUT_S)
        query = urllib.parse.urlencode(
            {"watch": "true", "resourceVersion": version, "timeoutSeconds": 3600, **selectors}
        )
        connection.request("GET", f"{collection}?{query}", headers=self._headers)
        stream = connection.sock
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise BenchError(f"watch of {collection}: {response.status} {response.read()[:500]!r}")
        stream.settimeout(None)
        return Watch(connection, stream, response)


class Watch:
    """The events of a collection, each with the time at which it came. A context manager."""

    def __init__(
        self, connection: http.client.HTTPConnection, stream: socket.socket, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(response,), name="watch", daemon=True)
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
                    self._events.put(Event(at=at, kind=event["type"], object=event["object"]))
        except (OSError, ValueError, http.client.HTTPException):
            return

    def take(self) -> list[Event]:
        """What came since the last call, without waiting."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def wait(self, wanted: Callable[[Event], bool], *, timeout_s: float) -> Event | None:
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
