# SPDX-License-Identifier: Apache-2.0
"""The health stream on its real socket, in both versions.

- all devices when it opens, at once when something changes or when it is asked for, and again though nothing does
- what kubelet gets: names, status, time, time-out of 30 s, a message within 1024 bytes
- it ends at once when the agent stops or the client goes, and gives its place back; it holds no call up
- trouble of the source ends the stream with INTERNAL, never with UNIMPLEMENTED, and the next stream is served
- when a sibling has gone, everything is sent again at once
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

import grpc
import pytest

from driver import values
from driver.kubelet import health, server
from driver.standin import kubelet_client
from proto.dra_health.v1 import api_pb2 as health_v1
from proto.dra_health.v1 import api_pb2_grpc as health_v1_grpc
from proto.dra_health.v1alpha1 import api_pb2 as health_v1alpha1
from proto.dra_health.v1alpha1 import api_pb2_grpc as health_v1alpha1_grpc
from tests.fakes import kubelet_side

DRIVER = "gpu.nearfield.dev"
LONG_S = 600.0
"""A pause that no test outlives: what comes all the same was not sent because of the pause."""

Report: TypeAlias = health_v1.NodeWatchResourcesResponse | health_v1alpha1.NodeWatchResourcesResponse


class Stream(Protocol):
    """The call of either version."""

    def __iter__(self) -> Iterator[Report]: ...
    def __next__(self) -> Report: ...
    def cancel(self) -> object: ...
    def is_active(self) -> bool: ...


class Agent:
    """A KubeletServer whose health a test sets."""

    def __init__(self, root: Path, *, refresh_s: float = LONG_S) -> None:
        self.source = kubelet_side.FakeHealth(kubelet_side.healthy())
        self.server = server.KubeletServer(
            driver_name=DRIVER,
            registry_dir=root / "plugins_registry",
            plugin_dir=root / "plugins" / DRIVER,
            pod_uid=None,
            preparer=kubelet_side.FakePreparer(),
            health=self.source,
            observer=kubelet_side.Calls(),
            refresh_s=refresh_s,
            watch_interval_s=0.02,
        )
        self.server.start()
        self.channel = kubelet_client.open_channel(self.server.paths.service)

    def watch(self, version: str = "v1") -> Stream:
        if version == "v1":
            return health_v1_grpc.DRAResourceHealthStub(self.channel).NodeWatchResources(
                health_v1.NodeWatchResourcesRequest()
            )
        return health_v1alpha1_grpc.DRAResourceHealthStub(self.channel).NodeWatchResources(
            health_v1alpha1.NodeWatchResourcesRequest()
        )

    def close(self) -> None:
        self.server.stop()
        self.channel.close()


@pytest.fixture
def root() -> Iterator[Path]:
    with kubelet_side.short_directory() as path:
        yield path


@pytest.fixture
def agent(root: Path) -> Iterator[Agent]:
    agent = Agent(root)
    yield agent
    agent.close()


def names(report: Report) -> list[tuple[str, int]]:
    return [(device.device.device_name, device.health) for device in report.devices]


def reading(stream: Stream) -> queue.SimpleQueue[Report | grpc.RpcError | None]:
    """Read a stream from a thread of its own: reports, then how it ended (None: the server ended it)."""
    reports: queue.SimpleQueue[Report | grpc.RpcError | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for report in stream:
                reports.put(report)
        except grpc.RpcError as error:
            reports.put(error)
        else:
            reports.put(None)

    threading.Thread(target=read, daemon=True).start()
    return reports


def eventually(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return True
        pause.wait(0.01)
    return False


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_everything_on_open_and_changes_at_once(agent: Agent, version: str) -> None:
    first, second = "gpu-0000-1b-00-0", "gpu-0000-3b-00-0"
    agent.source.set(kubelet_side.healthy(first), kubelet_side.healthy(second))
    stream = agent.watch(version)
    while len(names(report := next(stream))) < 2:
        pass  # the change above may arrive as a second report
    assert names(report) == [(first, health_v1.HEALTHY), (second, health_v1.HEALTHY)]
    sick = dataclasses.replace(
        kubelet_side.healthy(second, checked_at=1_234), status=values.HealthStatus.UNHEALTHY, message="GPU is lost"
    )
    agent.source.set(kubelet_side.healthy(first), sick)
    while (report := next(stream)).devices[1].health != health_v1.UNHEALTHY:
        pass
    device = report.devices[1]
    assert (device.device.pool_name, device.device.device_name) == ("node-1", second)
    assert (device.last_updated_time, device.health_check_timeout_seconds) == (1_234, 30)
    assert device.message == "GPU is lost"
    agent.source.set(dataclasses.replace(sick, status=values.HealthStatus.UNKNOWN))
    while names(report := next(stream)) != [(second, health_v1.UNKNOWN)]:
        pass
    stream.cancel()


def test_everything_again_though_nothing_changed(root: Path) -> None:
    agent = Agent(root, refresh_s=0.01)
    stream = agent.watch()
    reports = [next(stream) for _ in range(4)]
    assert [names(report) for report in reports] == [[("gpu-0000-1b-00-0", health_v1.HEALTHY)]] * 4
    agent.close()


def test_everything_again_when_it_is_asked_for(agent: Agent) -> None:
    reports = reading(agent.watch())
    assert isinstance(reports.get(timeout=30), health_v1.NodeWatchResourcesResponse)
    agent.source.silent(kubelet_side.healthy("gpu-0000-3b-00-0"))
    while True:
        agent.server.resend_health()
        report = reports.get(timeout=30)
        assert isinstance(report, health_v1.NodeWatchResourcesResponse)
        if names(report) == [("gpu-0000-3b-00-0", health_v1.HEALTHY)]:
            break


def test_refresh_leaves_room_below_kubelets_time_out() -> None:
    assert health.REFRESH_S <= 10
    assert health.REFRESH_S * 3 < health.TIMEOUT_S


def test_message_is_bounded(agent: Agent) -> None:
    agent.source.set(dataclasses.replace(kubelet_side.healthy(), message="\udcff" + "ü" * 1_000))
    stream = agent.watch()
    while not (message := next(stream).devices[0].message):
        pass
    assert len(message.encode()) <= 1024
    assert message.startswith("?ü")
    assert message.endswith("ü...")


def test_no_devices_is_an_empty_report(agent: Agent) -> None:
    agent.source.set()
    stream = agent.watch()
    while names(next(stream)):
        pass


def test_many_devices(agent: Agent) -> None:
    agent.source.set(*(kubelet_side.healthy(f"gpu-{number}") for number in range(2_000)))
    stream = agent.watch()
    while len(names(next(stream))) != 2_000:
        pass


def test_stop_ends_the_stream_at_once(agent: Agent) -> None:
    reports = reading(agent.watch())
    assert isinstance(reports.get(timeout=30), health_v1.NodeWatchResourcesResponse)
    agent.server.stop(grace_s=LONG_S)  # the streams do not use the grace up
    while isinstance(last := reports.get(timeout=30), health_v1.NodeWatchResourcesResponse):
        pass
    assert last is None


def all_places(agent: Agent) -> list[Stream]:
    """As many streams as there may be; a place of one that has just gone may take a moment to be free."""
    streams: list[Stream] = []

    def one_more() -> bool:
        stream = agent.watch()
        try:
            next(stream)
        except grpc.RpcError:
            return False
        streams.append(stream)
        return len(streams) == health.MAX_STREAMS

    assert eventually(one_more)
    return streams


def test_client_that_goes_gives_its_place_back(agent: Agent) -> None:
    for _ in range(3):
        streams = all_places(agent)
        with pytest.raises(grpc.RpcError) as refused:
            next(agent.watch())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()


def test_open_streams_hold_no_call_up(agent: Agent) -> None:
    streams = all_places(agent)
    client = kubelet_client.DraClient(agent.server.paths.service)
    claim = kubelet_side.claim(1)
    assert client.prepare([claim]) == {claim.uid: kubelet_side.prepared(claim)}
    client.close()
    assert all(stream.is_active() for stream in streams)


def test_source_that_fails_ends_the_stream_and_the_next_is_served(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.source.broken = RuntimeError("no inventory")
    with pytest.raises(grpc.RpcError) as ended:
        next(agent.watch())
    assert ended.value.code() is grpc.StatusCode.INTERNAL
    assert "RuntimeError: no inventory" in str(ended.value.details())
    assert any(record.exc_info for record in caplog.records)
    agent.source.broken = None
    assert names(next(agent.watch()))


def test_wait_that_fails_does_not_end_the_reports(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(kubelet_side.FakeHealth):
        """Cannot wait."""

        def wait(self, seen: int, timeout_s: float) -> int:
            raise RuntimeError("no condition")

    service = health.HealthService(Broken(kubelet_side.healthy()), refresh_s=0.01)
    rounds = threading.Semaphore(0)
    service.resend = rounds.release  # type: ignore[method-assign]
    service.start()
    for _ in range(3):
        assert rounds.acquire(timeout=30)
    service.stop()
    assert any("waited for" in record.getMessage() for record in caplog.records)


def test_sibling_that_has_gone_makes_everything_be_sent_again(agent: Agent) -> None:
    reports = reading(agent.watch())
    assert isinstance(reports.get(timeout=30), health_v1.NodeWatchResourcesResponse)
    lock = agent.server.paths.lock.with_name("dra-sibling.sock.lock")
    lock.write_text(json.dumps({"sockets": []}))
    # Nobody holds that lock: the next look finds it, removes it, and hurries.
    assert isinstance(reports.get(timeout=30), health_v1.NodeWatchResourcesResponse)
    assert not lock.exists()
