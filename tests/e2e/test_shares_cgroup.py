# SPDX-License-Identifier: Apache-2.0
"""Shares whose memory the driver holds by the cgroup of the pod, in the hierarchy that kubelet of this node makes; driver and limits are
those of a machine with cgroup v2.

- the limit stands on kubelet's own folder of the pod before a container runs, whatever the QoS of the pod, and is gone with it
- several shares of a pod add up; who has all the memory has no limit
- a pod that joins a claim in use gets its limit, and Events say so; one that is there from the start is refused
- the agent is killed, and somebody takes the limit away: it is set again
- what a pod uses is seen
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from discovery import address
from discovery.mock import live, memorylimits, mighardware
from tests.e2e.kit import configfile, given, load, make, portions, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.portions import GIB
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

BUS = "0000:9d:00.0"
GPU = "gpu-0000-9d-00-0"
SEEN = "/seen-by-the-driver"
END = "=====end"


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(
            found,
            machine=portions.MACHINE,
            env=portions.IN_CGROUPS,
            edit=portions.with_cgroups,
            sharing=[portions.rule(memory="cgroup")],
        )
        yield found


def share(memory: str, compute: int = 10, *, name: str = "gpu") -> Json:
    return portions.request(memory, compute, bus=BUS, name=name)


def limits_of(site: Site, bus: str = BUS) -> dict[str, tuple[int, int | None]]:
    """Path of each cgroup with a limit on a GPU -> soft and hard limit, as the machine's state has them. Of one that is gone the state
    keeps what it was until it is written for another reason.
    """
    found = read((site.disk.machine / "nvml.json").read_text(), bus)
    return {path: limits for path, limits in found.items() if Path(path).is_dir()}


def read(text: str, bus: str = BUS) -> dict[str, tuple[int, int | None]]:
    (gpu,) = (gpu for gpu in json.loads(text)["nvml"]["gpus"] if gpu["pci"] == bus)
    return {
        entry["path"]: (entry.get("soft", 0), entry.get("hard"))
        for entry in gpu.get("cgroups", ())
        if entry.get("hard") is not None
    }


def uid(space: Space, pod: str) -> str:
    return str(space.get("Pod", pod)["metadata"]["uid"])


def require(site: Site, space: Space, limits: Mapping[str, int]) -> None:
    """These pods have these limits, soft as hard, and no other cgroup has one."""
    wanted = {str(portions.pod_cgroup(site, uid(space, pod))): (size, size) for pod, size in limits.items()}
    assert limits_of(site) == wanted


def test_the_limit_stands_before_a_container_runs(site: Site, space: Space) -> None:
    """Each container reads, as the first thing that it does, what limits the driver has; for a pod of each QoS."""
    qos = {
        "besteffort": {},
        "burstable": {"requests": {"cpu": "1m"}},
        "guaranteed": {"limits": {"cpu": "100m", "memory": "64Mi"}},
    }
    space.create(make.template("share", share("7Gi")))
    volume = {"name": "machine", "hostPath": {"path": _in_cluster(site), "type": "Directory"}}
    for name, resources in qos.items():
        container = make.container(
            claims=["gpu"],
            script=f"cat {SEEN}/nvml.json; echo; echo {END}; {make.WAIT}",
            volumeMounts=[{"name": "machine", "mountPath": SEEN, "readOnly": True}],
        )
        container["resources"] |= resources
        space.create(make.pod(name, claims={"gpu": "template:share"}, containers=[container], volumes=[volume]))
    for name in qos:
        assert portions.devices(site, space, name) == (GPU,)
        folder = portions.pod_cgroup(site, uid(space, name))
        seen = waiting.until(_whole(space, name), "all that it has read")
        assert read(seen)[str(folder)] == (7 * GIB, 7 * GIB)
        if name == "guaranteed":
            assert folder.parent.name == "kubepods"
        else:
            assert folder.parent.name == name
        space.delete("Pod", name)
        waiting.until(_gone(folder), "kubelet has removed the cgroup of the pod")
    assert limits_of(site) == {}


def _whole(space: Space, pod: str) -> Callable[[], str | None]:
    """What a container has read, once all of it is in its log."""

    def look() -> str | None:
        text, end, _ = space.logs(pod).partition(END)
        return text if end else None

    return look


def _gone(folder: Path) -> Callable[[], bool]:
    return lambda: not folder.exists()


def _in_cluster(site: Site) -> str:
    """The machine's folder as a pod of the cluster names it."""
    return "/var/lib/kubelet/" + str(site.disk.machine.relative_to(site.disk.kubelet_dir))


def test_several_shares_of_a_pod_add_up(site: Site, space: Space) -> None:
    space.create(
        make.template("two", share("10Gi", name="one"), share("20Gi", name="two")),
        make.template("more", share("5Gi")),
        make.pod("p", claims={"gpu": "template:two", "more": "template:more"}),
    )
    space.running("p")
    require(site, space, {"p": 35 * GIB})
    given.ask(space, "q", share("7Gi"))
    portions.devices(site, space, "q")
    require(site, space, {"p": 35 * GIB, "q": 7 * GIB})
    space.delete("Pod", "p")
    waiting.until(lambda: len(limits_of(site)) == 1, "the limit is gone with the pod")
    require(site, space, {"q": 7 * GIB})


def test_who_has_all_the_memory_has_no_limit(site: Site, space: Space) -> None:
    given.ask(space, "p", portions.request(bus=BUS))
    assert portions.devices(site, space, "p") == (GPU,)
    require(site, space, {})


def test_a_claim_may_lower_its_limits(site: Site, space: Space) -> None:
    config = portions.config("gpu", memory={"limit": "16Gi", "softLimit": "8Gi"})
    space.create(make.template("less", share("20Gi"), config=[config]), make.pod("p", claims={"gpu": "template:less"}))
    space.running("p")
    assert list(limits_of(site).values()) == [(8 * GIB, 16 * GIB)]
    config = portions.config("gpu", memory={"limit": "21Gi"})
    space.create(make.template("more", share("20Gi"), config=[config]), make.pod("q", claims={"gpu": "template:more"}))
    assert "memory.limit of its ClaimConfig is 21Gi" in load.refused(space, "q")
    config = portions.config("gpu", require={"compute": "mps"})
    space.create(make.template("mps", share("20Gi"), config=[config]), make.pod("r", claims={"gpu": "template:mps"}))
    assert "requires compute to be kept apart by mps" in load.refused(space, "r")


def test_a_pod_joins_a_claim_in_use(site: Site, space: Space) -> None:
    space.create(make.claim("shared", share("10Gi")), make.pod("first", claims={"gpu": "shared"}))
    space.running("first")
    require(site, space, {"first": 10 * GIB})
    space.create(make.pod("second", claims={"gpu": "shared"}))
    space.running("second")
    waiting.until(lambda: len(limits_of(site)) == 2, "the pod that joined has its limit")
    require(site, space, {"first": 10 * GIB, "second": 10 * GIB})
    for kind, name in (("ResourceClaim", "shared"), ("Pod", "second")):
        event = site.api.wait_event(kind, name, namespace=space.name, text="Joined")
        assert event["type"] == "Warning"
    waiting.until(
        lambda: "2 pods use" in site.agent.readyz()[1], "a Finding says so", told=lambda: site.agent.readyz()[1]
    )
    space.delete("Pod", "second")
    waiting.until(lambda: len(limits_of(site)) == 1, "its limit is gone with it")
    require(site, space, {"first": 10 * GIB})


def test_a_claim_that_two_pods_have_from_the_start(site: Site, space: Space) -> None:
    """The scheduler places both while kubelet is away."""
    site.cluster.stop("kubelet")
    try:
        space.create(
            make.claim("shared", share("10Gi")),
            make.pod("first", claims={"gpu": "shared"}),
            make.pod("second", claims={"gpu": "shared"}),
        )
        waiting.until(
            lambda: len(space.get("ResourceClaim", "shared").get("status", {}).get("reservedFor", ())) == 2,
            "the claim is reserved for both",
        )
    finally:
        site.cluster.start("kubelet")
    site.cluster.wait_node()
    assert "2 pods" in load.refused(space, "first", "second")
    require(site, space, {})
    space.delete("Pod", "second")
    space.retry("first")
    assert portions.devices(site, space, "first") == (GPU,)
    require(site, space, {"first": 10 * GIB})


def test_limits_are_set_again(site: Site, space: Space) -> None:
    """By the next agent, after somebody took one away and changed another."""
    names = ("p", "q")
    for name in names:
        given.ask(space, name, share("9Gi"))
    for name in names:
        portions.devices(site, space, name)
    hand = mighardware.Hand(site.disk.machine, live.LiveFile(site.disk.machine))
    for path, hard in zip(sorted(limits_of(site)), (None, 30 * GIB), strict=True):
        memorylimits.limit(hand, "misc", address.parse(BUS), path, soft=0, hard=hard)
    assert list(limits_of(site).values()) == [(0, 30 * GIB)]
    site.agent.kill_and_wait()
    waiting.until(lambda: list(limits_of(site).values()) == [(9 * GIB, 9 * GIB)] * 2, "they are set again")
    require(site, space, dict.fromkeys(names, 9 * GIB))


def test_what_pods_use_is_seen(site: Site, space: Space) -> None:
    given.ask(space, "p", share("9Gi"))
    portions.devices(site, space, "p")
    folder = str(portions.pod_cgroup(site, uid(space, "p")))
    assert memorylimits.charge(site.disk.machine, address.parse(BUS), folder, 3 * GIB)
    assert not memorylimits.charge(site.disk.machine, address.parse(BUS), folder, 7 * GIB)
    metrics = waiting.until(
        lambda: (
            found
            if (found := site.agent.metrics()).total("nearfield_share_memory_used_bytes", device=GPU) == 3 * GIB
            else None
        ),
        "it is seen",
    )
    assert metrics.one("nearfield_share_memory_limit_bytes", device=GPU) == 9 * GIB
