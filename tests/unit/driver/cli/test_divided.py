# SPDX-License-Identifier: Apache-2.0
"""How a divided GPU is shown.

- bars: free, small and large instances, variants, strangers, stranded slices, a GPU that is held whole, GPUs with twelve slices
- which GPUs are shown at all
- the row of a table and the item of a list say the same; whose an instance is stays out where the record cannot be read
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import mig, model
from driver import values
from driver.cli import divided as shown
from driver.sharing import rules
from tests.fakes import divided, publishing

WHOLE = values.gpu_device_name(publishing.at(1))
DYNAMIC = rules.Policy(mode=rules.Mode.MIG_DYNAMIC)
STATIC = rules.Policy(mode=rules.Mode.MIG_STATIC)


def one(gpu: model.Gpu, policy: rules.Policy = DYNAMIC, *held: str, known: bool = True) -> shown.Gpu:
    policies = {gpu.address: policy}
    names = frozenset(held) if known else None
    (found,) = shown.divided(publishing.snapshot(gpu), policies=policies, held=names)
    return found


def name(profile: str, number: int, start: int) -> str:
    return values.partition_device_name(publishing.at(1), profile=profile, profile_id=number, start=start)


def test_bars() -> None:
    free, small, large = "....", "1g  ", "3g================="
    assert shown.bar(one(divided.gpu(1))) == "|" + "|".join([free] * 8) + "|"
    ours = (name("1g.10gb", 19, 0), name("1g.10gb+me", 20, 1), name("3g.40gb", 9, 4))
    gpu = divided.gpu(1, divided.instance(19, 0), divided.instance(20, 1), divided.instance(9, 4))
    assert shown.bar(one(gpu, DYNAMIC, *ours)) == f"|{small}|1g+ |{free}|{free}|{large}|"
    assert shown.bar(one(gpu, DYNAMIC, *ours[:2])) == f"|{small}|1g+ |{free}|{free}|3g!================|"
    assert shown.bar(one(gpu, STATIC)) == f"|{small}|1g+ |{free}|{free}|{large}|"
    assert shown.bar(one(gpu, DYNAMIC, known=False)) == f"|{small}|1g+ |{free}|{free}|{large}|"


def test_bars_of_stranded_slices_and_of_wholes() -> None:
    seven = [divided.instance(19, start) for start in range(7)]
    held = [name("1g.10gb", 19, start) for start in range(7)]
    assert shown.bar(one(divided.gpu(1, *seven), DYNAMIC, *held)) == "|" + "1g  |" * 7 + "xxxx|"
    whole = shown.bar(one(divided.gpu(1), DYNAMIC, WHOLE))
    assert whole == "|whole " + "=" * 33 + "|"
    assert len(whole) == len(shown.bar(one(divided.gpu(1))))


def test_a_gpu_with_twelve_slices_and_odd_names() -> None:
    profiles = (
        divided.profile(0, "4g.96gb+gfx", 12, (0,), 188, instances=1),
        divided.profile(5, "2g.48gb-me", 6, (0, 6), 94, instances=2),
        replace(divided.profile(14, "1g.24gb", 3, (0, 3, 6, 9), 46, instances=4), name="1111g.x"),
    )
    gpu = replace(
        divided.gpu(1, divided.instance(5, 6, size=6), divided.instance(14, 0, size=3)), mig_profiles=profiles
    )
    held = (name("2g.48gb-me", 5, 6), name("1111g.x", 14, 0))
    assert shown.bar(one(gpu, DYNAMIC, *held)) == "|11============|....|....|....|2g-==========================|"


def test_instances_that_overlap_or_lie_beyond_the_end() -> None:
    """No GPU has such; whatever it says is shown within the bar."""
    gpu = divided.gpu(1, divided.instance(77, 6, size=9), divided.instance(9, 4))
    text = shown.bar(one(gpu))
    assert text == "|....|....|....|....|3g!================|"


def test_which_gpus_are_shown() -> None:
    def told(gpu: model.Gpu, policy: rules.Policy) -> bool:
        found = shown.divided(publishing.snapshot(gpu), policies={gpu.address: policy}, held=frozenset())
        return bool(found)

    assert not told(publishing.gpu(1), DYNAMIC)
    assert not told(divided.gpu(1, enabled=False), rules.EXCLUSIVE)
    assert told(divided.gpu(1), rules.EXCLUSIVE)
    assert told(divided.gpu(1, enabled=False), DYNAMIC)
    assert told(divided.gpu(1, enabled=False), STATIC)


def test_the_row_and_the_item() -> None:
    gpu = divided.gpu(1, divided.instance(19, 6), divided.instance(19, 5), divided.instance(9, 0))
    of = one(gpu, DYNAMIC, name("1g.10gb", 19, 6), name("1g.10gb", 19, 5))
    device, mode, enabled, _, instances, room = shown.row(of)
    assert (device, mode, enabled) == (WHOLE, "mig-dynamic", "on")
    assert instances == "3g.40gb!, 2 x 1g.10gb"
    assert room == "1g.10gb, 1g.10gb+me"
    item = shown.item(of)
    assert item == {
        "address": "0000:01:00.0",
        "device": WHOLE,
        "mode": "mig-dynamic",
        "enabled": True,
        "heldWhole": False,
        "memorySlices": 8,
        "instances": [
            _instance("3g.40gb", 9, 0, 4, "foreign"),
            _instance("1g.10gb", 19, 5, 1, "ours"),
            _instance("1g.10gb", 19, 6, 1, "ours"),
        ],
        "placeable": {
            "1g.10gb": 1,
            "1g.10gb+me": 1,
            "1g.20gb": 0,
            "2g.20gb": 0,
            "3g.40gb": 0,
            "4g.40gb": 0,
            "7g.80gb": 0,
        },
        "stranded": [7],
    }


def _instance(profile: str, number: int, start: int, size: int, origin: str) -> dict[str, object]:
    return {
        "device": name(profile, number, start),
        "profile": profile,
        "profileId": number,
        "start": start,
        "size": size,
        "origin": origin,
    }


@pytest.mark.parametrize(("policy", "told"), [(DYNAMIC, False), (STATIC, True), (rules.EXCLUSIVE, True)])
def test_without_the_record(policy: rules.Policy, told: object) -> None:
    item = shown.item(one(divided.gpu(1, divided.instance(19, 6)), policy, known=False))
    instances = item["instances"]
    assert isinstance(instances, list)
    assert ["origin" in entry for entry in instances] == [told]
    assert ("placeable" in item) is (policy is DYNAMIC)
    assert mig.memory_slices(divided.H100) == item["memorySlices"]
