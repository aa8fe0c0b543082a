# SPDX-License-Identifier: Apache-2.0
"""What a person sees who looks into a node: the commands inside the agent's container, and `kubectl describe`.

- `nearfield claims`: who has which GPU; `devices`: what the node offers; `topo`: how it is wired; `slices`: what is published;
- a GPU that is sick: named with the reason by `devices` and `topo`;
- they answer while the agent runs, and disturb nothing;
- the pod and the Node say by name which GPUs are meant.
"""

from __future__ import annotations

import json

from discovery import address
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


def nearfield(site: Site, *arguments: str) -> str:
    """The output of a command that is run in the agent's container."""
    pod = site.agent.pod()["metadata"]["name"]
    where = ("-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER)
    return site.cluster.kubectl("exec", *where, "--", "nearfield", *arguments)


def document(site: Site, *arguments: str) -> Json:
    """The same for programs."""
    found: Json = json.loads(nearfield(site, *arguments, "-o", "json"))
    return found


def test_claims_says_who_has_which_gpu_and_disturbs_nothing(site: Site, space: Space) -> None:
    assert document(site, "claims")["items"] == []
    space.create(make.claim("mine", make.request(count=2)), make.pod("p", claims={"gpu": "mine"}))
    space.running("p")
    slices, restarts = site.agent.slices(), site.agent.restarts()
    (entry,) = document(site, "claims")["items"]
    assert (entry["namespace"], entry["name"], entry["state"]) == (space.name, "mine", "completed")
    assert [item["device"] for item in entry["devices"]] == list(space.devices("p"))
    table = nearfield(site, "claims")
    for words in (space.name, "mine", *space.devices("p")):
        assert words in table, table
    assert (site.agent.slices(), site.agent.restarts()) == (slices, restarts)
    assert site.agent.readyz() == (200, "ok\n")
    assert len(site.disk.record()) == 1


def test_devices_and_topo_tell_of_the_machine_that_the_agent_looks_at(site: Site) -> None:
    names = [item["name"] for item in document(site, "devices")["items"]]
    assert names == [item["name"] for item in site.agent.devices()]
    picture = nearfield(site, "topo")
    assert all(gpu.address in picture for gpu in site.disk.gpus()), picture


def test_a_sick_gpu_is_named_with_the_reason(site: Site) -> None:
    gpu, *others = site.disk.gpus()
    faults.apply(site.disk.machine, [Fault(kind=Kind.GPU_LOST, target=address.parse(gpu.address))])
    try:
        table = nearfield(site, "devices")
        assert [other.device in table for other in others] == [True] * len(others), table
        assert gpu.device not in table, table
        for text in (table, nearfield(site, "topo")):
            told = " ".join(text.split())
            assert gpu.address in told, told
            assert "gpu-not-ready" in told, told
            assert "nvidia-smi --gpu-reset" in told, told
    finally:
        faults.apply(site.disk.machine, ())


def test_slices_says_what_is_published(site: Site) -> None:
    stored = [device["name"] for device in site.agent.devices()]
    told = [device["name"] for item in document(site, "slices")["items"] for device in item["spec"]["devices"]]
    assert told == stored
