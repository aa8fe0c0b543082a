# SPDX-License-Identifier: Apache-2.0
"""The examples for users (deploy/examples) do what they say, as they are but for the image.

- each runs, with as many GPUs as it says, wired as it says
- each has a comment that says what it gives, and stands in the list that users are shown
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.kit import examples, given, wiring
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

Check = Callable[[wiring.Wiring, tuple[str, ...]], bool]

# Example, number of GPUs, how they have to be wired. Those with NICs are tried in test_nics.py and test_nics_derived.py.
GPUS: tuple[tuple[str, int, Check], ...] = (
    ("one-gpu", 1, lambda _, gpus: gpus == ("gpu-0000-1b-00-0",)),
    ("two-gpus-of-a-numa-node", 2, lambda machine, gpus: len(machine.numa_nodes(gpus)) == 1),
    ("four-gpus-of-an-nvlink-island", 4, lambda machine, gpus: len(machine.joined(gpus)) == 1),
    ("the-best-pair", 2, lambda machine, gpus: len(machine.joined(gpus)) == len(machine.numa_nodes(gpus)) == 1),
    ("two-gpus-apart", 2, lambda machine, gpus: len(machine.switches(gpus)) == 2),
    ("h100-or-else-l40s", 1, lambda _, gpus: gpus == ("gpu-0000-1b-00-0",)),
    ("by-memory-and-capability", 1, lambda machine, gpus: machine.island(gpus[0]) is not None),
    ("all-gpus-of-a-node", 8, lambda machine, gpus: set(gpus) == {gpu.gpu for gpu in machine.gpus}),
)
ELSEWHERE = {"a-gpu-and-the-nic-beside-it", "two-pairs-of-gpu-and-nic", "the-exact-nic"}
OTHERS = {"extended-resource", "one-claim-in-two-containers"}


def test_every_example_is_tried_and_listed() -> None:
    tried = {name for name, _, _ in GPUS} | ELSEWHERE | OTHERS
    assert set(examples.names()) == tried
    listed = (examples.FOLDER / "README.md").read_text()
    for name in examples.names():
        assert f"({name}.yaml)" in listed
        assert len(examples.comment(name)) > 40


@pytest.mark.parametrize(("name", "count", "wired"), GPUS, ids=[name for name, _, _ in GPUS])
def test_gpus(site: Site, space: Space, name: str, count: int, wired: Check) -> None:
    with examples.applied(space, name):
        gpus = given.devices(site, space, name, "gpus")
    assert len(gpus) == count
    assert wired(wiring.read(site.disk.machine), gpus)


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
