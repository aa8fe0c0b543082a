# SPDX-License-Identifier: Apache-2.0
"""The whole agent as a process, in trouble that no part of it sees alone.

Aspects: the end while something hangs; its state taken away from under it; hardware that cannot be read, at all or in part;
every kind of bad claim at once; a node without a GPU.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import pytest

from discovery.mock import fault, faults
from driver import values
from driver.standin import apiserver_faults, kubelet_client
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def test_an_agent_that_waits_for_the_sockets_of_another_ends_when_told_and_leaves_them_alone(node: agents.Node) -> None:
    first = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    names = [device["name"] for device in node.wait_for_devices(8)]
    second = node.start()
    agents.until(lambda: "has epoch" in second.said(), "the second at the sockets")
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(agents.WAIT_S) == 0
    assert "another running instance" not in second.said()

    claim = node.claim("c1", names[0])
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    node.api.remove("resourceslices", node.slices()[0]["metadata"]["name"])
    node.wait_for_devices(8)
    assert first.terminate() == 0


@pytest.mark.parametrize("folder", ["s/locks", "s"])
def test_an_agent_whose_state_is_removed_starts_anew_with_all_claims(node: agents.Node, folder: str) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Prepared)
    shutil.rmtree(node.directory / folder)
    assert agent.process.wait(agents.WAIT_S) == 1
    assert f"state folder {node.state_dir} was removed" in agent.said()
    assert "Traceback" not in agent.said()

    node.start()

    def again() -> values.Prepared | values.Failed | None:
        with contextlib.suppress(kubelet_client.KubeletError):
            return kubelet.prepare(DRIVER, [claim])[claim.uid]
        return None

    assert agents.until(again, "the claim answered again") == answer


def test_a_start_with_hung_hardware_tells_kubelet_that_health_is_unknown_and_still_answers_repeats(
    node: agents.Node,
) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    names = [device["name"] for device in node.wait_for_devices(8)]
    claim = node.claim("c1", names[0])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    writes = node.api.writes("resourceslices")
    assert agent.terminate() == 0
    kubelet.stop()
    faults.apply(node.mock_dir, [fault.Fault(kind=fault.Kind.NVML_HANG)])

    again = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)

    def unknown() -> bool:
        found = kubelet.health.devices(DRIVER)
        return [str(found[agents.NODE, name].status) for name in names if (agents.NODE, name) in found] == [
            "UNKNOWN"
        ] * 8

    agents.until(unknown, "all devices unknown")
    assert kubelet.prepare(DRIVER, [claim])[claim.uid] == answer
    assert again.get("/readyz")[0] == 503
    assert node.api.writes("resourceslices") == writes
    assert again.terminate() == 0


def test_a_malformed_file_in_sysfs_costs_its_own_gpu_only_and_is_named(node: agents.Node) -> None:
    agent = node.start()
    device = node.wait_for_devices(8)[3]
    address = device["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    vendor = (node.mock_dir / "sys/bus/pci/devices" / address).resolve() / "vendor"
    good = vendor.read_bytes()
    vendor.write_bytes(b"\xff0xzz\n")
    assert device["name"] not in {left["name"] for left in node.wait_for_devices(7)}
    agents.until(lambda: f"{address}/vendor" in agent.said(), "a line that names the file")
    vendor.write_bytes(good)
    assert device in node.wait_for_devices(8)
    assert agent.process.poll() is None
    assert "Traceback" not in agent.said()


def test_a_claim_waits_for_a_driver_that_is_loaded_after_the_agent_has_started(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    names = [device["name"] for device in node.wait_for_devices(8)]
    assert agent.terminate() == 0
    kubelet.stop()
    faults.apply(node.mock_dir, [fault.Fault(kind=fault.Kind.NO_DRIVER)])

    agent = node.start("--probe-interval", "24h")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", names[0])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(kubelet.prepare(DRIVER, [claim])[claim.uid]), daemon=True)
    thread.start()
    agents.until(lambda: "Waiting: " in agent.said(), "the claim waiting")
    faults.apply(node.mock_dir, [])
    thread.join(60)
    assert isinstance(answers[0], values.Prepared)
    node.wait_for_devices(8)
    assert "Traceback" not in agent.said()


HOSTILE = "x" * 10_240
NESTED: Any = None
for _ in range(100):
    NESTED = {"a": [NESTED]}


def result(device: str, **more: Any) -> dict[str, Any]:
    return {"request": "gpu", "driver": DRIVER, "pool": agents.NODE, "device": device, **more}


def config(parameters: Any, *, driver: str = DRIVER) -> list[dict[str, Any]]:
    return [{"source": "FromClaim", "opaque": {"driver": driver, "parameters": parameters}}]


def bad_claims(device: str) -> dict[str, tuple[Any, str]]:
    """Name -> status as somebody may have written it, and what must be said of it."""

    def allocated(*results: Any, **more: Any) -> dict[str, Any]:
        return {"allocation": {"devices": {"results": list(results), **more}}}

    return {
        "foreign-driver": (allocated(result(device, driver="dra.net")), f"allocates no device of driver {DRIVER}"),
        "foreign-pool": (allocated(result(device, pool="n2")), "of pool 'n2', but this node has only pool 'n1'"),
        "foreign-device": (allocated(result("gpu-ffff-00-00-0")), "no GPU of this name is on this node"),
        "missing": (None, "is not allocated"),
        "half-empty": ({"allocation": {}}, f"allocates no device of driver {DRIVER}"),
        "half-result": (allocated({"request": "gpu", "driver": DRIVER}), "results[0].pool is missing, not text"),
        "opaque": (
            allocated(
                result(device), config=config({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"})
            ),
            'kind "GpuConfig", and this driver knows gpu.nearfield.dev/v1alpha1, kind ClaimConfig, only',
        ),
        "opaque-hostile": (
            allocated(result(device), config=config({"apiVersion": HOSTILE, "kind": NESTED})),
            "and kind an object, and this driver knows gpu.nearfield.dev/v1alpha1, kind ClaimConfig, only",
        ),
        "hostile-name": (allocated(result(HOSTILE)), "results[0].device is 'xxx"),
        "hostile-capacity": (allocated(result(device, consumedCapacity=NESTED)), "not an object of quantities"),
    }


def test_every_kind_of_bad_claim_is_named_and_costs_the_good_one_beside_it_nothing(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    mine, other = [device["name"] for device in node.wait_for_devices(8)][:2]

    def seed(name: str, status: Any) -> values.ClaimRef:
        body: dict[str, Any] = {"metadata": {"name": name, "namespace": agents.NAMESPACE}, "spec": {"devices": {}}}
        stored = node.api.seed("resourceclaims", body if status is None else {**body, "status": status})
        return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=agents.NAMESPACE, name=name)

    bad = {seed(name, status): expected for name, (status, expected) in bad_claims(other).items()}
    # Configuration for another driver is that driver's, whatever it holds.
    allocation = {"devices": {"results": [result(mine)], "config": config({"x": HOSTILE}, driver="dra.net")}}
    good = seed("good", {"allocation": allocation})
    replaced = values.ClaimRef(uid=values.ClaimUid("not-its-uid"), namespace=agents.NAMESPACE, name="good")
    bad[replaced] = "was deleted and made again with UID"

    answers = kubelet.prepare(DRIVER, [*bad, good])
    assert answers.keys() == {ref.uid for ref in (*bad, good)}
    assert isinstance(answers[good.uid], values.Prepared)
    for ref, expected in bad.items():
        answer = answers[ref.uid]
        assert isinstance(answer, values.Failed)
        assert answer.message.startswith(f"ResourceClaim {agents.NAMESPACE}/{ref.name} ")
        assert expected in answer.message
        assert len(answer.message) < 1024
    assert node.cdi_files() == [f"{DRIVER}_{good.uid}.json"]

    def told() -> set[str]:
        return {
            event["involvedObject"]["uid"]
            for event in node.api.objects("events")
            if event.get("reason") == "PrepareFailed"
        }

    agents.until(lambda: told() == {ref.uid for ref in bad}, "an Event on every bad claim")
    assert isinstance(kubelet.prepare(DRIVER, [claim := node.claim("next", other)])[claim.uid], values.Prepared)
    assert agent.process.poll() is None
    assert "Traceback" not in agent.said()


class Waiting(NamedTuple):
    agent: agents.Agent
    fault: apiserver_faults.Injection
    answer: futures.Future[values.Prepared | values.Failed]


@pytest.fixture(name="waiting")
def fixture_waiting(node: agents.Node) -> Iterator[Waiting]:
    """An agent with a Prepare that waits for the API server."""
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    away = apiserver_faults.Refuse(503, "ServiceUnavailable")
    fault = node.api.faults.inject(away, verb="get", resource="resourceclaims")
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: kubelet.prepare(DRIVER, [claim])[claim.uid])
        agents.until(lambda: "Waiting: " in agent.said(), "the Prepare waits")
        yield Waiting(agent, fault, answer)


def test_a_prepare_that_waits_is_answered_before_the_end(node: agents.Node, waiting: Waiting) -> None:
    waiting.agent.process.send_signal(signal.SIGTERM)
    agents.until(
        lambda: "when the claims that wait are prepared" in waiting.agent.said(), "a word about what it waits for"
    )
    waiting.fault.remove()
    assert isinstance(waiting.answer.result(agents.WAIT_S), values.Prepared)
    assert waiting.agent.process.wait(agents.WAIT_S) == 0
    assert [path for path in node.kubelet_dir.rglob("*.sock*") if path.is_socket()] == []


def test_a_prepare_in_its_first_call_is_answered_before_the_end(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    fault = node.api.faults.inject(apiserver_faults.Hang(), verb="get", resource="resourceclaims")
    asked = node.api.count("get", "resourceclaims")
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: kubelet.prepare(DRIVER, [claim])[claim.uid])
        agents.until(lambda: node.api.count("get", "resourceclaims") > asked, "the Prepare asks for its claim")
        agent.process.send_signal(signal.SIGTERM)
        agents.until(lambda: "when the claims that wait are prepared" in agent.said(), "a word about what it waits for")
        fault.remove()
        assert isinstance(answer.result(agents.WAIT_S), values.Prepared)
    assert agent.process.wait(agents.WAIT_S) == 0


def test_a_second_signal_ends_it_though_a_prepare_waits(waiting: Waiting) -> None:
    waiting.agent.process.send_signal(signal.SIGTERM)
    agents.until(
        lambda: "when the claims that wait are prepared" in waiting.agent.said(), "a word about what it waits for"
    )
    waiting.agent.process.send_signal(signal.SIGTERM)
    assert waiting.agent.process.wait(agents.WAIT_S) == 0
    refused = waiting.answer.exception(agents.WAIT_S) or waiting.answer.result()
    assert isinstance(refused, kubelet_client.KubeletError | values.Failed)
