# SPDX-License-Identifier: Apache-2.0
"""What upstream's own allocator gave away of divided GPUs, recorded by `hack/oracle mig --record`, prepared by an agent on a mock machine.

- every device that was allocated is published, and the published counters admit it beside those that were held then
- every allocation is prepared, and nothing is refused
- the mock has exactly the instances of the claims after each step, and none at the end; files and rows are gone with their claims
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from discovery.mock import live
from driver import values
from driver.prepare import store
from hack.judges import mig, mignode
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

RECORDED = Path(__file__).parent / "allocations.json"
MACHINES: Mapping[str, list[dict[str, Any]]] = json.loads(RECORDED.read_text(encoding="utf-8"))["machines"]


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def test_the_record_is_of_machines_that_differ() -> None:
    assert set(MACHINES) == {"dgx-h100", "dgx-a100-divided", "rtx-pro-4"}
    for steps in MACHINES.values():
        names = {name for step in steps for _, name in step.get("gets", ())}
        assert sum(values.gpu_of(name) != name for name in names) > 10


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_what_was_allocated_is_prepared(node: agents.Node, tmp_path: Path, machine: str) -> None:
    configuration = tmp_path / "agent.yaml"
    configuration.write_text(mignode.CONFIGURATION, encoding="utf-8")
    node.start("--config", str(configuration), mock=mig.place(machine))
    kubelet = node.kubelet()
    kubelet.wait_registered(values.DRIVER_NAME, timeout_s=agents.WAIT_S)
    slices = agents.until(node.slices, "slices")
    counters = Counters(slices)
    refs: dict[int, tuple[values.ClaimRef, list[str]]] = {}
    for number, step in enumerate(MACHINES[machine]):
        if "ends" in step:
            ref, names = refs.pop(step["ends"])
            assert kubelet.unprepare(values.DRIVER_NAME, [ref])[ref.uid] == values.Unprepared()
            node.api.remove("resourceclaims", f"{ref.namespace}/{ref.name}")
            counters.give_back(names)
        else:
            names = [name for _, name in step["gets"]]
            counters.take(names)
            ref = allocated(node, f"claim-{number}", step)
            answer = kubelet.prepare(values.DRIVER_NAME, [ref])[ref.uid]
            assert isinstance(answer, values.Prepared), answer
            assert sorted(device.device for device in answer.devices) == sorted(names)
            refs[number] = ref, names
        parts = {mignode.Place.of(name) for _, names in refs.values() for name in names if values.gpu_of(name) != name}
        agents.until(lambda parts=parts: instances(node) == parts, f"{len(parts)} instances")  # type: ignore[misc]
    assert refs == {}
    assert node.cdi_files() == []
    assert store.read_rows(node.state_dir) == ()
    assert [body["spec"] for body in node.slices()] == [body["spec"] for body in slices]


def allocated(node: agents.Node, name: str, step: Mapping[str, Any]) -> values.ClaimRef:
    """A claim as it was recorded."""
    results = [
        {"request": request, "driver": values.DRIVER_NAME, "pool": agents.NODE, "device": device}
        for request, device in step["gets"]
    ]
    stored = node.api.seed(
        "resourceclaims",
        {
            "metadata": {"name": name, "namespace": agents.NAMESPACE},
            "spec": {"devices": step["asks"]},
            "status": {"allocation": {"devices": {"results": results}}},
        },
    )
    return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=agents.NAMESPACE, name=name)


def instances(node: agents.Node) -> set[mignode.Place]:
    """The instances of the mock."""
    nvml = live.LiveFile(node.mock_dir).read().nvml
    assert nvml is not None
    return {
        mignode.Place(values.gpu_device_name(gpu.pci), one.profile_id, one.placement.start)
        for gpu in nvml.gpus
        if gpu.mig is not None
        for one in gpu.mig.instances
    }


class Counters:
    """What is left of the published counters; a device without counters can be had once."""

    def __init__(self, slices: list[dict[str, Any]]) -> None:
        self._left = {
            (shared["name"], name): int(counter["value"])
            for body in slices
            for shared in body["spec"].get("sharedCounters", ())
            for name, counter in shared["counters"].items()
        }
        self._takes = {
            device["name"]: {
                (taken["counterSet"], name): int(counter["value"])
                for taken in device.get("consumesCounters", ())
                for name, counter in taken["counters"].items()
            }
            or {("", device["name"]): 1}
            for body in slices
            for device in body["spec"].get("devices", ())
        }
        self._left |= {key: 1 for takes in self._takes.values() for key in takes if key not in self._left}

    def take(self, names: list[str]) -> None:
        for name in names:
            for key, amount in self._takes[name].items():
                self._left[key] -= amount
                assert self._left[key] >= 0, (name, key)

    def give_back(self, names: list[str]) -> None:
        for name in names:
            for key, amount in self._takes[name].items():
                self._left[key] += amount
