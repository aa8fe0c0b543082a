# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Kubernetes API server: ResourceSlices, ResourceClaims, Nodes and Events over real HTTP.

For the demo, the tests and the benchmark, so that they need no cluster. It is made to behave as the real one does where a
DRA driver could notice: validation, dropped fields by version, defaults, resource versions, watches with bookmarks and
410, conflicts, preconditions, dry runs. It does not allocate claims, collect garbage by itself or check permissions.

In process: `with ApiServer() as server: ...`. As a process of its own: `python -m driver.standin.apiserver --help`.
"""

from __future__ import annotations

import argparse
import base64
import copy
import datetime as dt
import json
import random
import secrets
import signal
import ssl
import sys
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from driver import bell
from driver.standin import apiserver_api as api
from driver.standin import apiserver_faults as faults
from driver.standin import apiserver_gates as gates
from driver.standin import apiserver_http as http
from driver.standin import apiserver_lists as lists
from driver.standin import apiserver_resources as resources
from driver.standin import apiserver_routes as routes
from driver.standin import apiserver_status as status
from driver.standin import apiserver_store as store
from driver.standin import apiserver_watch as watch

Body = resources.Body

BOOKMARK_INTERVAL_S = 60.0
"""The real server's."""

REFUSALS = 3
"""How many calls a server that was started again refuses."""

_CALLS_KEPT = 100_000
_WATCH_TIMEOUT_S = (1800.0, 3600.0)
"""Without timeoutSeconds the real server ends a watch at a random moment of this span (--min-request-timeout)."""

_PATCH_TYPES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files of the server's certificate, its key, and the authority behind it."""

    certificate: Path
    key: Path
    authority: Path
    clients_too: bool = False
    """Whether clients must show a certificate of the same authority."""

    def context(self) -> ssl.SSLContext:
        """For the listening side."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority)
        context.load_cert_chain(self.certificate, self.key)
        if self.clients_too:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ApiServer:
    """One server with its own store. After `stop`, `start` serves the same objects on the same port again.

    Then it refuses the first calls as forbidden, whoever makes them: a real one serves before it has read what RBAC allows.
    """

    def __init__(
        self,
        *,
        version: str = gates.VERSIONS[-1],
        feature_gates: Mapping[str, bool] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: Tls | None = None,
        bookmark_interval_s: float = BOOKMARK_INTERVAL_S,
        clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        """`token`: None for a random one. `tls`: None for plain HTTP."""
        self.version = version
        self.token = token if token is not None else secrets.token_hex(24)
        self.faults = faults.Faults()
        self.calls: deque[faults.ApiCall] = deque(maxlen=_CALLS_KEPT)
        """What was asked, in order, refused calls included."""
        self._gates = gates.gates(version, feature_gates or {})
        self._store = store.Store()
        self._verbs = api.Verbs(self._store, self._gates, clock)
        self._bookmark_interval_s = bookmark_interval_s
        self._lists = lists.Lists(self._store)
        self._counts: Counter[tuple[str, str, bool]] = Counter()
        self._lock = threading.Lock()
        self._running = False
        self._refusals = 0
        self._tls = tls
        self._http = http.HttpServer(self._answer, host=host, port=port, tls=tls.context() if tls is not None else None)
        self._host = host

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.stop()
        self._http.close()

    def start(self) -> None:
        """Serve; the port is known when this returns."""
        self._running = True
        self.faults.hold(open_again=True)
        self._http.start()

    def stop(self) -> None:
        """Break every connection and stop listening, as a crash would. The objects stay."""
        self._running = False
        self._refusals = REFUSALS
        self.faults.hold(open_again=False)
        self._store.wake()
        self._http.stop()

    def learn_rights(self) -> None:
        """Know who may do what from now on."""
        self._refusals = 0

    def turn(self, gate: str, *, on: bool) -> None:
        """Turn a feature gate on or off, as a restart of the server with another configuration would."""
        self._gates[gate] = gates.gates(self.version, {gate: on})[gate]

    @property
    def url(self) -> str:
        """Where it serves."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls is not None else 'http'}://{host}:{self._http.port}"

    def write_kubeconfig(self, path: Path) -> Path:
        """A kubeconfig that leads here."""
        cluster: dict[str, Any] = {"server": self.url}
        if self._tls is not None:
            cluster["certificate-authority-data"] = base64.b64encode(self._tls.authority.read_bytes()).decode()
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "standin", "cluster": cluster}],
            "users": [{"name": "standin", "user": {"token": self.token}}],
            "contexts": [{"name": "standin", "context": {"cluster": "standin", "user": "standin"}}],
            "current-context": "standin",
        }
        # JSON is YAML.
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return path

    def seed(self, plural: str, body: Body) -> Body:
        """Store an object as it is, status included, unchecked and in place of one of the same name."""
        resource = resources.RESOURCES[plural]
        seeded = copy.deepcopy(body)
        seeded.update(kind=resource.kind, apiVersion=resource.api_version)
        seeded["metadata"].setdefault("uid", str(uuid.uuid4()))
        if resource.namespaced:
            seeded["metadata"].setdefault("namespace", "default")
        stored = self._store.transact(plural, resources.key_of(resource, seeded), lambda _before: seeded)
        assert stored is not None
        return copy.deepcopy(stored.body)

    def objects(self, plural: str) -> list[Body]:
        """Copies of all objects of a resource, in order of name."""
        return [copy.deepcopy(stored.body) for _, stored in self._store.items(plural)[1]]

    def edit(self, plural: str, key: str, change: Callable[[Body], None]) -> None:
        """Change a stored object as another client would, without any check."""

        def step(before: store.Stored | None) -> Body:
            if before is None:
                raise KeyError(key)
            body = copy.deepcopy(before.body)
            change(body)
            return body

        self._store.transact(plural, key, step)

    def remove(self, plural: str, key: str) -> None:
        """Delete a stored object as another client would."""
        self._store.transact(plural, key, lambda _before: None)

    def collect_garbage(self) -> int:
        """Delete every object whose owner has gone (by UID), as the garbage collector does; how many."""
        everything = [
            (plural, key, stored) for plural in resources.RESOURCES for key, stored in self._store.items(plural)[1]
        ]
        uids = {stored.body["metadata"].get("uid") for _, _, stored in everything}
        orphans = [
            (plural, key)
            for plural, key, stored in everything
            if (owners := stored.body["metadata"].get("ownerReferences"))
            and not any(owner["uid"] in uids for owner in owners)
        ]
        for plural, key in orphans:
            self.remove(plural, key)
        return len(orphans)

    def compact(self, plural: str) -> None:
        """Forget the history of a resource: watches get 410."""
        self._store.compact(plural)

    def cut(self) -> None:
        """Break every connection, but go on serving."""
        self._http.cut()

    def writes(self, plural: str) -> int:
        """Stored changes of a resource: neither dry runs nor updates that changed nothing."""
        return self._store.writes(plural)

    def count(self, verb: str, plural: str, *, dry_run: bool = False) -> int:
        """How often something was asked."""
        with self._lock:
            return self._counts[verb, plural, dry_run]

    def _answer(self, request: http.HttpRequest, channel: http.Channel) -> http.Answer | None:
        try:
            return self._handle(request, channel)
        except status.StatusError as error:
            retry = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
            return http.Answer(error.code, store.encode(error.body()), headers=retry)

    def _handle(self, request: http.HttpRequest, channel: http.Channel) -> http.Answer | None:
        if request.path in {"/healthz", "/livez", "/readyz"}:
            return http.Answer(200, b"ok", "text/plain")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(token.strip().encode(), self.token.encode()):
            raise status.unauthorized()
        if request.path == "/standin/counters":
            return _json(self._counters())
        where = routes.route(request.path)
        if where is None:
            document = routes.discovery(request.path, self.version) if request.method == "GET" else None
            if document is None:
                raise status.no_such_path()
            return _json(document)
        call = self._understand(request, where)
        if self._refusals > 0:
            self._refusals -= 1
            raise status.forbidden(call.verb, where.resource.group_resource, where.name)
        effects = self.faults.strike(call)
        answer = self._do(call, where, request, channel, effects)
        self.faults.finish(effects)
        return answer

    def _understand(self, request: http.HttpRequest, where: routes.Route) -> faults.ApiCall:
        watching = request.query.get("watch") in {"1", "true"}
        verbs = {
            "GET": "watch" if watching else "get" if where.name else "list",
            "POST": "create" if not where.name else "",
            "PUT": "update" if where.name else "",
            "PATCH": "patch" if where.name else "",
            "DELETE": "delete" if where.name else "deletecollection",
        }
        verb = verbs.get(request.method, "")
        if not verb:
            raise status.method_not_allowed()
        dry_run = request.query.get("dryRun")
        if dry_run not in (None, "All"):
            raise status.bad_request(f'invalid dryRun: Unsupported value: "{dry_run}": supported values: "All"')
        call = faults.ApiCall(
            verb, where.resource.plural, where.namespace, where.name, where.subresource, dry_run is not None
        )
        self.calls.append(call)
        with self._lock:
            self._counts[verb, where.resource.plural, call.dry_run] += 1
        return call

    def _do(
        self,
        call: faults.ApiCall,
        where: routes.Route,
        request: http.HttpRequest,
        channel: http.Channel,
        effects: Sequence[faults.Effect],
    ) -> http.Answer | None:
        match call.verb:
            case "get":
                stored = self._store.get(where.resource.plural, where.key)
                if stored is None:
                    raise status.not_found(where.resource.group_resource, where.name)
                return http.Answer(200, stored.encoded)
            case "list":
                matches = routes.selection(where, request.query, self.version)
                return http.Answer(200, self._lists.page(where.resource, matches, request.query))
            case "watch":
                self._watch(where, request.query, channel)
                return None
            case "delete":
                options = _decode(request.body) if request.body else {}
                deleted = self._verbs.delete(where.resource, where.key, options, dry_run=call.dry_run)
                return _json(
                    deleted if where.resource.group else {"kind": "Status", "apiVersion": "v1", "status": "Success"}
                )
            case "deletecollection":
                return self._delete_collection(where, request.query, dry_run=call.dry_run)
        body = self._sent(call, request)
        for effect in effects:
            if isinstance(effect, faults.Mutate):
                effect.change(body)
        if call.verb == "create":
            created = self._verbs.create(where.resource, where.namespace, body, dry_run=call.dry_run)
            return _json(created, code=201)
        write = self._verbs.replace if call.verb == "update" else self._verbs.patch
        return _json(write(where.resource, where.key, body, subresource=where.subresource, dry_run=call.dry_run))

    def _sent(self, call: faults.ApiCall, request: http.HttpRequest) -> Body:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip()
        allowed = _PATCH_TYPES if call.verb == "patch" else ("application/json", "")
        if content_type not in allowed:
            raise status.StatusError(
                415,
                "UnsupportedMediaType",
                f"the body of the request was in an unknown format - accepted media types include: {', '.join(allowed)}",
            )
        return _decode(request.body)

    def _watch(self, where: routes.Route, query: Mapping[str, str], channel: http.Channel) -> None:
        matches = routes.selection(where, query, self.version)
        asked = lists.revision_of(query)
        timeout = query.get("timeoutSeconds", "")
        order = watch.WatchOrder(
            resource=where.resource,
            matches=matches,
            revision=asked or None,
            bookmarks=query.get("allowWatchBookmarks") in {"1", "true"},
            initial_events=query.get("sendInitialEvents") in {"1", "true"},
            timeout_s=float(timeout) if timeout.isdecimal() and int(timeout) else random.uniform(*_WATCH_TIMEOUT_S),  # noqa: S311
            bookmark_interval_s=self._bookmark_interval_s,
        )
        watch.Watch(order, self._store, self.faults, lambda: self._running).serve(channel)

    def _delete_collection(self, where: routes.Route, query: Mapping[str, str], *, dry_run: bool) -> http.Answer:
        matches = routes.selection(where, query, self.version)
        revision, every = self._store.items(where.resource.plural)
        gone = [(key, stored) for key, stored in every if matches(key, stored.body)]
        for key, _ in gone:
            try:
                self._verbs.delete(where.resource, key, {}, dry_run=dry_run)
            except status.StatusError as error:
                if error.reason != "NotFound":
                    raise
        listed = lists.encode_list(where.resource, {"resourceVersion": str(revision)}, [stored for _, stored in gone])
        return http.Answer(200, listed)

    def _counters(self) -> dict[str, Any]:
        with self._lock:
            counts = dict(self._counts)
        return {
            "requests": {f"{verb} {plural}": n for (verb, plural, dry), n in sorted(counts.items()) if not dry},
            "dryRuns": {f"{verb} {plural}": n for (verb, plural, dry), n in sorted(counts.items()) if dry},
            "writes": {plural: self.writes(plural) for plural in resources.RESOURCES},
        }


def _json(body: Mapping[str, Any], *, code: int = 200) -> http.Answer:
    return http.Answer(code, store.encode(body))


def _decode(body: bytes) -> Body:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise status.bad_request(f"the object provided is unrecognized: {error}") from error
    if not isinstance(decoded, dict):
        raise status.bad_request("the object provided is unrecognized: no JSON object")
    return decoded


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Prints one line of JSON when it listens."""
    parser = argparse.ArgumentParser(
        prog="python -m driver.standin.apiserver", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--token", help="bearer token that clients must show; default: a random one")
    parser.add_argument("--kubeconfig", type=Path, help="write a kubeconfig here")
    parser.add_argument(
        "--kubernetes", default=gates.VERSIONS[-1], choices=gates.VERSIONS, help="version to stand in for"
    )
    parser.add_argument("--node", action="append", default=[], metavar="NAME", help="create this Node; may be repeated")
    options = parser.parse_args(argv)
    ended = bell.Bell()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.ring())
    ended.wake_by_signals()
    with ApiServer(version=options.kubernetes, host=options.host, port=options.port, token=options.token) as server:
        for name in options.node:
            server.seed("nodes", {"metadata": {"name": name}})
        if options.kubeconfig is not None:
            server.write_kubeconfig(options.kubeconfig)
        hello = {"url": server.url, "token": server.token, "kubeconfig": str(options.kubeconfig or "")}
        sys.stdout.write(json.dumps(hello) + "\n")
        sys.stdout.flush()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
