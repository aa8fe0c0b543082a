# SPDX-License-Identifier: Apache-2.0
"""Counters that go up and down while devices are in use.

Aspects: when a set goes down; floors by what is in use; a counter that only an old device has; a whole GPU never beside a part
without counters; servers without counters; in any state nothing in use is below zero, and the pool is valid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

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
