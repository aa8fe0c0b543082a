# SPDX-License-Identifier: Apache-2.0
"""The examples with a share do what they say, on a DGX H100 of which one GPU is whole, one has MIG slices, and the others are shared
with memory limits of the pods' cgroups.

- how much each has, and what holds it to that
- a share, or else a MIG slice, or else a whole GPU, as the choices are used up
- two shares of one GPU for two containers, two of different GPUs; a GPU that could be shared, alone
- lower limits by a ClaimConfig
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discovery import address
from discovery.mock import mig
from driver.sharing import shares
from tests.e2e.kit import configfile, examples, given, make, partitions, portions, waiting
from tests.e2e.kit.portions import GIB
from tests.e2e.kit.sites import Site, Sites
from tests.e2e.kit.space import Space

WHOLE, DIVIDED = "0000:1b:00.0", "0000:43:00.0"
SLICE = "gpu-0000-43-00-0-mig-2g-20gb-14-0"
SHARING = [
    {"match": {"address": WHOLE}, "mode": "exclusive"},
    {"match": {"address": DIVIDED}, "mode": "mig-static"},
    portions.rule(memory="cgroup"),
]


@pytest.fixture(scope="module")
def site(sites: Sites) -> Iterator[Site]:
    with sites.other(with_agent=False) as found:
        configfile.apply(
            found,
            machine=portions.MACHINE,
            env=portions.IN_CGROUPS,
            edit=portions.with_cgroups,
            sharing=SHARING,
        )
        yield found


@pytest.mark.parametrize(
    ("name", "memory", "compute"),
    [
        ("a-share-of-a-gpu", 20 * GIB, 25),
        ("a-share-that-is-enforced", 20 * GIB, 25),
        ("all-of-a-shared-gpu", 79 * GIB, 100),
    ],
)
def test_a_share(site: Site, space: Space, name: str, memory: int, compute: int) -> None:
    with examples.applied(space, name):
        portions.devices(site, space, name, "gpus")
        (use,) = portions.uses(site, space, name, "gpus")
        assert (use.memory, use.compute) == (memory, compute)
        assert use.memory_limit == (None if memory == 79 * GIB else memory)
        assert use.enforcement.memory is shares.Memory.CGROUP
        space.delete("Pod", name)


def test_a_share_with_less_than_it_has(site: Site, space: Space) -> None:
    name = "a-share-with-less-than-it-has"
    with examples.applied(space, name):
        portions.devices(site, space, name, "gpus")
        (use,) = portions.uses(site, space, name, "gpus")
        assert (use.memory, use.memory_limit, use.soft_limit) == (20 * GIB, 16 * GIB, 8 * GIB)
        assert (use.compute, use.compute_limit) == (25, 20)
        space.delete("Pod", name)


def test_two_shares_of_a_gpu(site: Site, space: Space) -> None:
    name = "two-shares-of-a-gpu"
    with examples.applied(space, name):
        large = portions.devices(site, space, name, "gpus", request_name="large")
        small = portions.devices(site, space, name, "gpus", request_name="small", container="second")
        assert large == small
        assert sorted(use.memory for use in portions.uses(site, space, name, "gpus")) == [10 * GIB, 30 * GIB]
        space.delete("Pod", name)


def test_two_shares_of_different_gpus(site: Site, space: Space) -> None:
    name = "two-shares-of-different-gpus"
    with examples.applied(space, name):
        assert len(set(portions.devices(site, space, name, "gpus"))) == 2
        space.delete("Pod", name)


def test_a_share_or_else_mig_or_else_a_gpu(site: Site, space: Space) -> None:
    """As others take first the shares, and then the slice."""
    name = "a-share-or-else-mig-or-else-a-gpu"
    machine, gpu = site.disk.machine, address.parse(DIVIDED)
    mig.admin_mode(machine, gpu, True)
    mig.admin_create(machine, gpu, "2g.20gb", 0)
    try:
        waiting.until(lambda: SLICE in {device["name"] for device in site.agent.devices()}, "the slice is offered")
        with examples.applied(space, name):
            got = portions.devices(site, space, name, "gpus")
            assert space.devices(name, "gpus", request="gpu/share") == got
            space.delete("Pod", name)
            shared = len(portions.offered(site))
            assert shared == len(site.disk.gpus()) - 2
            given.get(site, space, "all", portions.request(count=shared))
            body = next(item for item in examples.load(name) if item["kind"] == "Pod")
            space.create(body)
            assert partitions.devices(site, space, name, "gpus") == (SLICE,)
            assert space.devices(name, "gpus", request="gpu/slice") == (SLICE,)
            space.create({**body, "metadata": {"name": "next"}})
            got = given.devices(site, space, "next", "gpus")
            assert [site.disk.gpu(device).address for device in got] == [WHOLE]
            assert space.devices("next", "gpus", request="gpu/whole") == got
            for pod in (name, "next", "all"):
                space.delete("Pod", pod)
            waiting.until(lambda: not site.disk.record(), "the claims are unprepared")
    finally:
        mig.admin_destroy(machine, gpu, "2g.20gb", 0)
        waiting.until(lambda: SLICE not in {device["name"] for device in site.agent.devices()}, "it has vanished")


def test_a_gpu_that_is_not_shared_beside_them(site: Site, space: Space) -> None:
    """Class gpu.nearfield.dev has it first; and who wants all GPUs has those that could be shared, too."""
    count = len(site.disk.gpus()) - 1
    got = given.get(site, space, "p", make.request())
    assert [site.disk.gpu(device).address for device in got] == [WHOLE]
    space.delete("Pod", "p")
    assert len(given.get(site, space, "all", make.request(count=count))) == count
