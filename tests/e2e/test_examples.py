# SPDX-License-Identifier: Apache-2.0
"""The examples for users (deploy/examples) do what they say, as they are but for the image.

- each gets the GPUs that it says, also where the next free ones are not wired so
- each has a comment that says what it gives, and stands in the list that users are shown
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kit import examples, given, make, wiring
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

# Example, GPUs that somebody has before, the GPUs of a DGX H100 that it gets then: the next free ones would be others.
GPUS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("one-gpu", 1, ("43",)),
    ("two-gpus-of-a-numa-node", 3, ("9d", "c3")),
    ("the-best-pair", 1, ("52", "61")),
    ("h100-or-else-l40s", 0, ("1b",)),
    ("by-memory-and-capability", 0, ("1b",)),
    ("all-gpus-of-a-node", 0, ("1b", "43", "52", "61", "9d", "c3", "d1", "df")),
)
ELSEWHERE = {
    "two-gpus-apart": "test_alignment_pcie.py",
    "four-gpus-of-an-nvlink-island": "test_alignment_other.py",
    "a-gpu-and-the-nic-beside-it": "test_nics.py",
    "two-pairs-of-gpu-and-nic": "test_nics.py",
    "the-exact-nic": "test_nics_derived.py",
}
OTHERS = {"extended-resource", "one-claim-in-two-containers"}


def test_every_example_is_tried_and_listed() -> None:
    tried = {name for name, _, _ in GPUS} | ELSEWHERE.keys() | OTHERS
    assert set(examples.names()) == tried
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (Path(__file__).parent / file).read_text()
    listed = (examples.FOLDER / "README.md").read_text()
    for name in examples.names():
        assert f"({name}.yaml)" in listed
        assert len(examples.comment(name)) > 40


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


def test_an_extended_resource(site: Site, space: Space) -> None:
    with examples.applied(space, "extended-resource"):
        space.running("extended-resource")
        assert len(space.look("extended-resource").gpu_nodes) == 2
        space.delete("Pod", "extended-resource")
