# SPDX-License-Identifier: Apache-2.0
"""The stand-in kubelet, against plugins that are written for this test: it must refuse what kubelet refuses.

- it looks at sockets only, at any depth, never at names with a dot in front
- the handshake: type, services, endpoint, an endpoint that is taken, errors told to the plugin, pauses between tries
- a plugin that cannot be told that it is registered is not; one whose socket goes, or is made anew, is registered no more
- the last registered of the connected instances is called; with none connected, the last
- answers: a claim missing, a claim too many, an RPC error, a deadline
- health: kept for as long as a report says, forgotten at the end of the stream, UNIMPLEMENTED ends the watching
- slices: wiped at start until it works, and some time after the last instance went, unless one comes back
- the process: one line in, one line out
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from driver import values
from driver.standin import apiserver, kubelet, kubelet_client, kubelet_health, kubelet_pods, kubelet_registry
from driver.standin.kubelet_client import KubeletError
from proto.dra.v1 import api_pb2 as dra_v1
from proto.dra_health.v1 import api_pb2 as health_v1
from proto.pluginregistration.v1 import api_pb2 as registration_v1
from tests.fakes import kubelet_side

ROOT = Path(__file__).parent.parent.parent
DRIVER = "other.example.com"
CLAIM = kubelet_side.claim(1)
SERVICES = ("v1.DRAPlugin", "v1.DRAResourceHealth")


@dataclass
class OtherPlugin:
    """A plugin as somebody else might write it; what it says is up to the test."""

    root: Path
    name: str = "a"
    driver: str = DRIVER
    type: str = "DRAPlugin"
    services: tuple[str, ...] = SERVICES
    endpoint: str | None = None
    told: queue.SimpleQueue[tuple[bool, str]] = field(default_factory=queue.SimpleQueue)
    refuse_status: bool = False
    slow_info: threading.Event | None = None
    prepare: Callable[
        [dra_v1.NodePrepareResourcesRequest, grpc.ServicerContext], dra_v1.NodePrepareResourcesResponse
    ] = field(default=lambda request, _context: answers(request))
    health: queue.SimpleQueue[health_v1.NodeWatchResourcesResponse | grpc.StatusCode] = field(
        default_factory=queue.SimpleQueue
    )
    watched: int = 0
    servers: list[grpc.Server] = field(default_factory=list)

    @property
    def service_socket(self) -> Path:
        return self.root / f"{self.name}.sock"

    @property
    def registration_socket(self) -> Path:
        return self.root / "plugins_registry" / f"{self.name}-reg.sock"

    def start(self) -> None:
        self.serve(self.service_socket, self._dra(), self._health())
        self.announce()

    def announce(self) -> None:
        self.serve(self.registration_socket, self._registration())

    def serve(self, path: Path, *handlers: grpc.GenericRpcHandler) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=list(handlers))
        server.add_insecure_port(f"unix:{path}")
        server.start()
        self.servers.append(server)

    def stop(self) -> None:
        while self.servers:
            self.servers.pop().stop(0).wait()

    def _registration(self) -> grpc.GenericRpcHandler:
        def info(_request: registration_v1.InfoRequest, _context: grpc.ServicerContext) -> registration_v1.PluginInfo:
            if self.slow_info is not None:
                self.slow_info.wait(30)
            endpoint = str(self.service_socket) if self.endpoint is None else self.endpoint
            return registration_v1.PluginInfo(
                type=self.type, name=self.driver, endpoint=endpoint, supported_versions=self.services
            )

        def notify(
            request: registration_v1.RegistrationStatus, context: grpc.ServicerContext
        ) -> registration_v1.RegistrationStatusResponse:
            self.told.put((request.plugin_registered, request.error))
            if self.refuse_status:
                context.abort(grpc.StatusCode.INTERNAL, "do not tell me")
            return registration_v1.RegistrationStatusResponse()

        return grpc.method_handlers_generic_handler(
            "pluginregistration.Registration",
            {
                "GetInfo": grpc.unary_unary_rpc_method_handler(
                    info,
                    request_deserializer=registration_v1.InfoRequest.FromString,
                    response_serializer=registration_v1.PluginInfo.SerializeToString,
                ),
                "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                    notify,
                    request_deserializer=registration_v1.RegistrationStatus.FromString,
                    response_serializer=registration_v1.RegistrationStatusResponse.SerializeToString,
                ),
            },
        )

    def _dra(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
            {
                "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                    self._prepare,
                    request_deserializer=dra_v1.NodePrepareResourcesRequest.FromString,
                    response_serializer=dra_v1.NodePrepareResourcesResponse.SerializeToString,
                )
            },
        )

    def _prepare(
        self, request: dra_v1.NodePrepareResourcesRequest, context: grpc.ServicerContext
    ) -> dra_v1.NodePrepareResourcesResponse:
        return self.prepare(request, context)

    def _health(self) -> grpc.GenericRpcHandler:
        def watch(
            _request: health_v1.NodeWatchResourcesRequest, context: grpc.ServicerContext
        ) -> Iterator[health_v1.NodeWatchResourcesResponse]:
            self.watched += 1
            while context.is_active():
                try:
                    report = self.health.get(timeout=0.02)
                except queue.Empty:
                    continue
                if isinstance(report, grpc.StatusCode):
                    context.abort(report, "no more")
                yield report

        return grpc.method_handlers_generic_handler(
            "v1.DRAResourceHealth",
            {
                "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                    watch,
                    request_deserializer=health_v1.NodeWatchResourcesRequest.FromString,
                    response_serializer=health_v1.NodeWatchResourcesResponse.SerializeToString,
                )
            },
        )


def answers(request: dra_v1.NodePrepareResourcesRequest) -> dra_v1.NodePrepareResourcesResponse:
    """A good answer for every claim: no devices."""
    response = dra_v1.NodePrepareResourcesResponse()
    for claim in request.claims:
        response.claims[claim.uid].SetInParent()
    return response


def report(device: str, *, health: health_v1.HealthStatus.ValueType = health_v1.HEALTHY, timeout: int = 0) -> Any:
    return health_v1.NodeWatchResourcesResponse(
        devices=[
            health_v1.DeviceHealth(
                device=health_v1.DeviceIdentifier(pool_name="p", device_name=device),
                health=health,
                health_check_timeout_seconds=timeout,
                message="as told",
            )
        ]
    )


@pytest.fixture
def root() -> Iterator[Path]:
    with kubelet_side.short_directory() as path:
        yield path


@contextmanager
def running(*plugins: OtherPlugin) -> Iterator[None]:
    for plugin in plugins:
        plugin.start()
    try:
        yield
    finally:
        for plugin in plugins:
            plugin.stop()


def standin(root: Path, **options: Any) -> kubelet.StandInKubelet:
    return kubelet.StandInKubelet(root, **({"poll_s": 0.02, "backoff_s": 0.02, "health_retry_s": 0.02} | options))


def eventually(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return True
        pause.wait(0.01)
    return False


# What it looks at


def test_sockets_that_kubelet_looks_at(root: Path) -> None:
    seen, hidden = [root / "a.sock", root / "x/y/b.sock"], [root / ".c.sock", root / ".d/e.sock"]
    for path in seen + hidden:
        path.parent.mkdir(parents=True, exist_ok=True)
        with kubelet_side.listening(path):
            pass
    (root / "file.sock").write_text("")
    (root / "link.sock").symlink_to(root / "a.sock")
    assert set(kubelet_registry.sockets_in(root)) == set(seen)
    assert kubelet_registry.sockets_in(root / "missing") == {}


def test_socket_made_anew_is_another_and_one_renamed_is_the_same(root: Path) -> None:
    path = root / "a.sock"
    with kubelet_side.listening(path):
        first = kubelet_registry.sockets_in(root)[path]
        path.chmod(0o600)
        path.rename(root / "b.sock").rename(path)
        assert kubelet_registry.sockets_in(root)[path] == first
        path.unlink()
    with kubelet_side.listening(path):
        assert kubelet_registry.sockets_in(root)[path] != first


# The handshake


def test_registration(root: Path) -> None:
    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        (info,) = node.wait_registered(DRIVER)
        assert info == kubelet_registry.PluginInfo(
            socket=plugin.registration_socket, driver=DRIVER, endpoint=plugin.service_socket, services=SERVICES
        )
        assert plugin.told.get(timeout=30) == (True, "")
        assert node.refused() == {}


def test_empty_endpoint_is_the_registration_socket(root: Path) -> None:
    plugin = OtherPlugin(root, endpoint="")
    with standin(root) as node, running(plugin):
        (info,) = node.wait_registered(DRIVER)
        assert info.endpoint == plugin.registration_socket


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"type": "CSIPlugin"}, "no handler registered for plugin type: CSIPlugin"),
        ({"services": ()}, "lists no supported gRPC services"),
        ({"services": ("v1alpha3.DRAPlugin", "1.0.0")}, "none of the services"),
    ],
)
def test_refusals_are_told_and_tried_again(root: Path, options: Mapping[str, Any], reason: str) -> None:
    plugin = OtherPlugin(root, **options)
    with standin(root) as node, running(plugin):
        for _ in range(2):
            registered, error = plugin.told.get(timeout=30)
            assert not registered
            assert reason in error
        assert node.plugins(DRIVER) == ()
        assert eventually(lambda: reason in node.refused()[plugin.registration_socket])


def test_endpoint_that_is_taken(root: Path) -> None:
    first, second = OtherPlugin(root), OtherPlugin(root, name="b")
    second.endpoint = str(first.service_socket)
    with standin(root) as node, running(first):
        node.wait_registered(DRIVER)
        with running(second):
            registered, error = second.told.get(timeout=30)
            assert not registered
            assert f"endpoint {first.service_socket} already registered" in error
            first.registration_socket.unlink()
            assert eventually(lambda: [info.socket for info in node.plugins(DRIVER)] == [second.registration_socket])


def test_plugin_that_cannot_be_told_is_not_registered(root: Path) -> None:
    plugin = OtherPlugin(root, refuse_status=True)
    with standin(root) as node, running(plugin):
        assert plugin.told.get(timeout=30) == (True, "")
        assert eventually(lambda: "do not tell me" in node.refused().get(plugin.registration_socket, ""))
        plugin.refuse_status = False
        node.wait_registered(DRIVER)


def test_get_info_must_come_within_a_second(root: Path) -> None:
    plugin = OtherPlugin(root, slow_info=threading.Event())
    with standin(root) as node, running(plugin):
        assert eventually(lambda: "DEADLINE_EXCEEDED" in node.refused().get(plugin.registration_socket, ""))
        assert plugin.slow_info is not None
        plugin.slow_info.set()
        node.wait_registered(DRIVER)


def test_socket_that_nobody_serves(root: Path) -> None:
    plugin = OtherPlugin(root)
    plugin.registration_socket.parent.mkdir()
    with kubelet_side.listening(plugin.registration_socket):
        pass
    with standin(root, dial_timeout_s=0.02) as node:
        assert eventually(lambda: "dial failed" in node.refused().get(plugin.registration_socket, ""))


def test_stop_does_not_wait_for_a_socket_that_nobody_serves(root: Path) -> None:
    path = root / "plugins_registry" / "dead.sock"
    path.parent.mkdir()
    with kubelet_side.listening(path):
        pass
    with standin(root, dial_timeout_s=600):
        pass


def test_pauses_double_and_stay_with_the_path() -> None:
    now = [0.0]
    backoff = kubelet_registry.Backoff(clock=lambda: now[0])
    path, other = Path("/a"), Path("/b")
    pauses = []
    for _ in range(10):
        backoff.failed(path)
        began = now[0]
        while backoff.waiting(path):
            now[0] += 0.5
        pauses.append(now[0] - began)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 64, 122, 122]
    assert not backoff.waiting(other)
    backoff.failed(path)
    backoff.succeeded(path)
    assert not backoff.waiting(path)


def test_socket_that_goes_unregisters(root: Path) -> None:
    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        plugin.registration_socket.unlink()
        node.wait_registered(DRIVER, instances=0)
        with pytest.raises(KubeletError, match=f"DRA driver {DRIVER} is not registered"):
            node.prepare(DRIVER, [CLAIM])


def test_plugins_that_are_there_before_kubelet_are_found(root: Path) -> None:
    with running(OtherPlugin(root)), standin(root) as node:
        node.wait_registered(DRIVER)


def test_nothing_registered_is_said_with_what_is_known(root: Path) -> None:
    plugin = OtherPlugin(root, type="CSIPlugin")
    with standin(root) as node, running(plugin):
        plugin.told.get(timeout=30)
        assert eventually(lambda: bool(node.refused()))
        with pytest.raises(KubeletError, match=r"0 of 1 instances of other\.example\.com.*CSIPlugin"):
            node.wait_registered(DRIVER, timeout_s=0.05)


# Calls


def test_last_registered_of_the_connected_is_called(root: Path) -> None:
    first, second = OtherPlugin(root, name="a"), OtherPlugin(root, name="b")
    with standin(root) as node, running(first):
        node.wait_registered(DRIVER)
        second.start()
        node.wait_registered(DRIVER, instances=2)
        assert node.chosen(DRIVER)[0].endpoint == second.service_socket
        second.servers[0].stop(0).wait()  # as a kill: the registration socket stays
        assert eventually(lambda: node.chosen(DRIVER)[0].endpoint == first.service_socket)
        first.servers[0].stop(0).wait()
        assert eventually(lambda: node.chosen(DRIVER)[0].endpoint == second.service_socket)
        with pytest.raises(KubeletError, match="UNAVAILABLE"):
            node.prepare(DRIVER, [CLAIM])
        second.stop()


def test_plugin_that_comes_back_on_its_socket_is_connected_again(root: Path) -> None:
    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        plugin.servers.pop(0).stop(0).wait()
        with pytest.raises(KubeletError, match="UNAVAILABLE"):
            node.prepare(DRIVER, [CLAIM])
        plugin.serve(plugin.service_socket, plugin._dra(), plugin._health())
        node.wait_registered(DRIVER)

        def served() -> bool:
            try:
                return node.prepare(DRIVER, [CLAIM]) == {CLAIM.uid: values.Prepared(devices=())}
            except KubeletError:
                return False

        assert eventually(served)


def test_answers_that_kubelet_does_not_take(root: Path) -> None:
    def too_many(request: dra_v1.NodePrepareResourcesRequest, _context: grpc.ServicerContext) -> Any:
        response = answers(request)
        response.claims["foreign"].SetInParent()
        return response

    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        assert node.prepare(DRIVER, [CLAIM]) == {CLAIM.uid: values.Prepared(devices=())}
        plugin.prepare = lambda _request, _context: dra_v1.NodePrepareResourcesResponse()
        with pytest.raises(KubeletError, match="NodePrepareResources skipped 2 ResourceClaims"):
            node.prepare(DRIVER, [CLAIM, kubelet_side.claim(2)])
        plugin.prepare = too_many
        with pytest.raises(KubeletError, match="unknown claim UID foreign"):
            node.prepare(DRIVER, [CLAIM])
        plugin.prepare = lambda _request, context: context.abort(grpc.StatusCode.INTERNAL, "everything is wrong")
        with pytest.raises(KubeletError, match="INTERNAL desc = everything is wrong"):
            node.prepare(DRIVER, [CLAIM])
        with pytest.raises(KubeletError, match="UNIMPLEMENTED"):
            node.unprepare(DRIVER, [CLAIM])


def test_deadline(root: Path) -> None:
    free = threading.Event()

    def slow(request: dra_v1.NodePrepareResourcesRequest, _context: grpc.ServicerContext) -> Any:
        free.wait(30)
        return answers(request)

    plugin = OtherPlugin(root, prepare=slow)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        with pytest.raises(KubeletError, match="DEADLINE_EXCEEDED"):
            node.prepare(DRIVER, [CLAIM], timeout_s=0.05)
        free.set()


# Health


def test_reports_hold_for_as_long_as_they_say() -> None:
    now = [0.0]
    book = kubelet_health.HealthBook(clock=lambda: now[0])
    book.update("d", report("short", timeout=5))
    book.update("d", report("usual"))
    book.update("d", report("negative", timeout=-1))
    told = kubelet_health.DeviceHealth(status=values.HealthStatus.HEALTHY, message="as told")
    stale = kubelet_health.DeviceHealth(status=values.HealthStatus.UNKNOWN)
    now[0] = 5
    assert dict(book.devices("d")) == {("p", "short"): told, ("p", "usual"): told, ("p", "negative"): told}
    now[0] = 6
    book.update("d", report("usual"))
    now[0] = 31
    assert dict(book.devices("d")) == {("p", "short"): stale, ("p", "usual"): told, ("p", "negative"): stale}
    assert (book.devices("other"), book.reports("d"), book.reports("other")) == ({}, 4, 0)


def test_health_is_heard_and_forgotten_with_the_stream(root: Path) -> None:
    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        plugin.health.put(report("a"))
        plugin.health.put(report("b", health=health_v1.UNHEALTHY))
        assert node.health.wait_for(DRIVER, lambda devices: len(devices) == 2, timeout_s=30)
        assert node.health.devices(DRIVER)["p", "b"].status is values.HealthStatus.UNHEALTHY
        plugin.health.put(grpc.StatusCode.INTERNAL)
        assert node.health.wait_for(DRIVER, lambda devices: not devices, timeout_s=30)
        assert eventually(lambda: plugin.watched == 2)
        plugin.health.put(report("a"))
        assert node.health.wait_for(DRIVER, lambda devices: len(devices) == 1, timeout_s=30)


def test_unimplemented_ends_the_watching_until_the_plugin_registers_again(root: Path) -> None:
    plugin = OtherPlugin(root)
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        plugin.health.put(grpc.StatusCode.UNIMPLEMENTED)
        assert eventually(lambda: plugin.watched == 1 and plugin.health.empty())
        plugin.registration_socket.unlink()
        node.wait_registered(DRIVER, instances=0)
        assert plugin.watched == 1
        plugin.announce()
        node.wait_registered(DRIVER)
        assert eventually(lambda: plugin.watched == 2)


def test_plugin_without_the_service_is_not_watched(root: Path) -> None:
    plugin = OtherPlugin(root, services=("v1.DRAPlugin",))
    with standin(root) as node, running(plugin):
        node.wait_registered(DRIVER)
        assert node.prepare(DRIVER, [CLAIM])
        assert plugin.watched == 0


# Slices


def test_slices_are_wiped_at_start_until_it_works(root: Path) -> None:
    wiped: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    failures = [OSError("no API server yet")]

    def wipe(driver: str | None) -> None:
        if failures:
            raise failures.pop()
        wiped.put(driver)

    with standin(root, wipe_slices=wipe) as node:
        assert wiped.get(timeout=30) is None
        node.restart()
        assert wiped.get(timeout=30) is None


def test_slices_of_a_driver_that_is_gone_are_wiped(root: Path) -> None:
    wiped: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    plugin = OtherPlugin(root)
    with standin(root, wipe_slices=wiped.put, wipe_delay_s=0.05) as node:
        assert wiped.get(timeout=30) is None
        with running(plugin):
            node.wait_registered(DRIVER)
        assert wiped.get(timeout=30) == DRIVER


def test_slices_of_a_driver_that_comes_back_in_time_stay(root: Path) -> None:
    now = [0.0]
    wiped: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    first, second = OtherPlugin(root, name="a"), OtherPlugin(root, name="b")
    with standin(root, wipe_slices=wiped.put, clock=lambda: now[0]) as node:
        assert wiped.get(timeout=30) is None
        with running(first):
            node.wait_registered(DRIVER)
        node.wait_registered(DRIVER, instances=0)
        assert node.wipe_in_s(DRIVER) == 30.0
        now[0] = 29.0
        assert node.wipe_in_s(DRIVER) == 1.0
        with running(second):
            node.wait_registered(DRIVER)
            assert node.wipe_in_s(DRIVER) is None
            now[0] = 60.0
            assert node.prepare(DRIVER, [CLAIM])
        node.wait_registered(DRIVER, instances=0)
        assert wiped.empty()
        now[0] = 91.0
        assert wiped.get(timeout=30) == DRIVER


# The process


@contextmanager
def process(root: Path, *options: str) -> Iterator[Callable[[Mapping[str, Any] | str], Any]]:
    command = [sys.executable, "-m", "driver.standin.kubelet_commands", "--kubelet-dir", str(root), *options]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        source, target = child.stdin, child.stdout
        assert source is not None
        assert target is not None
        assert json.loads(target.readline()) == {"ready": True, "registry": str(root / "plugins_registry")}

        def ask(question: Mapping[str, Any] | str) -> Any:
            print(question if isinstance(question, str) else json.dumps(question), file=source, flush=True)
            return json.loads(target.readline())

        try:
            yield ask
        finally:
            source.close()
            assert child.wait(30) == 0


def test_process(root: Path) -> None:
    good, bad = kubelet_side.claim(1), kubelet_side.claim(2)
    claims = [{"namespace": ref.namespace, "name": ref.name, "uid": ref.uid} for ref in (good, bad)]

    def prepare(request: dra_v1.NodePrepareResourcesRequest, _context: grpc.ServicerContext) -> Any:
        response = answers(request)
        response.claims[good.uid].devices.add(pool_name="p", device_name="d", request_names=["r"], cdi_device_ids=["i"])
        response.claims[bad.uid].error = "held"
        return response

    plugin = OtherPlugin(root, prepare=prepare)
    with process(root) as ask, running(plugin):
        plugin.health.put(report("a"))
        info = {
            "socket": str(plugin.registration_socket),
            "driver": DRIVER,
            "endpoint": str(plugin.service_socket),
            "services": list(SERVICES),
        }
        assert ask({"id": 1, "op": "wait", "driver": DRIVER, "timeout_s": 60}) == {
            "id": 1,
            "ok": True,
            "result": [info],
        }
        assert ask({"id": 2, "op": "plugins", "driver": DRIVER})["result"] == [info]
        device = {"request_names": ["r"], "pool": "p", "device": "d", "cdi_device_ids": ["i"], "share_id": None}
        assert ask({"id": 3, "op": "prepare", "driver": DRIVER, "claims": claims}) == {
            "id": 3,
            "ok": True,
            "result": {good.uid: {"devices": [device]}, bad.uid: {"error": "held"}},
        }
        failed = ask({"id": 4, "op": "unprepare", "driver": DRIVER, "claims": claims})
        assert (failed["id"], failed["ok"]) == (4, False)
        assert "UNIMPLEMENTED" in failed["error"]
        healthy = [{"pool": "p", "device": "a", "status": "HEALTHY", "message": "as told"}]
        assert eventually(lambda: bool(ask({"op": "health", "driver": DRIVER})["result"] == healthy))
        assert ask({"op": "restart"}) == {"id": None, "ok": True, "result": None}
        assert ask({"op": "wait", "driver": DRIVER})["ok"]
        assert ask({"op": "refused"})["result"] == {}


def test_the_cgroup_of_a_pod_is_there_before_prepare_and_stays_until_its_claims_are_unprepared(
    root: Path, tmp_path: Path
) -> None:
    claim, pod = kubelet_side.claim(1), "0c9a4d1e-7b1f-4c55-9f5e-2b8f0f6c1a2b"
    folder = tmp_path / "kubepods" / "burstable" / f"pod{pod}"
    seen: list[bool] = []

    def prepare(request: dra_v1.NodePrepareResourcesRequest, _context: grpc.ServicerContext) -> Any:
        seen.append(folder.is_dir())
        return answers(request)

    pods = kubelet_pods.PodCgroups(tmp_path)
    with standin(root, pods=pods) as node, running(OtherPlugin(root, prepare=prepare)):
        node.wait_registered(DRIVER)
        node.prepare(DRIVER, [claim], pod=pod)
        assert seen == [True]
        with pytest.raises(KubeletError, match="UNIMPLEMENTED"):
            node.unprepare(DRIVER, [claim], pod=pod)
        assert folder.is_dir()
        pods.remove(pod)
        assert not folder.exists()
        with pytest.raises(KubeletError, match="is no UID"):
            node.prepare(DRIVER, [claim], pod="../up")
    with standin(root) as node, pytest.raises(KubeletError, match="cgroup root"):
        node.prepare(DRIVER, [claim], pod=pod)


def test_process_says_what_is_no_command(root: Path) -> None:
    with process(root) as ask:
        for line in ("", "nonsense", "[]", "{}", '{"op": "dance"}', '{"op": "prepare", "driver": "d"}'):
            answer = ask(line)
            assert not answer["ok"]
            assert answer["error"]
        assert ask({"op": "refused"})["ok"]


def test_process_wipes_the_slices_of_its_node(root: Path) -> None:
    def slices() -> set[str]:
        return {body["metadata"]["name"] for body in api.objects("resourceslices")}

    with apiserver.ApiServer() as api:
        for node, driver in (("here", DRIVER), ("here", "third.example.com"), ("there", DRIVER)):
            seed_slice(api, node, driver)
        options = ["--api-server", api.url, f"--token={api.token}", "--node-name", "here", "--wipe-delay-s", "0"]
        with process(root, *options) as ask:
            assert eventually(lambda: slices() == {f"there-{DRIVER}"})
            with running(OtherPlugin(root)):
                assert ask({"op": "wait", "driver": DRIVER})["ok"]
                for driver in (DRIVER, "third.example.com"):
                    seed_slice(api, "here", driver)
            assert eventually(lambda: slices() == {f"there-{DRIVER}", "here-third.example.com"})


def seed_slice(api: apiserver.ApiServer, node: str, driver: str) -> None:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    api.seed(
        "resourceslices",
        {"metadata": {"name": f"{node}-{driver}"}, "spec": {"nodeName": node, "driver": driver, "pool": pool}},
    )


def test_bare_stubs_and_client_of_one_socket(root: Path) -> None:
    plugin = OtherPlugin(root)
    with running(plugin):
        client = kubelet_client.DraClient(plugin.service_socket)
        assert client.prepare([CLAIM]) == {CLAIM.uid: values.Prepared(devices=())}
        assert client.v1.NodePrepareResources(dra_v1.NodePrepareResourcesRequest()).claims == {}
        with pytest.raises(KubeletError, match="UNIMPLEMENTED"):
            client.prepare([CLAIM], version="v1beta1")
        client.close()
