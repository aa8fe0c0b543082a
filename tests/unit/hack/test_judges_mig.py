# SPDX-License-Identifier: Apache-2.0
"""The judges of divided GPUs, without upstream's allocator and without an agent.

- claims: the same for the same seed, all kinds of them, none that the API server would refuse
- a sequence: what is tallied and recorded; each thing that an agent may do wrong is found
- claims that do not fit: the state is the one that is meant, by counting; the verdict; the table
- the order of places: what is placeable, first fit, sequences, the verdict
- machines that are not in the zoo can be read and divided
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery.address import PciAddress
from discovery.mig import MigPlacement
from driver import values
from driver.publish import attributes, counters, devices
from driver.standin import apiserver_claims
from hack.judges import agentnode, impossible, mig, migclaims, mignode, nodes, places, playing, upstream
from tests.fakes import judged

SMALL, MIDDLE, LARGE, WHOLE = "1g.5gb", "2g.10gb", "4g.20gb", places.WHOLE
SIZES = {SMALL: (14, (3, 2, 1, 0), 1), MIDDLE: (5, (2, 0), 2), LARGE: (0, (0,), 4)}
TOTALS = {counters.memory_slice(number): 1 for number in range(4)}


def gpu(number: int) -> list[devices.Device]:
    """A GPU of four memory slices, whole first."""
    address = PciAddress(0, number, 0, 0)
    name = values.gpu_device_name(address)

    def device(own: str, takes: Iterable[int], **said: str) -> devices.Device:
        taken = {counters.memory_slice(slot): 1 for slot in takes}
        return devices.Device(
            name=own,
            address=address,
            attributes={attributes.PARENT_UUID: f"GPU-{number}", **said} if said else {},
            capacity={attributes.MEMORY: len(taken) * 5 << 30},
            consumes=counters.Consumption(counter_set=name, counters=taken, totals=TOTALS),
        )

    return [
        device(name, range(4)),
        *(
            device(
                values.partition_device_name(address, profile=profile, profile_id=profile_id, start=start),
                range(start, start + size),
                **{attributes.PROFILE: profile},
            )
            for profile, (profile_id, starts, size) in SIZES.items()
            for start in starts
        ),
    ]


def offered(count: int) -> tuple[devices.Device, ...]:
    listed = [gpu(number) for number in range(count)]
    return (*(of[0] for of in listed), *(part for of in reversed(listed) for part in of[1:]))


class FirstFit(upstream.Allocator):
    """Gives one request the first devices that fit it, by the counters; knows profiles and whole GPUs."""

    def __init__(self, listed: Sequence[devices.Device]) -> None:
        self._listed = listed

    def load(self, slices: Sequence[upstream.Body], classes: Sequence[upstream.Body]) -> None:
        assert list(classes) == list(migclaims.CLASSES)
        names = [device["name"] for body in slices for device in body["spec"].get("devices", ())]
        self._listed = sorted(self._listed, key=lambda device: names.index(device.name) if device.name in names else -1)

    def attempt(
        self,
        claims: Sequence[upstream.Body],
        held: Iterable[str],
        *,
        shares: Iterable[upstream.Result] = (),
        limit_s: float = 10.0,
    ) -> upstream.Attempt:
        assert not list(shares)
        taken = set(held)
        left = counters.left(
            {
                (f"{device.consumes.counter_set}/{name}"): 1
                for device in self._listed
                if device.consumes
                for name in TOTALS
            },
            [_spelled(device) for device in self._listed if device.name in taken],
        )
        results = []
        for claim in claims:
            given = []
            for request in claim["spec"]["devices"]["requests"]:
                what = request.get("exactly") or request["firstAvailable"][0]
                for _ in range(what["count"]):
                    found = next(
                        (one for one in self._listed if _matches(one, what) and counters.fits(_spelled(one), left)),
                        None,
                    )
                    if found is None:
                        return upstream.Attempt(results=None, steps=1, seconds=0.0, over=False)
                    left = counters.left(left, [_spelled(found)])
                    given.append(upstream.Result(request["name"], found.name))
            results.append(tuple(given))
        return upstream.Attempt(results=tuple(results), steps=1, seconds=0.0, over=False)

    def fit(self, claim: upstream.Body, held: Iterable[str]) -> tuple[str, ...] | None:
        found = self.attempt([claim], held).results
        return None if found is None else tuple(one.device for one in found[0])


def _spelled(device: devices.Device) -> dict[str, int]:
    assert device.consumes is not None
    return {f"{device.consumes.counter_set}/{name}": amount for name, amount in device.consumes.counters.items()}


def _matches(device: devices.Device, what: Any) -> bool:
    profile = device.attributes.get(attributes.PROFILE)
    if what["deviceClassName"] == migclaims.GPU_CLASS:
        return profile is None
    selectors = [selector["cel"]["expression"] for selector in what.get("selectors", ())]
    return profile is not None and all("profile ==" not in text or f'"{profile}"' in text for text in selectors)


class Agent(judged.JudgedNode, mignode.DividedNode):
    """With instances, as its claims need them."""

    points = mig.POINTS

    def offers(self) -> list[dict[str, Any]]:
        return [{"name": "new"}] if self.wrong == "slices" and self.claims else []

    def answered(self, ref: values.ClaimRef) -> Sequence[upstream.Result]:
        return self.claims[ref][1:] if self.wrong == "other devices" else self.claims[ref]

    def forget(self, ref: values.ClaimRef) -> None:
        if self.wrong != "leak":
            super().forget(ref)

    def instances(self) -> dict[str, list[MigPlacement]]:
        found: dict[str, list[MigPlacement]] = {}
        sizes = {profile_id: size for profile_id, _, size in SIZES.values()}
        for place in self.places():
            found.setdefault(place.gpu, []).append(MigPlacement(start=place.start, size=sizes[place.profile_id]))
        if self.wrong == "overlap" and self.claims:
            found["gpu-x"] = [MigPlacement(start=0, size=2), MigPlacement(start=1, size=1)]
        return found

    def places(self) -> frozenset[mignode.Place]:
        held = self.claims if self.wrong == "leak" else self.prepared
        names = [result.device for ref in held for result in self.claims[ref]]
        return frozenset(mignode.Place.of(name) for name in names if values.gpu_of(name) != name)


def player(agent: Agent, *, steps_a_crash: int = 1 << 30) -> mig.Player:
    listed = offered(2)
    odds = playing.Odds(seed="m 0", steps_a_crash=steps_a_crash, points=mig.POINTS, moment_s=0.06)
    return mig.Player("m", agent, FirstFit(listed), odds, author=migclaims.Author("seed", listed))


def test_claims_are_the_same_for_the_same_seed_and_of_all_kinds() -> None:
    written = [[migclaims.Author(seed, offered(2)).claim("c") for _ in range(1)] for seed in ("a", "a")]
    assert written[0] == written[1]
    author = migclaims.Author("b", offered(2))
    claims = [author.claim(f"c{number}") for number in range(200)]
    for claim in claims:
        assert apiserver_claims.claim_violations(claim, None) == ()
    text = json.dumps(claims)
    for word in ("firstAvailable", "matchAttribute", "distinctAttribute", "capacity", "quantity", migclaims.GPU_CLASS):
        assert word in text


def test_an_agent_that_does_everything_right() -> None:
    agent = Agent()
    tally = player(agent).play(60)
    assert (tally.steps, tally.crashes, tally.abandoned) == (60, 0, 0)
    assert tally.allocated > 10
    assert tally.refused > 0
    assert tally.parts < tally.devices
    assert tally.most_instances > 1
    assert agent.claims == {}
    gets = [step["gets"] for step in tally.record if "gets" in step]
    ends = [step["ends"] for step in tally.record if "ends" in step]
    assert len(gets) == len(ends) == tally.allocated
    document = json.loads(mig.recorded([tally]))
    assert document["machines"] == {"m": tally.record}


def test_an_agent_that_dies() -> None:
    agent = Agent()
    tally = player(agent, steps_a_crash=3).play(60)
    assert tally.crashes > 5
    assert agent.starts > tally.crashes / 2
    assert agent.claims == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("refused", "was refused: no"),
        ("other devices", "and was answered"),
        ("not unprepared", "was not unprepared"),
        ("overlap", "overlap"),
        ("leak", "instances"),
        ("row", "rows"),
        ("file", "CDI files"),
        ("slices", "slices"),
    ],
)
def test_what_an_agent_does_wrong_is_found(wrong: str, said: str) -> None:
    with pytest.raises(agentnode.NodeError, match=said):
        player(Agent(wrong)).play(60)


def test_the_place_of_a_part() -> None:
    assert mignode.Place.of("gpu-0000-1b-00-0-mig-1g-10gb-me-20-6") == mignode.Place("gpu-0000-1b-00-0", 20, 6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_states_in_which_claims_do_not_fit(count: int) -> None:
    listed = offered(count)
    assert impossible.fitting(listed) == {SMALL: 4, MIDDLE: 2, LARGE: 1}
    allocator = FirstFit(listed)
    tried = 0
    for kind in impossible.kinds(listed):
        if any(word in kind.name for word in ("of one GPU", "of N GPUs", "or else", "any slice")):
            continue  # first fit knows no constraint and takes the first alternative only
        for number in range(2, 10):
            held = kind.held(listed, number)
            if held is not None:
                tried += 1
                assert allocator.attempt(kind.write(number), held).results is None, (kind.name, number)
                assert allocator.attempt(kind.write(number - 1), held).results is not None, (kind.name, number)
    assert tried > 5


COST = impossible.Cost(machine="m", kind="k", count=7, bounded=True, steps=5, seconds=0.123, over=False, fits=False)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (COST, None),
        (replace(COST, steps=impossible.MOST_STEPS + 1), "within the bounds"),
        (replace(COST, over=True), "within the bounds"),
        (replace(COST, over=True, bounded=False), None),
        (replace(COST, fits=True), "fits"),
    ],
)
def test_the_verdict_of_what_claims_cost(cost: impossible.Cost, said: str | None) -> None:
    found = list(impossible.verdict([cost]))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_the_table_of_what_claims_cost() -> None:
    costs = [COST, replace(COST, count=8, seconds=3.0, bounded=False), replace(COST, kind="l", count=8, over=True)]
    assert list(impossible.table(costs))[2:] == ["| k | **0.12** | 3.00 |", "| l |  | **given up** |"]


def test_what_is_placeable() -> None:
    listed = offered(2)
    left = {values.gpu_device_name(PciAddress(0, number, 0, 0)): dict(TOTALS) for number in range(2)}
    assert places.placeable(listed, left) == {WHOLE: 2, SMALL: 8, MIDDLE: 4, LARGE: 2}
    left["gpu-0000-01-00-0"][counters.memory_slice(3)] = 0
    assert places.placeable(listed, left) == {WHOLE: 1, SMALL: 7, MIDDLE: 3, LARGE: 1}


def test_sequences_ask_for_plain_profiles_and_whole_gpus() -> None:
    listed = offered(2)
    arrivals = places.sequence("s", listed, claims=300)
    assert arrivals == places.sequence("s", listed, claims=300)
    assert {arrival.profile for arrival in arrivals} == {SMALL, MIDDLE, WHOLE}
    assert min(arrival.lifetime for arrival in arrivals) >= 1


def test_an_answer_that_is_not_first_fit_is_no_ground_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes.Node(name="n", devices=offered(2), minors={})
    monkeypatch.setattr(nodes, "read", lambda name, sharing: node)
    results = places.compete("m", FirstFit(node.devices), claims=100, sequences=1)
    assert [result.order for result in results] == [places.OURS, places.ASCENDING, places.ADDRESS]
    with pytest.raises(upstream.UpstreamError, match="gives None"):
        places.compete("m", FirstFit(()), claims=100, sequences=1)


RESULT = places.Result(machine="m", order=places.OURS, placeable={SMALL: 9, MIDDLE: 4, LARGE: 2, WHOLE: 2}, refused=0.1)


@pytest.mark.parametrize(
    ("more", "refused", "said"),
    [
        ({}, 0.1, []),
        ({LARGE: 1.0, MIDDLE: 4.4}, 0.1, []),
        ({LARGE: 1.0, MIDDLE: 5.0}, 0.1, [MIDDLE]),
        ({LARGE: 2.2}, 0.1, ["not better"]),
        ({}, 0.05, ["not better"]),
        ({SMALL: 99.0}, 0.1, []),
    ],
)
def test_the_verdict_of_the_order_of_places(more: dict[str, float], refused: float, said: list[str]) -> None:
    other = replace(RESULT, order=places.ASCENDING, placeable={**RESULT.placeable, **more}, refused=refused)
    found = list(places.verdict([RESULT, other]))
    assert len(found) == len(said)
    assert all(word in text for word, text in zip(said, found, strict=True))


@pytest.mark.parametrize("path", sorted(mig.OWN_MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_machines_that_are_not_in_the_zoo(path: Path) -> None:
    node = nodes.read(mig.place(path.stem), sharing=nodes.DIVIDED)
    assert sum(attributes.PROFILE in device.attributes for device in node.devices) > 50
