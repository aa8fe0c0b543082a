# SPDX-License-Identifier: Apache-2.0
"""Counters that go up and down while devices are in use.

Aspects: when a set goes down; floors by what is in use; a counter that only an old device has; a whole GPU never beside a part
without counters; servers without counters; in any state nothing in use is below zero, and the pool is valid; a scheduler that counts as it should
never gives away what the hardware has not, whatever admins do beside it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig
from driver.publish import absent, counters, devices, limits, shared, slices
from driver.sharing.rules import EXCLUSIVE, Mode, Policy
from tests.fakes import migtables, publishing
from tests.fakes.migtables import ON, gpu, instance

GPU = "gpu-0000-1b-00-0"
FULL = counters.totals(migtables.H100)
DYNAMIC = Policy(mode=Mode.MIG_DYNAMIC)
PLACE = slices.Place(driver_name=publishing.DRIVER, node_name=publishing.NODE)


def offer(*foreign: mig.MigInstance, how: Policy = DYNAMIC) -> devices.Offer:
    made = gpu(0x1B, mig_mode=ON, mig_instances=foreign) if foreign else gpu(0x1B)
    return devices.build_offer(publishing.snapshot(made), options=publishing.OPTIONS, policies={made.address: how})


def named(listed: Sequence[devices.Device]) -> dict[str, devices.Device]:
    return {device.name: device for device in listed}


ALL = named(offer().devices)
BIG = "gpu-0000-1b-00-0-mig-3g-40gb-9-4"
SMALL = "gpu-0000-1b-00-0-mig-1g-10gb-me-20-0"
PLACES = {
    name: (profile, place)
    for profile in migtables.H100
    for place in profile.placements
    for name in ALL
    if name.endswith(f"-{profile.id}-{place.start}")
}
FOREIGN_ME = instance(2, 6, 20)
FOREIGN_BIG = instance(2, 4, 9, size=4)


def below_zero(listed: Sequence[devices.Device], used: Collection[str]) -> dict[str, int]:
    totals = shared.totals_of(listed)
    consumed = [device.consumes for device in listed if device.name in used and device.consumes is not None]
    assert {consumes.counter_set for consumes in consumed} <= totals.keys()
    remaining = counters.left(totals.get(GPU, {}), (consumes.counters for consumes in consumed))
    return {name: amount for name, amount in remaining.items() if amount < 0}


def test_a_set_goes_down_when_a_counter_is_less_than_it_was() -> None:
    now = offer(FOREIGN_BIG)
    assert shared.lowered(now.devices, ALL, now.full) == {GPU: FULL}
    assert shared.lowered(offer().devices, ALL, {}) == {}
    assert shared.lowered(offer().devices, named(now.devices), {}) == {}
    assert shared.lowered(now.devices, named(now.devices), now.full) == {}


def test_where_nothing_is_known_of_what_was_published_a_foreign_instance_takes_from_all() -> None:
    now = offer(FOREIGN_BIG)
    assert shared.lowered(now.devices, {}, now.full) == {GPU: FULL}
    assert shared.lowered(offer().devices, {}, {}) == {}


def test_a_counter_does_not_go_below_what_is_in_use() -> None:
    now = offer(FOREIGN_ME)
    listed = absent.merge(now.devices, ALL, held={SMALL})
    assert below_zero(listed, {SMALL}) == {"ofa-engines": -1}
    settled = shared.settle(listed, used={SMALL})
    assert below_zero(settled, {SMALL}) == {}
    assert shared.totals_of(settled)[GPU] == {**shared.totals_of(now.devices)[GPU], "ofa-engines": 1}
    assert len({id(device.consumes.totals) for device in settled if device.consumes is not None}) == 1


def test_a_counter_does_not_go_down_where_nobody_knows_what_is_in_use() -> None:
    now = offer(FOREIGN_BIG)
    listed = shared.settle(now.devices, used=(), least=shared.lowered(now.devices, ALL, now.full))
    assert shared.totals_of(listed)[GPU] == FULL


def test_a_counter_that_only_an_old_device_has_stays_in_its_set() -> None:
    consumes = counters.Consumption(counter_set=GPU, counters={"old": 2}, totals={"old": 2})
    listed = (*offer().devices, replace(ALL[BIG], name="gone", consumes=consumes, absent=True))
    totals = shared.totals_of(shared.settle(listed, used={"gone"}))
    assert totals == {GPU: {**FULL, "old": 2}}


def test_a_set_of_absent_devices_alone_stays_as_it_was() -> None:
    listed = shared.settle(absent.merge((), ALL, held={BIG}), used={BIG})
    assert shared.totals_of(listed) == {GPU: FULL}


def test_a_whole_gpu_is_never_offered_beside_a_part_without_counters() -> None:
    ready = offer(how=EXCLUSIVE).devices
    assert ready[0].consumes is None
    whole, part = shared.settle(absent.merge(ready, ALL, held={BIG}), used={BIG})
    assert (whole.name, part.name) == (GPU, BIG)
    assert whole.consumes is not None
    assert whole.consumes.counters == FULL


def test_a_server_without_counters_is_offered_nothing_of_a_gpu_of_which_a_part_is_in_use() -> None:
    ready = devices.without_counters(offer().devices)
    listed = shared.settle(absent.merge(ready, ALL, held={BIG}), used={BIG})
    shown, hidden = shared.without_counters(listed)
    assert (shown, [device.name for device in hidden]) == ((), [BIG])
    shown, hidden = shared.without_counters(absent.merge(ready, ALL, held={GPU}))
    assert ([device.name for device in shown], hidden) == ([GPU], ())
    assert shown[0].consumes is None


def test_a_server_without_counters_keeps_instances_that_exist() -> None:
    other = gpu(0x43, mig_mode=ON, mig_instances=(instance(1, 3),))
    (static,) = devices.build_devices(
        publishing.snapshot(other),
        options=publishing.OPTIONS,
        policies={other.address: Policy(mode=Mode.MIG_STATIC)},
    )
    shown, hidden = shared.without_counters((static, replace(ALL[BIG], absent=True)))
    assert (shown, [device.name for device in hidden]) == ((static,), [BIG])


FOREIGN = st.sampled_from(
    [
        (),
        (FOREIGN_ME,),
        (FOREIGN_BIG,),
        (instance(1, 0, 0, size=8),),
        (instance(1, 0), instance(2, 1), instance(3, 5, 20)),
    ]
)


@settings(max_examples=150, deadline=None)
@given(FOREIGN, FOREIGN, st.sets(st.sampled_from(sorted(ALL)), max_size=6), st.sampled_from([DYNAMIC, EXCLUSIVE]))
def test_whatever_is_in_use_no_counter_is_below_zero(
    before: tuple[mig.MigInstance, ...], after: tuple[mig.MigInstance, ...], used: set[str], how: Policy
) -> None:
    """Also where more is in use than could be, as after a race of an admin with the scheduler."""
    published = shared.settle(offer(*before).devices, used=())
    held = used & named(published).keys()
    listed = shared.settle(absent.merge(offer(*after, how=how).devices, named(published), held=held), used=held)
    assert below_zero(listed, held) == {}
    assert limits.violations(slices.build_slices(listed, place=PLACE)) == ()
    assert held <= named(listed).keys()
    totals = shared.totals_of(listed).get(GPU, {})
    wanted = shared.totals_of(offer(*after, how=how).devices).get(GPU, {})
    in_use = counters.left({}, (consumes.counters for name in held if (consumes := named(listed)[name].consumes)))
    if wanted:
        assert totals == {name: max(amount, -in_use.get(name, 0)) for name, amount in wanted.items()}


class Node:
    """One GPU, a scheduler that counts, an admin who makes instances where there is room, and claims that make theirs."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.how = DYNAMIC
        self.foreign: dict[int, tuple[mig.MigProfile, mig.MigPlacement]] = {}
        self.claims: set[str] = set()
        self.listed: tuple[devices.Device, ...] = ()
        self.publish()

    def taken(self) -> list[counters.Counters]:
        """What the instances of both sides take of the hardware."""
        return [
            *(counters.taken(profile, place, FULL) for profile, place in self.foreign.values()),
            *(consumes.counters for name in self.claims if (consumes := ALL[name].consumes) is not None),
        ]

    def publish(self) -> None:
        there = [
            instance(number, place.start, profile.id, size=place.size)
            for number, (profile, place) in self.foreign.items()
        ]
        # Instances of claims stand there too, and are ours.
        there += [
            instance(100, PLACES[name][1].start, PLACES[name][0].id, size=PLACES[name][1].size)
            for name in sorted(self.claims - {GPU})
        ]
        made = gpu(0x1B, mig_mode=ON, mig_instances=tuple(there)) if there else gpu(0x1B)
        now = devices.build_offer(
            publishing.snapshot(made),
            options=publishing.OPTIONS,
            policies={made.address: self.how},
            ours=self.claims,
        )
        merged = absent.merge(now.devices, named(self.listed), held=self.claims)
        self.listed = shared.settle(merged, used=self.claims)

    def step(self) -> None:
        match self.chance.choice(["allocate", "allocate", "release", "make", "remove", "policy"]):
            case "allocate":
                remaining = counters.left(
                    shared.totals_of(self.listed).get(GPU, {}),
                    (
                        consumes.counters
                        for device in self.listed
                        if device.name in self.claims and (consumes := device.consumes) is not None
                    ),
                )
                free = [device for device in self.listed if not device.absent and device.name not in self.claims]
                fitting = [
                    device.name
                    for device in free
                    if device.consumes is None or counters.fits(device.consumes.counters, remaining)
                ]
                self.claims |= set(self.chance.sample(fitting, 1) if fitting else ())
            case "release" if self.claims:
                self.claims.remove(self.chance.choice(sorted(self.claims)))
            case "make":
                profile, place = self.chance.choice(sorted(PLACES.values(), key=lambda pair: (pair[0].id, pair[1])))
                if counters.fits(counters.taken(profile, place, FULL), counters.left(FULL, self.taken())):
                    self.foreign[len(self.foreign) + self.chance.randrange(10, 90)] = (profile, place)
            case "remove" if self.foreign:
                del self.foreign[self.chance.choice(sorted(self.foreign))]
            case "policy" if not self.claims:
                self.how = self.chance.choice([DYNAMIC, DYNAMIC, Policy(mode=Mode.EXCLUSIVE)])


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_given_away_that_the_hardware_has_not(seed: int) -> None:
    node = Node(random.Random(seed))
    for _ in range(100):
        node.step()
        node.publish()
        assert min(counters.left(FULL, node.taken()).values()) >= 0
        assert below_zero(node.listed, node.claims) == {}
        assert node.claims <= named(node.listed).keys()
    assert limits.violations(slices.build_slices(node.listed, place=PLACE)) == ()
