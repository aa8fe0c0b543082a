# SPDX-License-Identifier: Apache-2.0
"""GPUs that are divided at need, on a DGX H100.

- seven pods on one GPU, an eighth that waits; then two that halve it; then one that has it whole
- slices and whole GPUs at once: no instance and no GPU is with two pods, no Prepare fails
- three hundred pods, and nothing left
- an instance that an administrator made is in the way of a claim: the pod is told its name, and runs once it is gone
- a program that uses a GPU keeps it from being divided: the pod is told which
- the agent is killed while an instance is made, and while one is removed; it is updated while pods have slices
- the policy changes while a slice is in use: it waits for that GPU, and for no other
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import address
from discovery.mock import mig
from driver import values
from driver.prepare import ledger
from tests.e2e.kit import configfile, given, load, make, partitions, waiting, watched
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

DYNAMIC = [{"mode": "mig-dynamic"}]
BUS = "0000:9d:00.0"
GPU = "gpu-0000-9d-00-0"
QUICK = {"NEARFIELD_PROBE_INTERVAL": "1s"}
PODS = 300
SLOW_S = 10.0
"""Within it the agent is killed; what comes after that is quick again."""


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(found, env=QUICK, sharing=DYNAMIC)
        yield found


@pytest.fixture(autouse=True)
def _quick_hardware(site: Site) -> Iterator[None]:
    yield
    partitions.take(site.disk.machine)


class Watched(watched.Watched):
    """Reads the state of the machine, and finds where two instances overlap."""

    def __init__(self, machine: Path) -> None:
        super().__init__()
        self._machine = machine

    def _look(self) -> None:
        try:
            self.most = max(self.most, len(partitions.there(self._machine)))
        except AssertionError as error:
            self.wrong.append(str(error))


def whole(bus: str) -> Json:
    return make.request(where=partitions.BUS.format(bus))


def test_one_gpu_in_sevenths_in_halves_and_whole(site: Site, space: Space) -> None:
    names = [f"p{number}" for number in range(7)]
    for name in names:
        given.ask(space, name, partitions.request("1g.10gb", bus=BUS))
    got = [partitions.devices(site, space, name)[0] for name in names]
    assert len(set(got)) == 7
    assert {values.gpu_of(device) for device in got} == {GPU}
    assert partitions.enabled(site.disk.machine) >= {BUS}
    given.ask(space, "p7", partitions.request("1g.10gb", bus=BUS))
    space.pending("p7", saying="cannot allocate all claims")
    space.delete("Pod", "p3")
    partitions.devices(site, space, "p7")
    for name in ("p7", *(name for name in names if name != "p3")):
        space.delete("Pod", name, wait=False)
    given.ask(space, "large", partitions.request("4g.40gb", bus=BUS))
    given.ask(space, "half", partitions.request("3g.40gb", bus=BUS))
    assert partitions.devices(site, space, "large") == (f"{GPU}-mig-4g-40gb-5-0",)
    assert partitions.devices(site, space, "half") == (f"{GPU}-mig-3g-40gb-9-4",)
    given.ask(space, "whole", whole(BUS))
    space.pending("whole", saying="cannot allocate all claims")
    for name in ("large", "half"):
        space.delete("Pod", name)
    assert given.devices(site, space, "whole") == (GPU,)
    assert BUS not in partitions.enabled(site.disk.machine)
    given.ask(space, "small", partitions.request("1g.10gb", bus=BUS))
    space.pending("small", saying="cannot allocate all claims")
    space.delete("Pod", "whole")
    partitions.devices(site, space, "small")


@pytest.mark.timeout(900)
def test_slices_and_whole_gpus_at_once(site: Site, space: Space) -> None:
    """On three GPUs, so that they are in each other's way."""
    three = f'device.attributes["resource.kubernetes.io"].pciBusID in ["{BUS}", "0000:c3:00.0", "0000:d1:00.0"]'
    wanted = ("1g.10gb", "3g.40gb", "2g.20gb", "4g.40gb", "1g.10gb+me")
    asks = [
        make.request(where=[partitions.PROFILE.format(profile), three], device_class=partitions.CLASS)
        for profile in wanted
    ]
    asks.append(make.request(where=three))
    with (
        Watched(site.disk.machine) as seen,
        load.running(space, workers=6, seconds=0.1, asks=asks, patience_s=400) as pods,
    ):
        pods.more(60, timeout_s=600)
        told = pods.finish()
    assert seen.wrong == []
    assert seen.most > 2
    assert (told.wrong, told.retried) == ([], [])


@pytest.mark.timeout(1500)
def test_three_hundred_pods(site: Site, space: Space) -> None:
    asks = [partitions.request(profile) for profile in ("1g.10gb", "2g.20gb", "3g.40gb")]
    watched.many_pods(site, space, Watched(site.disk.machine), asks, pods=PODS)


def test_an_instance_of_somebody_else_in_the_way(site: Site, space: Space) -> None:
    site.agent.apply_objects(configfile.objects(site, env={"NEARFIELD_PROBE_INTERVAL": "10m"}, sharing=DYNAMIC))
    site.agent.wait_ready()
    machine, gpu = site.disk.machine, address.parse(BUS)
    mig.admin_mode(machine, gpu, True)
    made = mig.admin_create(machine, gpu, "2g.20gb", 4)
    given.ask(space, "p", partitions.request("3g.40gb", bus=BUS))
    told = load.refused(space, "p")
    assert "2g.20gb" in told
    assert f"GPU instance {made.id}" in told
    mig.admin_destroy(machine, gpu, "2g.20gb", 4)
    space.retry("p")
    partitions.devices(site, space, "p")
    space.delete("Pod", "p")
    site.agent.restore()


def test_a_program_that_uses_the_gpu(site: Site, space: Space) -> None:
    """Of a GPU whose MIG mode is to be changed."""
    machine, gpu = site.disk.machine, address.parse("0000:1b:00.0")
    mig.admin_mode(machine, gpu, False)
    mig.main([str(machine), "use", str(gpu), "4711"])
    try:
        given.ask(space, "p", partitions.request("1g.10gb", bus=str(gpu)))
        assert "4711" in load.refused(space, "p")
    finally:
        mig.main([str(machine), "use", str(gpu)])
    space.retry("p")
    partitions.devices(site, space, "p")


def test_killed_while_an_instance_is_made(site: Site, space: Space) -> None:
    partitions.take(site.disk.machine, create_s=SLOW_S)
    before = site.agent.restarts()
    given.ask(space, "p", partitions.request("1g.10gb"))
    space.until(lambda: states(site) == [ledger.ClaimState.STARTED], "the instance is being made", pods=["p"])
    site.agent.kill()
    partitions.take(site.disk.machine)
    site.agent.wait_restarted(before)
    space.retry("p")
    partitions.devices(site, space, "p")
    assert len(partitions.there(site.disk.machine)) == 1


def states(site: Site) -> list[ledger.ClaimState]:
    return [entry.state for entry in site.disk.record()]


def test_killed_while_an_instance_is_removed(site: Site, space: Space) -> None:
    partitions.get(site, space, "p", partitions.request("1g.10gb"))
    partitions.take(site.disk.machine, destroy_s=SLOW_S)
    before = site.agent.restarts()
    space.delete("Pod", "p", wait=False)
    waiting.until(lambda: not states(site) or states(site) == [ledger.ClaimState.RELEASING], "the claim is given back")
    site.agent.kill()
    partitions.take(site.disk.machine)
    site.agent.wait_restarted(before)
    space.gone("Pod", "p")
    waiting.until(lambda: partitions.there(site.disk.machine) == (), "the instance is removed")


def test_updated_while_pods_have_slices(site: Site, space: Space) -> None:
    got = partitions.get(site, space, "p", partitions.request("3g.40gb"))
    before = partitions.there(site.disk.machine)
    site.agent.roll()
    site.agent.wait_ready()
    assert partitions.there(site.disk.machine) == before
    assert partitions.devices(site, space, "p") == got
    space.delete("Pod", "p")
    waiting.until(lambda: partitions.there(site.disk.machine) == (), "the instance is removed")


def test_the_policy_changes_while_a_slice_is_in_use(site: Site, space: Space) -> None:
    partitions.get(site, space, "p", partitions.request("1g.10gb", bus=BUS))
    configfile.change(site, sharing=[])
    offered = waiting.until(lambda: _kept(site), "the other GPUs are not divided any more")
    assert {values.gpu_of(name) for name in offered} == {GPU}
    waiting.until(lambda: "waits" in site.agent.logs(), "it is said")
    space.delete("Pod", "p")
    waiting.until(lambda: not parts(site), "no GPU is divided any more")
    given.get(site, space, "whole", whole(BUS))
    space.delete("Pod", "whole")
    configfile.change(site, sharing=DYNAMIC)
    waiting.until(lambda: len(parts(site)) > 7 * len(site.disk.gpus()), "all GPUs are divided again")


def parts(site: Site) -> set[str]:
    """The partitions that are offered."""
    return {device["name"] for device in site.agent.devices() if "-mig-" in device["name"]}


def _kept(site: Site) -> set[str]:
    found = parts(site)
    return found if len({values.gpu_of(name) for name in found}) == 1 else set()
