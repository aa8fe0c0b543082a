# SPDX-License-Identifier: Apache-2.0
"""The whole agent as a process: real sockets, real HTTP, real files, a mock machine.

Aspects: from wires to a prepared claim and back; what it says of itself; restart; the API server away; kubelet wiping; a
GPU that falls off; two instances; bad input; the end.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import pytest
from prometheus_client import parser

from discovery.address import parse
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


def nodes_of(node: agents.Node, name: str) -> list[str]:
    """Device nodes of a claim's CDI file."""
    spec = json.loads((node.cdi_dir / name).read_text(encoding="utf-8"))
    return [entry["path"] for device in spec["devices"] for entry in device["containerEdits"]["deviceNodes"]]


def test_from_the_wires_to_a_prepared_claim_and_back(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    devices = node.wait_for_devices(8)
    assert devices[0]["attributes"]["productName"] == {"string": "NVIDIA L40S"}
    assert all(body["metadata"]["ownerReferences"][0]["name"] == agents.NODE for body in node.slices())

    claim = node.claim("c1", devices[2]["name"], devices[3]["name"])
    (answer,) = kubelet.prepare(DRIVER, [claim]).values()
    assert isinstance(answer, values.Prepared)
    assert [device.device for device in answer.devices] == [devices[2]["name"], devices[3]["name"]]
    assert [device.request_names for device in answer.devices] == [("gpu",), ("gpu",)]
    assert nodes_of(node, f"{DRIVER}_{claim.uid}.json") == ["/dev/nvidia2", "/dev/nvidia3"]
    assert kubelet.prepare(DRIVER, [claim])[claim.uid] == answer

    agents.until(agent.ready, "ready")
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    assert not (node.cdi_dir / f"{DRIVER}_{claim.uid}.json").exists()


def test_a_container_gets_all_device_nodes_on_a_machine_that_has_none(node: agents.Node) -> None:
    """As a runtime reads it: the device nodes of all CDI devices that were named, every one backed by /dev/null."""
    node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Prepared)
    named = {
        f"{spec['kind']}={device['name']}": device["containerEdits"].get("deviceNodes", [])
        for spec in (json.loads(path.read_text(encoding="utf-8")) for path in node.cdi_dir.glob("*.json"))
        for device in spec["devices"]
    }
    (device,) = answer.devices
    nodes = {entry["path"]: entry["hostPath"] for name in device.cdi_device_ids for entry in named[name]}
    companions = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
    assert nodes == {f"/dev/{name}": "/dev/null" for name in ("nvidia0", *companions)}


def test_one_bad_claim_does_not_stop_the_good_one_beside_it(node: agents.Node) -> None:
    node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    first, second, third = [device["name"] for device in node.wait_for_devices(8)][:3]
    good = node.claim("good", first)
    foreign_pool = node.claim("pool", second, pool="n2")
    unknown = node.claim("unknown", "gpu-ffff-00-00-0")
    replaced = values.ClaimRef(uid=values.ClaimUid("no-such-uid"), namespace=agents.NAMESPACE, name="good")
    taken = node.claim("taken", third)
    assert isinstance(kubelet.prepare(DRIVER, [taken])[taken.uid], values.Prepared)

    answers = kubelet.prepare(DRIVER, [good, foreign_pool, unknown, replaced])

    assert set(answers) == {good.uid, foreign_pool.uid, unknown.uid, replaced.uid}
    assert isinstance(answers[good.uid], values.Prepared)
    for ref, word in ((foreign_pool, "n2"), (unknown, "gpu-ffff-00-00-0"), (replaced, "UID")):
        answer = answers[ref.uid]
        assert isinstance(answer, values.Failed)
        assert word in answer.message
    assert node.cdi_files() == sorted(f"{DRIVER}_{ref.uid}.json" for ref in (good, taken))
    agents.until(
        lambda: (
            {
                event["regarding"]["name"] if "regarding" in event else event["involvedObject"]["name"]
                for event in node.api.objects("events")
            }
            >= {"pool", "unknown"}
        ),
        "events on the claims",
    )


def test_metrics_are_what_prometheus_reads(node: agents.Node) -> None:
    agent = node.start()
    node.wait_for_devices(8)
    # Its slice stands before it has the answer to its write, and a scrape does not wait for long for a reading of the GPUs.
    for sample in ("nearfield_slices_published 1.0", "nearfield_gpu_memory_used_bytes{"):
        agents.until(lambda wanted=sample: wanted in agent.get("/metrics")[1], sample)  # type: ignore[misc]
    status, text = agent.get("/metrics")
    assert status == 200
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert len(families["nearfield_device_info"].samples) == 8
    assert len(families["nearfield_gpu_memory_used_bytes"].samples) == 8
    assert families["nearfield_slices_published"].samples[0].value == 1


def test_what_is_odd_about_publishing_is_shown_to_people(node: agents.Node) -> None:
    config = node.state_dir.parent / "config.yaml"
    config.write_text(
        "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\npublish: {numaNode: list}\n", encoding="utf-8"
    )
    agent = node.start("--config", str(config))
    node.wait_for_devices(8)
    agents.until(lambda: 'nearfield_findings{severity="warning"} 1.0' in agent.get("/metrics")[1], "a Finding")
    agents.until(lambda: "(lists-not-kept)" in agent.said(), "a line about it")
    assert "DRAListTypeAttributes" in agent.get("/readyz")[1]


def test_readyz_says_what_is_missing(node: agents.Node) -> None:
    agent = node.start()
    node.wait_for_devices(8)
    status, text = agent.get("/readyz")
    assert status == 503
    assert "ubelet" in text
    assert agent.get("/healthz")[0] == 200
    node.kubelet().wait_registered(DRIVER)
    agents.until(agent.ready, "ready once kubelet is there")


def test_restart_with_nothing_changed_writes_nothing(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    node.wait_for_devices(8)
    agents.until(agent.ready, "ready")
    claim = node.claim("c1", node.devices()[0]["name"])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    writes = node.api.writes("resourceslices")
    assert agent.terminate() == 0

    again = node.start()
    agents.until(again.ready, "ready again")
    assert node.api.writes("resourceslices") == writes
    assert kubelet.prepare(DRIVER, [claim])[claim.uid] == answer


def test_end_takes_the_sockets_along_and_leaves_slices_and_files(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    kubelet.prepare(DRIVER, [claim])
    agent.process.send_signal(signal.SIGHUP)
    agents.until(lambda: "SIGHUP" in agent.said(), "a word about the signal that changes nothing")
    assert agent.terminate() == 0
    assert [path for path in node.kubelet_dir.rglob("*.sock*") if path.is_socket()] == []
    assert len(node.devices()) == 8
    assert node.cdi_files() == [f"{DRIVER}_{claim.uid}.json"]
    assert "Traceback" not in agent.said()


def test_prepare_waits_for_an_api_server_that_is_away(node: agents.Node) -> None:
    node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    node.api.faults.inject(
        apiserver_faults.Refuse(503, "ServiceUnavailable"), verb="get", resource="resourceclaims", times=3
    )
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)


def test_prepare_outlasts_a_restart_of_the_api_server(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    node.api.stop()
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: kubelet.prepare(DRIVER, [claim])[claim.uid])
        agents.until(lambda: "Waiting: " in agent.said(), "the Prepare waits")
        node.api.start()  # which refuses everything at first, as it knows no rights yet
        assert isinstance(answer.result(agents.WAIT_S), values.Prepared)


def test_sockets_serve_before_there_is_an_api_server(node: agents.Node) -> None:
    node.api.stop()
    agent = node.start()
    node.kubelet().wait_registered(DRIVER)
    assert agent.get("/readyz")[0] == 503
    node.api.start()
    node.wait_for_devices(8)
    agents.until(agent.ready, "ready")


def test_slices_that_kubelet_wipes_are_back(node: agents.Node) -> None:
    agent = node.start()
    before = [body["metadata"]["uid"] for body in (node.wait_for_devices(8) and node.slices())]
    for body in node.slices():
        node.api.remove("resourceslices", body["metadata"]["name"])
    agents.until(lambda: node.slices() and [body["metadata"]["uid"] for body in node.slices()] != before, "new slices")
    assert agent.process.poll() is None


def test_gpu_that_falls_off_the_bus_stays_while_it_is_held_and_leaves_after(node: agents.Node) -> None:
    node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    held, idle = [device["name"] for device in node.wait_for_devices(8)][:2]
    claim = node.claim("c1", held)
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    addresses = [parse(re.sub(r"^gpu-(\w+)-(\w+)-(\w+)-(\w+)$", r"\1:\2:\3.\4", name)) for name in (held, idle)]
    faults.apply(node.mock_dir, [fault.Fault(kind=fault.Kind.FALLEN_OFF, target=target) for target in addresses])

    def left() -> dict[str, list[dict[str, str]]] | None:
        """The taints of the devices that are left, once the loss of both was seen."""
        taints = {device["name"]: device.get("taints", []) for device in node.devices()}
        return taints if len(taints) == 7 and taints.get(held) else None

    taints = agents.until(left, "seven devices, of which one is tainted")
    assert idle not in taints
    (taint,) = taints[held]
    assert (taint["key"], taint["effect"]) == (f"{DRIVER}/absent", "NoSchedule")

    late = node.claim("c2", idle)
    answer = kubelet.prepare(DRIVER, [late])[late.uid]
    assert isinstance(answer, values.Failed)

    # Who was prepared is let go, and so is its place in the slices once no claim is allocated to it either.
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c1")
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c2")
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    assert held not in {device["name"] for device in node.wait_for_devices(6)}

    faults.apply(node.mock_dir, [])
    healed = {device["name"]: device for device in node.wait_for_devices(8)}
    agents.until(lambda: all("taints" not in device for device in node.devices()), "no taint")
    assert {held, idle} <= set(healed)


def test_health_stream_tells_kubelet_of_a_lost_gpu(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    held = node.wait_for_devices(8)[0]["name"]
    claim = node.claim("c1", held)
    kubelet.prepare(DRIVER, [claim])

    def status() -> str | None:
        found = kubelet.health.devices(DRIVER).get((agents.NODE, held))
        return None if found is None else str(found.status)

    agents.until(lambda: status() == "HEALTHY", "healthy")
    target = parse(re.sub(r"^gpu-(\w+)-(\w+)-(\w+)-(\w+)$", r"\1:\2:\3.\4", held))
    faults.apply(node.mock_dir, [fault.Fault(kind=fault.Kind.GPU_LOST, target=target)])
    agents.until(lambda: status() == "UNHEALTHY", "unhealthy")
    assert 'nearfield_health_events_total{kind="unhealthy"} 1.0' in agent.get("/metrics")[1]


def test_hung_nvml_stops_no_prepare(node: agents.Node) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    faults.apply(node.mock_dir, [fault.Fault(kind=fault.Kind.NVML_HANG)])
    assert isinstance(kubelet.prepare(DRIVER, [claim])[claim.uid], values.Prepared)
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    assert agent.terminate() == 0


def test_two_instances_side_by_side_as_in_a_rolling_update(node: agents.Node) -> None:
    old = node.start("--pod-uid", "11111111-1111-1111-1111-111111111111")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    names = [device["name"] for device in node.wait_for_devices(8)]
    agents.until(old.ready, "the old one ready")
    first = node.claim("c1", names[0])
    assert isinstance(kubelet.prepare(DRIVER, [first])[first.uid], values.Prepared)
    writes = node.api.writes("resourceslices")

    new = node.start("--pod-uid", "22222222-2222-2222-2222-222222222222")
    kubelet.wait_registered(DRIVER, instances=2)
    agents.until(new.ready, "the new one ready")
    thief = node.claim("thief", names[0])
    second = node.claim("c2", names[1])
    assert isinstance(kubelet.prepare(DRIVER, [second])[second.uid], values.Prepared)
    assert old.terminate() == 0
    assert isinstance(kubelet.unprepare(DRIVER, [first])[first.uid], values.Unprepared)
    assert isinstance(kubelet.prepare(DRIVER, [thief])[thief.uid], values.Prepared)
    assert node.api.writes("resourceslices") == writes


@pytest.mark.parametrize(
    ("arguments", "mock", "word"),
    [
        (["--log-level", "loud"], "l40s-8-pcie", "loud"),
        (["--sysfs", "/sys"], "l40s-8-pcie", "--sysfs"),
        ([], "no-such-machine", "no-such-machine"),
        (["--config", "/nonexistent/config.yaml"], "l40s-8-pcie", "/nonexistent/config.yaml"),
    ],
)
def test_bad_input_ends_it_with_status_2_and_names_it(
    node: agents.Node, arguments: list[str], mock: str, word: str
) -> None:
    agent = node.start(*arguments, mock=mock)
    assert agent.process.wait(agents.WAIT_S) == 2
    assert word in agent.said()
    assert "Traceback" not in agent.said()


def damage(record: Path) -> None:
    """Both the file and its log: after a kill the log alone holds everything, and heals the file."""
    for path in (record, record.with_name("record.db-wal")):
        path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)


def put_another(record: Path) -> None:
    """An intact database of somebody else."""
    for path in record.parent.glob("record.db*"):
        path.unlink()
    with contextlib.closing(sqlite3.connect(record)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()


@pytest.mark.parametrize("spoil", [damage, put_another])
def test_a_record_that_is_none_is_moved_aside_and_the_claims_are_found_again(
    node: agents.Node, spoil: Callable[[Path], None]
) -> None:
    agent = node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    claim = node.claim("c1", node.wait_for_devices(8)[0]["name"])
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    agent.kill()
    spoil(node.state_dir / "record.db")

    agent = node.start()
    kubelet.wait_registered(DRIVER)

    def again() -> values.Prepared | None:
        # Kubelet has the socket of the killed agent until it finds the new one in its place.
        with contextlib.suppress(kubelet_client.KubeletError):
            got = kubelet.prepare(DRIVER, [claim])[claim.uid]
            return got if isinstance(got, values.Prepared) else None
        return None

    assert agents.until(again, "the claim answered again") == answer
    assert list(node.state_dir.glob("*.damaged-*"))
    assert "nearfield_record_rebuilt_total 1.0" in agent.get("/metrics")[1]
    agents.until(
        lambda: any(
            (event["reason"], event["involvedObject"]["kind"]) == ("RecordRebuilt", "Node")
            for event in node.api.objects("events")
        ),
        "an Event on the Node",
    )
