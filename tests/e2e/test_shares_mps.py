# SPDX-License-Identifier: Apache-2.0
"""Shares that MPS v3 keeps apart, with the supervisor of our manifests and a stand-in for nvidia-cuda-mps-control, on a node whose cgroups
are of version 1, so that the driver limits no memory by them.

- no level by cgroup there, and none by MPS before there is a supervisor: a Finding says both, and GPUs are handed out whole
- a program in a pod reaches the namespace of its share, with the limits of its share; it sees no other
- the compute mode is exclusive meanwhile, and that of before afterwards
- a share ends: its namespace goes, others stay; the daemon ends with the last one
- a daemon dies, the supervisor is replaced, the agent is killed: what the claims have is in place again, and Events say so
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from driver.mps import shares as mps
from tests.e2e.kit import agent as agents
from tests.e2e.kit import configfile, driverroot, given, left, make, portions, supervisor, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.portions import GIB
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

BUS = "0000:9d:00.0"
GPU = "gpu-0000-9d-00-0"
MACHINE = "dgx-h100-cgroup-v1.yaml"
EXCLUSIVE_PROCESS = 3
"""nvmlComputeMode_t."""


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(
            found,
            machine=MACHINE,
            env={"NEARFIELD_PROBE_INTERVAL": "1s", "NEARFIELD_MPS_DIR": supervisor.FOLDER},
            edit=supervisor.mount,
            sharing=[portions.rule(memory="mps", compute="mps")],
        )
        space = Space(found.api, found.cluster, "programs")
        space.open()
        with driverroot.installed(space):
            yield found


@pytest.fixture(scope="module")
def supervised(site: Site) -> None:
    """With the supervisor, and the GPUs shared."""
    supervisor.apply(site)
    waiting.until(lambda: len(portions.offered(site)) == len(site.disk.gpus()), "the GPUs are shared")


@pytest.fixture
def ready(request: pytest.FixtureRequest) -> None:
    """The supervisor is there, but for the test that is about a node without one."""
    if request.node.originalname != "test_without_a_supervisor":
        request.getfixturevalue("supervised")


@pytest.fixture(name="nothing_left")
def fixture_nothing_left(ready: None, nothing_left: left.Leftovers) -> left.Leftovers:
    """What is offered changes with the supervisor, and is looked at after that."""
    return nothing_left


def ask(space: Space, pod: str, memory: str, compute: int) -> None:
    space.create(make.template(pod, portions.request(memory, compute, bus=BUS)), supervisor.client(pod, claim=pod))


def told(space: Space, pod: str) -> Mapping[str, Any]:
    """What the program in a pod was given by the daemon last."""
    space.running(pod)
    return waiting.until(lambda: answers(space, pod), "the program has its answer")[-1]


def answers(space: Space, pod: str) -> list[Mapping[str, Any]]:
    """All that it was given so far, as often as it began."""
    return [json.loads(line) for line in space.logs(pod).splitlines() if line.startswith('{"server"')]


def anew(space: Space, pod: str) -> int | None:
    """The memory that it was given when it began last, None if it has begun only once."""
    _, *later = answers(space, pod)
    return later[-1]["memory"] if later else None


def namespace(space: Space, pod: str) -> str:
    """That of a pod's share, by its id."""
    (result,) = space.claim_of(pod, "gpu")["status"]["allocation"]["devices"]["results"]
    return mps.Share(device=GPU, uuid="", share_id=result["shareID"], protocol=mps.Protocol.V3).namespace


def compute_mode(site: Site) -> int:
    nvml = json.loads((site.disk.machine / "nvml.json").read_text())["nvml"]
    (gpu,) = (gpu for gpu in nvml["gpus"] if gpu["pci"] == BUS)
    return int(gpu["computeMode"])


def daemons(site: Site) -> dict[str, Json]:
    document = json.loads(supervisor.run(site, "nearfield", "mps", "status", "-o", "json"))
    return {item["device"]: item for item in document["daemons"]}


def test_without_a_supervisor(site: Site, space: Space) -> None:
    assert len(site.agent.devices()) == len(site.disk.gpus())
    assert not portions.offered(site)
    pod = site.agent.pod()["metadata"]["name"]
    text = site.cluster.kubectl(
        "exec", "-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER, "--", "nearfield", "devices"
    )
    (line, *_) = (line for line in text.splitlines() if "sharing-not-possible" in line and BUS in line)
    assert "cgroup v1" in line
    assert "no MPS supervisor answers" in line
    assert given.get(site, space, "whole", make.request(where=portions.BUS.format(BUS))) == (GPU,)


def test_programs_reach_their_namespaces(site: Site, space: Space) -> None:
    for device in portions.offered(site):
        enforced = (device["attributes"][name]["string"] for name in ("memoryEnforcement", "computeEnforcement"))
        assert tuple(enforced) == ("mps", "mps")
    ask(space, "p", "20Gi", 25)
    ask(space, "q", "10Gi", 50)
    for pod, memory, compute in (("p", 20 * GIB, 25), ("q", 10 * GIB, 50)):
        answer = told(space, pod)
        assert (answer["namespace"], answer["memory"], answer["threads"]) == (namespace(space, pod), memory, compute)
        seen = space.exec(pod, "python3", "-c", f"import os; print(*os.walk('{supervisor.FOLDER}'))")
        assert namespace(space, pod) in seen
        assert namespace(space, "q" if pod == "p" else "p") not in seen
    assert compute_mode(site) == EXCLUSIVE_PROCESS
    assert len(daemons(site)[GPU]["shares"]) == 2
    space.delete("Pod", "p")
    waiting.until(lambda: len(daemons(site)[GPU]["shares"]) == 1, "its share is gone")
    assert space.get("Pod", "q")["status"]["phase"] == "Running"
    assert compute_mode(site) == EXCLUSIVE_PROCESS
    space.delete("Pod", "q")
    waiting.until(lambda: not daemons(site), "the daemon has ended")
    waiting.until(lambda: compute_mode(site) == 0, "the compute mode is that of before")


def test_who_has_all_the_memory_is_a_client_without_limits(site: Site, space: Space) -> None:
    space.create(make.template("all", portions.request(bus=BUS)), supervisor.client("p", claim="all"))
    answer = told(space, "p")
    assert (answer["memory"], answer["threads"]) == (None, None)


def test_the_daemon_dies(site: Site, space: Space) -> None:
    ask(space, "p", "20Gi", 25)
    told(space, "p")
    code = (
        "import os, signal, pathlib\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/comm'):\n"
        "    if path.read_text().startswith('nvidia-cuda-mps'):\n"
        "        os.kill(int(path.parent.name), signal.SIGKILL)\n"
    )
    supervisor.run(site, "python3", "-c", code)
    claim = space.claim_of("p", "gpu")["metadata"]["name"]
    site.api.wait_event("ResourceClaim", claim, namespace=space.name, text="Mps")
    ask(space, "q", "10Gi", 50)
    assert told(space, "q")["threads"] == 50
    waiting.until(lambda: len(daemons(site)[GPU]["shares"]) == 2, "the share of before is in place again")
    # One that began before the limits were in place again was ended once more.
    waiting.until(lambda: anew(space, "p") == 20 * GIB, "its program has begun anew, with its limit")


def test_the_supervisor_is_replaced(site: Site, space: Space) -> None:
    ask(space, "p", "20Gi", 25)
    told(space, "p")
    before = supervisor.pod(site)["metadata"]
    site.api.delete("Pod", before["name"], agents.NAMESPACE)
    waiting.until(lambda: supervisor.pod(site)["metadata"]["uid"] != before["uid"], "there is another one")
    supervisor.apply(site)
    waiting.until(lambda: GPU in daemons(site), "the share is placed again")
    ask(space, "q", "10Gi", 50)
    answer = told(space, "q")
    assert (answer["memory"], answer["threads"]) == (10 * GIB, 50)
    waiting.until(lambda: anew(space, "p") == 20 * GIB, "the other program has begun anew, with its limit")
    claim = space.claim_of("p", "gpu")["metadata"]["name"]
    site.api.wait_event("ResourceClaim", claim, namespace=space.name, text="Mps")


def test_the_agent_is_killed(site: Site, space: Space) -> None:
    """No program notices."""
    ask(space, "p", "20Gi", 25)
    told(space, "p")
    site.agent.kill_and_wait()
    assert space.get("Pod", "p")["status"]["phase"] == "Running"
    ask(space, "q", "10Gi", 50)
    assert told(space, "q")["threads"] == 50
    for pod in ("p", "q"):
        space.delete("Pod", pod)
    waiting.until(lambda: not daemons(site), "the daemon has ended")
    waiting.until(lambda: compute_mode(site) == 0, "the compute mode is that of before")
