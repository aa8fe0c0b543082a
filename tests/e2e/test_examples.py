# SPDX-License-Identifier: Apache-2.0
"""The examples for users (deploy/examples) do what they say, as they are but for the image.

- each gets the GPUs that it says, also where the next free ones are not wired so
- choices: the first one that is left
- a quota by class counts what pods and claims ask for
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.kit import examples, given, make, wiring
from tests.e2e.kit.api import ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

# Example, GPUs that somebody has before, the GPUs of a DGX H100 that it gets then: the next free ones would be others.
GPUS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("one-gpu", 1, ("43",)),
    ("two-gpus-of-a-numa-node", 3, ("9d", "c3")),
    ("the-best-pair", 1, ("52", "61")),
    ("the-best-quad", 1, ("9d", "c3", "d1", "df")),
    ("h100-or-else-l40s", 0, ("1b",)),
    ("by-memory-and-capability", 0, ("1b",)),
    ("by-product", 1, ("43",)),
    ("by-rail", 0, ("61",)),
    ("a-gpu-with-a-near-nic", 1, ("43",)),
    ("from-nvidias-driver", 1, ("43", "52")),
    ("all-gpus-of-a-node", 0, ("1b", "43", "52", "61", "9d", "c3", "d1", "df")),
)
BUS = 'device.attributes["resource.kubernetes.io"].pciBusID == "{}"'
ELSEWHERE = {
    "two-gpus-apart": "test_alignment_pcie.py",
    "two-gpus-of-a-pcie-switch": "test_alignment_pcie.py",
    "four-gpus-of-an-nvlink-island": "test_alignment_other.py",
    "a-gpu-and-the-nic-beside-it": "test_nics.py",
    "two-pairs-of-gpu-and-nic": "test_nics.py",
    "eight-pairs-of-gpu-and-nic": "test_nics.py",
    "a-gpu-and-a-nic-of-its-numa-node": "test_nics_derived.py",
    "a-gpu-and-its-nic-by-address": "test_nics.py",
    "a-gpu-and-the-nearest-nic": "test_nics.py",
    "all-gpus-and-nics-of-a-node": "test_nics.py",
    "the-exact-nic": "test_nics_derived.py",
    "a-mig-slice-by-memory": "test_mig_examples.py",
    "a-mig-slice-by-profile": "test_mig_examples.py",
    "the-first-mig-profile-that-is-free": "test_mig_examples.py",
    "a-mig-slice-or-else-a-gpu": "test_mig_examples.py",
    "several-mig-profiles": "test_mig_examples.py",
    "two-mig-slices-of-different-gpus": "test_mig_examples.py",
    "mig-extended-resource": "test_mig_examples.py",
    "a-share-of-a-gpu": "test_share_examples.py",
    "a-share-or-else-mig-or-else-a-gpu": "test_share_examples.py",
    "all-of-a-shared-gpu": "test_share_examples.py",
    "two-shares-of-a-gpu": "test_share_examples.py",
    "two-shares-of-different-gpus": "test_share_examples.py",
    "a-share-that-is-enforced": "test_share_examples.py",
    "a-share-with-less-than-it-has": "test_share_examples.py",
}
OTHERS = {
    "extended-resource",
    "one-claim-in-two-containers",
    "four-gpus-as-near-as-possible",
    "a-class-of-your-own",
}


def test_every_example_is_tried() -> None:
    tried = {name for name, _, _ in GPUS} | ELSEWHERE.keys() | OTHERS
    assert set(examples.names()) == tried
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(("name", "taken", "buses"), GPUS, ids=[name for name, _, _ in GPUS])
def test_gpus(site: Site, space: Space, name: str, taken: int, buses: tuple[str, ...]) -> None:
    if taken:
        given.get(site, space, "before", make.request(count=taken))
    with examples.applied(space, name):
        assert given.devices(site, space, name, "gpus") == tuple(f"gpu-0000-{bus}-00-0" for bus in buses)


def test_one_claim_in_two_containers(site: Site, space: Space) -> None:
    name = "one-claim-in-two-containers"
    with examples.applied(space, name):
        gpus = given.devices(site, space, name, "gpus")
    assert len(gpus) == 4
    given.require(site, space, name, space.devices(name, "gpus", request="evaluation"), container="evaluation")
    assert len(wiring.read(site.disk.machine).numa_nodes(gpus)) == 1


def test_the_first_choice_that_is_left(site: Site, space: Space) -> None:
    name = "four-gpus-as-near-as-possible"
    machine = wiring.read(site.disk.machine)
    with examples.applied(space, name):
        quad = given.devices(site, space, name, "gpus")
        assert space.devices(name, "gpus", request="gpus/quad") == quad
        assert len(machine.numa_nodes(quad)) == 1
        space.delete("Pod", name)
        (first,) = given.get(site, space, "first", make.request(where=BUS.format("0000:1b:00.0")))
        (second,) = given.get(site, space, "second", make.request(where=BUS.format("0000:9d:00.0")))
        space.create(*(body for body in examples.load(name) if body["kind"] == "Pod"))
        island = given.devices(site, space, name, "gpus")
    assert space.devices(name, "gpus", request="gpus/island") == island
    assert len(set(island) - {first, second}) == 4
    assert machine.numa_nodes(island) == {0, 1}


def test_a_class_and_its_quota(site: Site, space: Space) -> None:
    name = "a-class-of-your-own"
    with examples.applied(space, name):
        given.devices(site, space, name, "gpus")
        space.create(make.claim("second", make.request(device_class="h100")))
        with pytest.raises(ApiError, match="exceeded quota: two-h100") as refused:
            space.create(make.claim("third", make.request(device_class="h100")))
        assert refused.value.status == HTTPStatus.FORBIDDEN
        space.create(make.claim("other", make.request()))
        space.delete("Pod", name)


def test_an_extended_resource(site: Site, space: Space) -> None:
    with examples.applied(space, "extended-resource"):
        space.running("extended-resource")
        assert len(space.look("extended-resource").gpu_nodes) == 2
        space.delete("Pod", "extended-resource")
