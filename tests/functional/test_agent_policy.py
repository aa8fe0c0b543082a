# SPDX-License-Identifier: Apache-2.0
"""The whole agent while its configuration file changes: a mock machine, the stand-in API server and kubelet.

- SIGHUP, an edit, and the link of a ConfigMap put new rules into effect; section publish too
- an invalid file changes nothing and is told of everywhere, and the next valid one is taken
- a GPU that a claim has, prepared or only allocated, keeps its policy, over a restart too, until it is let go; so does one
  whose parts are held
- rules at the start: a mode that nothing comes of is said; invalid ones end it
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver import values
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
STATIC = HEAD + "sharing:\n- match: {product: '*H100*', count: 4}\n  mode: mig-static\n"
"""Of a machine whose GPUs have MIG and use none: nothing is offered of the first four."""

MACHINE = "dgx-h100"


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def start(node: agents.Node, text: str = HEAD) -> tuple[agents.Agent, Path]:
    path = node.directory / "agent.yaml"
    path.write_text(text, encoding="utf-8")
    return node.start("--config", str(path), mock=MACHINE), path


def names(node: agents.Node) -> set[str]:
    return {device["name"] for device in node.devices()}


def test_rules_are_read_again_on_sighup(node: agents.Node) -> None:
    agent, path = start(node)
    node.wait_for_devices(8)
    path.write_text(STATIC, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    node.wait_for_devices(4)
    agents.until(lambda: "section sharing" in agent.said(), "a line about it")
    agents.until(lambda: agent.said().count("(mig-disabled)") == 4, "why nothing of them is offered")
    path.write_text(HEAD, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    node.wait_for_devices(8)


def test_the_link_that_kubelet_swaps_is_followed(node: agents.Node) -> None:
    folder = node.directory / "etc"
    for generation, text, count in ((1, HEAD, 8), (2, STATIC, 4), (3, HEAD, 8)):
        data = folder / f"..{generation}"
        data.mkdir(parents=True)
        (data / "agent.yaml").write_text(text, encoding="utf-8")
        (folder / "..data_tmp").symlink_to(data.name)
        (folder / "..data_tmp").replace(folder / "..data")
        if generation == 1:
            (folder / "agent.yaml").symlink_to("..data/agent.yaml")
            agent = node.start("--config", str(folder / "agent.yaml"), mock=MACHINE)
        node.wait_for_devices(count)
    assert "config-refused" not in agent.said()


def test_an_invalid_file_changes_nothing_and_is_told_of_everywhere(node: agents.Node) -> None:
    agent, path = start(node, STATIC)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    node.wait_for_devices(4)
    agents.until(agent.ready, "ready")
    assert "nearfield_config_reload_failed 0.0" in agent.get("/metrics")[1]

    path.write_text(STATIC.replace("mig-static", "mig-statik"), encoding="utf-8")
    agents.until(lambda: "nearfield_config_reload_failed 1.0" in agent.get("/metrics")[1], "the metric")
    status, text = agent.get("/readyz")
    assert status == 200
    assert "agent.yaml:5: sharing[0].mode: must be 'exclusive', 'mig-static', 'mig-dynamic' or 'shares'" in text
    agents.until(lambda: "what was read before stays in effect" in agent.said(), "a line about it")
    events = agents.until(
        lambda: [event for event in node.api.objects("events") if event["reason"] == "ConfigRefused"], "an Event"
    )
    assert "sharing[0].mode" in str(events)
    assert len(node.devices()) == 4

    path.write_text(HEAD, encoding="utf-8")
    node.wait_for_devices(8)
    agents.until(lambda: "nearfield_config_reload_failed 0.0" in agent.get("/metrics")[1], "the metric")
    agents.until(lambda: "The configuration file is valid again" in agent.said(), "a line about it")
    agents.until(lambda: agent.get("/readyz")[1].strip() == "ok", "nothing is missing any more")


def test_section_publish_takes_effect_and_section_topology_waits_for_a_restart(node: agents.Node) -> None:
    agent, path = start(node)
    node.wait_for_devices(8)
    path.write_text(
        HEAD + "publish: {numaNode: list}\ntopology: {rails: [{nic: '0000:18:00.0', rail: 7}]}\n", encoding="utf-8"
    )
    agents.until(lambda: "DRAListTypeAttributes" in agent.get("/readyz")[1], "lists that this server takes not")
    agents.until(lambda: "takes a restart of the agent" in agent.get("/readyz")[1], "what waits for a restart")
    agents.until(lambda: "takes a restart of the agent" in agent.said(), "a line about it")
    assert agent.said().count("takes a restart of the agent") == 1


def test_a_gpu_that_is_held_keeps_its_policy_until_it_is_let_go(node: agents.Node) -> None:
    agent, path = start(node)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    held, allocated, *_ = (device["name"] for device in node.wait_for_devices(8))
    prepared = node.claim("prepared", held)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [prepared])[prepared.uid], values.Prepared)
    node.claim("allocated", allocated)

    path.write_text(STATIC, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    offered = {device["name"] for device in node.wait_for_devices(6)}
    assert {held, allocated} <= offered
    assert all("taints" not in device for device in node.devices()), "they are offered, and not as absent"
    for words in ((f"{held} ({prepared})", "then by mig-static"), (f"{allocated} (allocated to a claim)",)):
        agents.until(functools.partial(agent.told, "(sharing-waits)", *words), f"a Finding with {words}")

    # What holds is in the record, and the claims are: a restart changes nothing.
    writes = node.api.writes("resourceslices")
    assert agent.terminate() == 0
    again = node.start("--config", str(path), mock=MACHINE)
    agents.until(lambda: "(sharing-waits)" in again.said(), "the Finding after the restart")
    agents.until(again.ready, "ready")
    assert names(node) == offered
    assert node.api.writes("resourceslices") == writes

    assert isinstance(kubelet.unprepare(values.DRIVER_NAME, [prepared])[prepared.uid], values.Unprepared)
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/prepared")
    agents.until(lambda: names(node) == offered - {held}, "the change of the one that was let go")
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/allocated")
    agents.until(lambda: names(node) == offered - {held, allocated}, "the change of the other")
    assert "Traceback" not in agent.said() + again.said()


def test_a_slice_that_is_held_keeps_its_gpu_divided_until_it_is_let_go(node: agents.Node) -> None:
    """From whole to divided and back, under claims for a part and then for the whole."""
    agent, path = start(node)
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME)
    wholes = {device["name"] for device in node.wait_for_devices(8)}
    divided = HEAD + "sharing:\n- match: {count: 1}\n  mode: mig-dynamic\n  profiles: [3g.40gb]\n"

    path.write_text(divided, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    parts = {device["name"] for device in node.wait_for_devices(10)} - wholes
    assert {name.partition("-mig-")[2] for name in parts} == {"3g-40gb-9-0", "3g-40gb-9-4"}
    gpu = values.gpu_of(min(parts))
    part = node.claim("part", max(parts))
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [part])[part.uid], values.Prepared)

    path.write_text(HEAD, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    agents.until(lambda: f"{max(parts)} ({part})" in agent.said(), "the claim that the change waits for")
    assert names(node) == wholes | parts
    assert isinstance(kubelet.unprepare(values.DRIVER_NAME, [part])[part.uid], values.Unprepared)
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/part")
    agents.until(lambda: names(node) == wholes, "only whole GPUs")

    whole = node.claim("whole", gpu)
    assert isinstance(kubelet.prepare(values.DRIVER_NAME, [whole])[whole.uid], values.Prepared)
    path.write_text(divided, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)
    # It is mig-dynamic without parts until somebody lets it go, and so it may have parts: the whole takes all of its counters.
    agents.until(lambda: names(node) == wholes | parts, "its parts beside the whole that is held")
    (held,) = (device for device in node.devices() if device["name"] == gpu)
    assert held["consumesCounters"]
    assert isinstance(kubelet.unprepare(values.DRIVER_NAME, [whole])[whole.uid], values.Unprepared)
    node.api.remove("resourceclaims", f"{agents.NAMESPACE}/whole")
    assert names(node) == wholes | parts
    assert "Traceback" not in agent.said()


def test_rules_of_the_start_that_come_to_nothing_are_said(node: agents.Node) -> None:
    path = node.directory / "agent.yaml"
    path.write_text(HEAD + "sharing: [{mode: mig-static}]\n", encoding="utf-8")
    agent = node.start("--config", str(path))
    node.wait_for_devices(8)
    assert agents.until(lambda: agent.said().count("(sharing-not-possible)") == 8, "a Finding for each GPU")
    assert "NVIDIA L40S has no MIG: it is offered whole" in agent.said()


def test_invalid_rules_end_the_start(node: agents.Node) -> None:
    agent, _ = start(node, HEAD + "sharing: [{mode: exclusive}, {mode: mig-static}]\n")
    assert agent.process.wait(agents.WAIT_S) == 2
    assert "agent.yaml:3: sharing[1]: has no effect" in agent.said()
