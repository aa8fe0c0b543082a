# SPDX-License-Identifier: Apache-2.0
"""Registration, between the agent's server and the stand-in kubelet.

- GetInfo as kubelet reads it; the order of versions decides what kubelet calls
- what kubelet said is kept for readiness: registered, refused and why, refused and then registered
- a socket that was lost and made again is registered again
- kubelet restarts; the agent restarts; two instances in a rolling update
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from driver.kubelet import server
from driver.standin import kubelet, kubelet_client
from proto.pluginregistration.v1 import api_pb2 as registration_v1
from proto.pluginregistration.v1 import api_pb2_grpc as registration_v1_grpc
from tests.fakes import kubelet_side

DRIVER = "gpu.nearfield.dev"
CLAIM = kubelet_side.claim(1)


@pytest.fixture
def root() -> Iterator[Path]:
    with kubelet_side.short_directory() as path:
        yield path


def build(root: Path, *, pod_uid: str | None = None) -> server.KubeletServer:
    return server.KubeletServer(
        driver_name=DRIVER,
        registry_dir=root / "plugins_registry",
        plugin_dir=root / "plugins" / DRIVER,
        pod_uid=pod_uid,
        preparer=kubelet_side.FakePreparer(),
        health=kubelet_side.FakeHealth(kubelet_side.healthy()),
        observer=kubelet_side.Calls(),
        watch_interval_s=0.02,
    )


def started(root: Path, *, pod_uid: str | None = None) -> server.KubeletServer:
    agent = build(root, pod_uid=pod_uid)
    agent.start()
    agent.registration()
    return agent


@pytest.fixture
def agent(root: Path) -> Iterator[server.KubeletServer]:
    agent = started(root)
    yield agent
    agent.stop()


@pytest.fixture
def stub(agent: server.KubeletServer) -> Iterator[registration_v1_grpc.RegistrationStub]:
    channel = kubelet_client.open_channel(agent.paths.registration)
    yield registration_v1_grpc.RegistrationStub(channel)
    channel.close()


def standin(
    root: Path, services: Mapping[str, kubelet_client.Version] = kubelet.DRA_SERVICES
) -> kubelet.StandInKubelet:
    return kubelet.StandInKubelet(root, services=services, poll_s=0.02, backoff_s=0.02, health_retry_s=0.05)


def eventually(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return True
        pause.wait(0.01)
    return False


def test_get_info(agent: server.KubeletServer, stub: registration_v1_grpc.RegistrationStub) -> None:
    assert stub.GetInfo(registration_v1.InfoRequest(), timeout=30) == registration_v1.PluginInfo(
        type="DRAPlugin",
        name=DRIVER,
        endpoint=str(agent.paths.service),
        supported_versions=["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"],
    )


def test_what_kubelet_says_is_kept(agent: server.KubeletServer, stub: registration_v1_grpc.RegistrationStub) -> None:
    state = agent.status()
    assert not state.registered
    assert str(agent.paths.registration) in state.error

    with pytest.raises(grpc.RpcError) as failed:
        stub.NotifyRegistrationStatus(
            registration_v1.RegistrationStatus(plugin_registered=False, error="endpoint\nalready registered"),
            timeout=30,
        )
    assert "endpoint already registered" in str(failed.value.details())
    state = agent.status()
    assert (state.registered, state.error) == (False, "Kubelet refused the driver: endpoint already registered")

    stub.NotifyRegistrationStatus(registration_v1.RegistrationStatus(plugin_registered=True), timeout=30)
    state = agent.status()
    assert (state.registered, state.error) == (True, "")


def test_refusal_without_reason(agent: server.KubeletServer, stub: registration_v1_grpc.RegistrationStub) -> None:
    with pytest.raises(grpc.RpcError):
        stub.NotifyRegistrationStatus(registration_v1.RegistrationStatus(plugin_registered=False), timeout=30)
    assert agent.status().error == "Kubelet refused the driver: kubelet gave no reason"


def test_status_is_logged_when_it_changes(
    agent: server.KubeletServer, stub: registration_v1_grpc.RegistrationStub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    caplog.clear()
    for _ in range(3):
        stub.NotifyRegistrationStatus(registration_v1.RegistrationStatus(plugin_registered=True), timeout=30)
    assert sum("registered the driver" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ({"v1.DRAPlugin": "v1", "v1beta1.DRAPlugin": "v1beta1"}, "v1"),
        ({"v1beta1.DRAPlugin": "v1beta1"}, "v1beta1"),
    ],
)
def test_newest_version_that_kubelet_knows_is_used(
    root: Path, agent: server.KubeletServer, services: Mapping[str, kubelet_client.Version], expected: str
) -> None:
    with standin(root, services) as node:
        (info,) = node.wait_registered(DRIVER)
        assert agent.status().registered
        assert node.chosen(DRIVER) == (info, expected)
        assert node.prepare(DRIVER, [CLAIM]) == {CLAIM.uid: kubelet_side.prepared(CLAIM)}


def test_kubelet_that_knows_none_of_the_versions(root: Path, agent: server.KubeletServer) -> None:
    with standin(root, {"v2.DRAPlugin": "v1"}) as node:
        assert eventually(lambda: "none of the services" in agent.status().error)
        assert not agent.status().registered
        with pytest.raises(kubelet_client.KubeletError, match=f"DRA driver {DRIVER} is not registered"):
            node.prepare(DRIVER, [CLAIM])


def test_socket_that_was_lost_is_registered_again(
    root: Path, agent: server.KubeletServer, caplog: pytest.LogCaptureFixture
) -> None:
    with standin(root) as node:
        (first,) = node.wait_registered(DRIVER)
        agent.paths.registration.unlink()
        # Kubelet says nothing when it unregisters: the agent knows from the socket, until kubelet registers it again.
        assert eventually(lambda: "was removed by somebody else" in caplog.text)
        assert eventually(lambda: agent.status().registered)
        node.wait_registered(DRIVER)
        assert node.prepare(DRIVER, [CLAIM])
        assert node.plugins(DRIVER) == (first,)


def test_state_while_the_socket_is_lost(root: Path, agent: server.KubeletServer) -> None:
    channel = kubelet_client.open_channel(agent.paths.registration)
    stub = registration_v1_grpc.RegistrationStub(channel)
    stub.NotifyRegistrationStatus(registration_v1.RegistrationStatus(plugin_registered=True), timeout=30)
    assert agent.status().registered
    agent.paths.registration.unlink()
    assert eventually(lambda: "was removed by somebody else" in agent.status().error)
    assert not agent.status().registered
    channel.close()


def test_kubelet_restarts(root: Path, agent: server.KubeletServer) -> None:
    with standin(root) as node:
        node.wait_registered(DRIVER)
        node.restart()
        node.wait_registered(DRIVER)
        assert agent.status().registered
        assert node.prepare(DRIVER, [CLAIM])


def test_agent_restarts(root: Path) -> None:
    with standin(root) as node:
        for _ in range(2):
            agent = started(root)
            node.wait_registered(DRIVER)
            assert node.prepare(DRIVER, [CLAIM])
            agent.stop()
            node.wait_registered(DRIVER, instances=0)
            with pytest.raises(kubelet_client.KubeletError, match="is not registered"):
                node.prepare(DRIVER, [CLAIM])


def test_rolling_update(root: Path) -> None:
    with standin(root) as node:
        old = started(root, pod_uid="old")
        node.wait_registered(DRIVER)
        new = started(root, pod_uid="new")
        node.wait_registered(DRIVER, instances=2)
        assert node.chosen(DRIVER)[0].endpoint == new.paths.service
        old.stop()
        node.wait_registered(DRIVER)
        assert node.prepare(DRIVER, [CLAIM])
        # The end of the old one's stream empties the health of the driver; the new one fills it again without being asked.
        assert node.health.wait_for(DRIVER, bool, timeout_s=30)
        new.stop()
