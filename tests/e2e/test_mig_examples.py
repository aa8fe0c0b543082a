# SPDX-License-Identifier: Apache-2.0
"""The examples with a MIG slice do what they say, on a DGX H100 whose GPUs may be divided, but for the first one.

- by memory, by profile, the first profile that is left, a slice or else a GPU: also where others have what would be taken first
- several slices in one claim: of one GPU for two containers, of different GPUs for one
- pods that ask for an extended resource
- what `nearfield devices` says of it meanwhile
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from driver import values
from tests.e2e.kit import agent as agents
from tests.e2e.kit import configfile, examples, given, make, partitions, waiting
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

WHOLE = "0000:1b:00.0"
DYNAMIC = [{"match": {"address": WHOLE}, "mode": "exclusive"}, {"mode": "mig-dynamic"}]
LAST = "gpu-0000-df-00-0"
"""Slices are taken from the end of the node, whole GPUs from its beginning."""


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(found, sharing=DYNAMIC)
        yield found


def profiles(site: Site, devices: tuple[str, ...]) -> list[str]:
    """Of instances that exist."""
    by_name = {entry.device: entry.profile for entry in partitions.there(site.disk.machine)}
    return [by_name[device] for device in devices]


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("a-mig-slice-by-memory", "1g.20gb"),
        ("a-mig-slice-by-profile", "3g.40gb"),
        ("the-first-mig-profile-that-is-free", "3g.40gb"),
        ("a-mig-slice-or-else-a-gpu", "3g.40gb"),
    ],
)
def test_a_slice(site: Site, space: Space, name: str, profile: str) -> None:
    with examples.applied(space, name):
        got = partitions.devices(site, space, name, "gpus")
        assert profiles(site, got) == [profile]
        assert values.gpu_of(got[0]) == LAST
        space.delete("Pod", name)


def test_the_choice_that_is_left(site: Site, space: Space) -> None:
    name = "the-first-mig-profile-that-is-free"
    for number in range(13):
        given.ask(space, f"p{number}", partitions.request("3g.40gb"))
    for number in range(13):
        space.running(f"p{number}")
    partitions.get(site, space, "small", partitions.request("1g.10gb"))
    with examples.applied(space, name):
        got = partitions.devices(site, space, name, "gpus")
        assert profiles(site, got) == ["2g.20gb"]
        assert space.devices(name, "gpus", request="slice/quarter") == got
        space.delete("Pod", name)


def test_a_gpu_where_no_slice_is_left(site: Site, space: Space) -> None:
    name = "a-mig-slice-or-else-a-gpu"
    others = f'device.attributes["resource.kubernetes.io"].pciBusID != "{WHOLE}"'
    given.get(site, space, "others", make.request(count=len(site.disk.gpus()) - 1, where=others))
    with examples.applied(space, name):
        got = given.devices(site, space, name, "gpus")
        assert space.devices(name, "gpus", request="gpu/whole") == got
        assert [site.disk.gpu(device).address for device in got] == [WHOLE]
        space.delete("Pod", name)


def test_several_profiles_for_two_containers(site: Site, space: Space) -> None:
    name = "several-mig-profiles"
    with examples.applied(space, name):
        space.running(name)
        got = space.devices(name, "gpus")
        assert sorted(profiles(site, got)) == ["1g.10gb", "3g.40gb"]
        assert len({values.gpu_of(device) for device in got}) == 1
        partitions.require(site, space, name, space.devices(name, "gpus", request="large"))
        partitions.require(site, space, name, space.devices(name, "gpus", request="small"), container="second")
        space.delete("Pod", name)


def test_slices_of_different_gpus(site: Site, space: Space) -> None:
    name = "two-mig-slices-of-different-gpus"
    with examples.applied(space, name):
        got = partitions.devices(site, space, name, "gpus")
        assert profiles(site, got) == ["1g.10gb", "1g.10gb"]
        assert len({values.gpu_of(device) for device in got}) == 2
        space.delete("Pod", name)


def test_an_extended_resource(site: Site, space: Space) -> None:
    name = "mig-extended-resource"
    with examples.applied(space, name):
        space.running(name)
        (there,) = partitions.there(site.disk.machine)
        assert there.profile == "1g.10gb"
        assert space.look(name).mig_uuids == (there.uuid,)
        space.delete("Pod", name)


def test_what_nearfield_devices_says(site: Site, space: Space) -> None:
    (got,) = partitions.get(site, space, "p", partitions.request("2g.20gb"))
    command = ("nearfield", "devices", "-o", "json")
    pod = site.agent.pod()["metadata"]["name"]
    text = site.cluster.kubectl("exec", "-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER, "--", *command)
    document = json.loads(text)
    (gpu,) = (item for item in document["divided"] if item["device"] == LAST)
    (entry,) = gpu["instances"]
    assert (entry["device"], entry["profile"], entry["origin"]) == (got, "2g.20gb", "ours")
    assert gpu["placeable"]["7g.80gb"] == 0
    instances = {"profile": "2g.20gb", "origin": "ours"}
    waiting.until(lambda: site.agent.metrics().one("nearfield_mig_instances", **instances) == 1, "it is counted")
    metrics = site.agent.metrics()
    assert metrics.one("nearfield_mig_placeable", profile="7g.80gb") == 6
    assert metrics.one("nearfield_mig_stranded_slices") == 0
    assert space.devices("p") == (got,)
