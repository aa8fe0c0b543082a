# SPDX-License-Identifier: Apache-2.0
"""GPUs that are handed out in shares which nothing enforces, on a DGX H100: who gets what, and that it is never more than there is.

- four quarters of a GPU, a fifth that waits; one ends, and it runs; who asks for nothing has a GPU alone
- shares that nothing enforces: said in an Event, once a claim
- several shares in a claim, in several claims of a container, of one GPU and of two
- shares and whole GPUs at once; sharers that are killed; the agent that is killed and updated; three hundred pods, and nothing left
- the policy changes while somebody has a share: it waits for that GPU, and for no other
- what `nearfield devices`, `nearfield claims` and the metrics say of it
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from driver.sharing import shares
from hack.realnode.errors import ClusterError
from tests.e2e.kit import agent as agents
from tests.e2e.kit import configfile, given, load, make, portions, waiting, watched
from tests.e2e.kit.portions import GIB
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import ENDED, Space

BUS = "0000:9d:00.0"
GPU = "gpu-0000-9d-00-0"
SHARING = [portions.rule()]
PODS = 300
UNPLACED = "cannot allocate all claims"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(found, env={"NEARFIELD_PROBE_INTERVAL": "1s"}, sharing=SHARING)
        yield found


def quarter(name: str = "gpu", *, bus: str = BUS) -> object:
    return portions.request("19Gi", 25, name=name, bus=bus)


def ask(space: Space, pod: str, request: object) -> None:
    given.ask(space, pod, request)  # type: ignore[arg-type]


def command(site: Site, *words: str) -> str:
    """What the agent's container answers to a verb."""
    pod = site.agent.pod()["metadata"]["name"]
    return site.cluster.kubectl("exec", "-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER, "--", *words)


def test_four_quarters_and_a_fifth(site: Site, space: Space) -> None:
    names = [f"p{number}" for number in range(4)]
    for name in names:
        ask(space, name, quarter())
    for name in names:
        assert portions.devices(site, space, name) == (GPU,)
    results = [space.claim_of(name, "gpu")["status"]["allocation"]["devices"]["results"][0] for name in names]
    assert len({result["shareID"] for result in results}) == 4
    assert {result["consumedCapacity"]["compute"] for result in results} == {"25"}
    ask(space, "p4", quarter())
    space.pending("p4", saying=UNPLACED)
    space.delete("Pod", "p2")
    assert portions.devices(site, space, "p4") == (GPU,)
    for name in ("p0", "p1", "p3", "p4"):
        space.delete("Pod", name, wait=False)
    ask(space, "alone", portions.request(bus=BUS))
    assert portions.devices(site, space, "alone") == (GPU,)
    (use,) = portions.uses(site, space, "alone")
    assert (use.memory, use.compute, use.memory_limit, use.compute_limit) == (79 * GIB, 100, None, None)
    ask(space, "least", portions.request("1Gi", 5, bus=BUS))
    space.pending("least", saying=UNPLACED)
    space.delete("Pod", "alone")
    assert portions.devices(site, space, "least") == (GPU,)


def test_amounts_are_rounded_up_and_bounded(site: Site, space: Space) -> None:
    ask(space, "odd", portions.request("9500Mi", 7, bus=BUS))
    portions.devices(site, space, "odd")
    (use,) = portions.uses(site, space, "odd")
    assert (use.memory, use.compute) == (10 * GIB, 10)
    assert use.enforcement == shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.NONE)
    ask(space, "too-much", portions.request("80Gi", 5, bus=BUS))
    space.pending("too-much", saying=UNPLACED)


def test_what_nothing_enforces_is_said_once_a_claim(site: Site, space: Space) -> None:
    ask(space, "p", quarter())
    portions.devices(site, space, "p")
    claim = space.claim_of("p", "gpu")["metadata"]["name"]
    told = site.api.wait_event("ResourceClaim", claim, namespace=space.name, text="advi")
    assert told["reason"] == "ShareAdvisory"
    (device,) = {item["name"]: item for item in portions.offered(site) if item["name"] == GPU}.values()
    attributes = device["attributes"]
    assert attributes["memoryEnforcement"] == attributes["computeEnforcement"] == {"string": "none"}


def test_several_shares(site: Site, space: Space) -> None:
    """Of one GPU for two containers; of two GPUs; of two claims in one container."""
    requests = [portions.request("10Gi", 10, name="one"), portions.request("20Gi", 20, name="two")]
    space.create(
        make.template("pair", *requests, constraints=[make.match("uuid")]),
        make.pod(
            "pair",
            claims={"gpu": "template:pair"},
            containers=[make.container(claims=["gpu/one"]), make.container("second", claims=["gpu/two"])],
        ),
    )
    one = portions.devices(site, space, "pair", request_name="one")
    two = portions.devices(site, space, "pair", request_name="two", container="second")
    assert one == two
    assert sorted(use.memory for use in portions.uses(site, space, "pair")) == [10 * GIB, 20 * GIB]
    ask(space, "apart", portions.request("5Gi", 5, count=2))
    assert len(set(portions.devices(site, space, "apart"))) == 2
    space.create(
        make.template("small", portions.request("5Gi", 5, bus=BUS)),
        make.pod("both", claims={"gpu": "template:small", "more": "template:small"}),
    )
    space.running("both")
    seen = space.look("both")
    assert seen.gpu_nodes == (site.disk.gpu(GPU).node,)
    ids = {
        result["shareID"]
        for name in ("gpu", "more")
        for result in space.claim_of("both", name)["status"]["allocation"]["devices"]["results"]
    }
    assert len(ids) == 2


@pytest.mark.timeout(900)
def test_shares_and_whole_gpus_at_once(site: Site, space: Space) -> None:
    """On two GPUs, so that they are in each other's way."""
    two = f'device.attributes["resource.kubernetes.io"].pciBusID in ["{BUS}", "0000:c3:00.0"]'
    asks = [
        portions.request("10Gi", 10, where=[two]),
        portions.request("40Gi", 50, where=[two]),
        portions.request("5Gi", 35, where=[two]),
        make.request(where=two),
    ]
    with (
        portions.Watched(site.disk) as seen,
        load.running(space, workers=6, seconds=0.1, asks=asks, patience_s=400) as pods,
    ):
        pods.more(60, timeout_s=600)
        told = pods.finish()
    assert seen.wrong == []
    assert seen.most > 1
    assert (told.wrong, told.retried) == ([], [])


@pytest.mark.timeout(1500)
def test_three_hundred_pods(site: Site, space: Space) -> None:
    asks = [portions.request("19Gi", 25), portions.request("7Gi", 5), portions.request("39Gi", 50)]
    watched.many_pods(site, space, portions.Watched(site.disk), asks, pods=PODS)


def test_sharers_are_killed(site: Site, space: Space) -> None:
    """Their programs end, and what they had is free."""
    names = [f"p{number}" for number in range(4)]
    for name in names:
        ask(space, name, quarter())
    for name in names:
        portions.devices(site, space, name)
    for name in names[:3]:
        # Its first process ends then as well, and with it all others of the container, this one included.
        with contextlib.suppress(ClusterError):
            space.exec(name, "sh", "-c", "kill -9 -1")
    for name in names[:3]:
        space.api.wait("Pod", name, space.name, until=lambda pod: pod["status"]["phase"] in ENDED, what="ended")
        space.delete("Pod", name, wait=False)
    ask(space, "large", portions.request("57Gi", 75, bus=BUS))
    assert portions.devices(site, space, "large") == (GPU,)
    assert portions.devices(site, space, "p3") == (GPU,)


def test_the_agent_is_killed_and_updated(site: Site, space: Space) -> None:
    ask(space, "p0", quarter())
    portions.devices(site, space, "p0")
    before = (site.agent.restarts(), portions.uses(site, space, "p0"))
    site.agent.kill()
    ask(space, "p1", quarter())
    site.agent.wait_restarted(before[0])
    space.retry("p1")
    portions.devices(site, space, "p1")
    site.agent.roll()
    ask(space, "p2", quarter())
    portions.devices(site, space, "p2")
    site.agent.wait_ready()
    assert portions.uses(site, space, "p0") == before[1]
    ask(space, "p3", portions.request("19Gi", 50, bus=BUS))
    space.pending("p3", saying=UNPLACED)


def test_the_policy_changes_while_a_share_is_in_use(site: Site, space: Space) -> None:
    ask(space, "p", quarter())
    portions.devices(site, space, "p")
    everything = len(site.agent.devices())
    configfile.change(site, sharing=[])
    waiting.until(lambda: [device["name"] for device in portions.offered(site)] == [GPU], "the others are whole")
    assert len(site.agent.devices()) == everything
    ask(space, "beside", quarter())
    assert portions.devices(site, space, "beside") == (GPU,)
    for name in ("p", "beside"):
        space.delete("Pod", name)
    waiting.until(lambda: not portions.offered(site), "all GPUs are whole")
    assert given.get(site, space, "whole", make.request(where=portions.BUS.format(BUS))) == (GPU,)
    configfile.change(site, sharing=SHARING)
    waiting.until(lambda: len(portions.offered(site)) == everything - 1, "the others are shared")
    space.delete("Pod", "whole")
    waiting.until(lambda: len(portions.offered(site)) == everything, "all GPUs are shared")


def test_what_is_said_of_shares(site: Site, space: Space) -> None:
    ask(space, "p", portions.request("20Gi", 25, bus=BUS))
    ask(space, "q", portions.request("30Gi", 75, bus=BUS))
    for name in ("p", "q"):
        portions.devices(site, space, name)
    document = json.loads(command(site, "nearfield", "devices", "-o", "json"))
    (device,) = (item for item in document["shared"] if item["device"] == GPU)
    assert (device["memoryEnforcement"], device["computeEnforcement"]) == ("none", "none")
    assert device["memory"] == {
        "value": portions.MEMORY,
        "step": GIB,
        "given": 50 * GIB,
        "free": 0,
        "stranded": portions.MEMORY - 50 * GIB,
    }
    assert device["sharers"] == {"most": 8, "now": 2}
    assert {(share["namespace"], share["memory"]) for share in device["shares"]} == {
        (space.name, 20 * GIB),
        (space.name, 30 * GIB),
    }
    table = command(site, "nearfield", "devices")
    assert "|20G" in table or "|30G" in table
    assert f"{GPU} (20G, 25 %)" in command(site, "nearfield", "claims")
    metrics = site.agent.metrics()
    assert metrics.one("nearfield_sharers", device=GPU) == 2
    assert metrics.one("nearfield_shared_memory_bytes", device=GPU, state="given") == 50 * GIB
    assert metrics.one("nearfield_shared_compute_ratio", device=GPU, state="given") == 1
    assert metrics.one("nearfield_shared_device_info", device=GPU, memory_enforcement="none") == 1
