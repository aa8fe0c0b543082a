# SPDX-License-Identifier: Apache-2.0
"""The judge of the order of devices, without upstream's allocator.

- sequences: the same for the same seed, each size with its share of GPUs, about as much load as is said
- kinds of claims: a constraint that never fits is not written; a kind of which nothing is left is not asked
- a contest counted by hand: groups that claims break, claims refused, quads that are left
- orders of a node, whether first fit can tell one from another, and whether one breaks a group at a time
- a search finds what is better than ours
- the verdict: alike and equal, alike and not, worse, not clearly better, better
- the child: answers, errors, its end
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery.address import PciAddress
from driver.publish import attributes, devices
from hack.judges import __main__ as command
from hack.judges import allocator, contest, nodes, search, upstream, workload

PAIR, QUAD, ISLAND = attributes.ALIGNED_PAIR, attributes.ALIGNED_QUAD, attributes.NVLINK_DOMAIN


def node(*wiring: Mapping[str, str], minors: Iterable[int | None] = ()) -> nodes.Node:
    """Devices d0, d1... at rising addresses, with these attributes."""
    offered = tuple(
        devices.Device(
            name=f"d{index}",
            address=PciAddress(0, index, 0, 0),
            attributes=dict(wired),
            capacity={"memory": 1},
        )
        for index, wired in enumerate(wiring)
    )
    numbers = list(minors) or [None] * len(offered)
    return nodes.Node(
        name="n",
        devices=offered,
        minors={device.address: number for device, number in zip(offered, numbers, strict=True)},
    )


EIGHT = node(*({PAIR: f"p{index // 2}", QUAD: f"q{index // 4}", ISLAND: "i"} for index in range(8)))


class FirstFit:
    """Answers as first fit does, for a constraint or none."""

    def __init__(self) -> None:
        self.asked = 0
        self._devices: list[dict[str, Any]] = []

    def load(self, slices: Iterable[upstream.Body], classes: Iterable[upstream.Body]) -> None:
        assert list(classes) == [nodes.CLASS]
        self._devices = [device for body in slices for device in body["spec"]["devices"]]

    def fit(self, claim: upstream.Body, held: Iterable[str]) -> tuple[str, ...] | None:
        self.asked += 1
        asked = claim["spec"]["devices"]
        count = asked["requests"][0]["exactly"]["count"]
        taken = set(held)
        groups: dict[Any, list[str]] = {}
        attribute = asked["constraints"][0]["matchAttribute"].rpartition("/")[2] if "constraints" in asked else None
        for device in self._devices:
            if device["name"] not in taken:
                value = device["attributes"].get(attribute, {"string": None})["string"] if attribute else "all"
                groups.setdefault(value, []).append(device["name"])
        return next((tuple(names[:count]) for names in groups.values() if len(names) >= count), None)


def offered(of: nodes.Node, order: nodes.Order) -> contest.Offered:
    fitted = contest.Offered(of, order, FirstFit())
    fitted.open()
    return fitted


def test_a_sequence_is_the_same_every_time() -> None:
    first = workload.sequence("1", gpus=8, claims=100)
    assert first == workload.sequence("1", gpus=8, claims=100)
    assert first != workload.sequence("2", gpus=8, claims=100)
    assert {arrival.size for arrival in workload.sequence("1", gpus=4, claims=100)} == {1, 2, 4}


def test_every_size_asks_for_the_same_number_of_gpus_and_the_load_is_as_said() -> None:
    arrivals = workload.sequence("1", gpus=8, claims=20_000)
    share = {size: sum(one.size for one in arrivals if one.size == size) / len(arrivals) for size in workload.WEIGHTS}
    assert max(share.values()) < 1.1 * min(share.values())
    held = sum(arrival.size * arrival.lifetime for arrival in arrivals) / len(arrivals)
    assert workload.LOAD * 8 < held < workload.LOAD * 8 * 1.3


def test_what_never_fits_is_asked_without_a_constraint() -> None:
    one_switch = next(kind for kind in workload.KINDS if kind.name == "one switch")
    kind = workload.applicable(one_switch, {attributes.PCIE_SWITCH: 3})
    assert kind is not None
    assert kind.matches == {2: attributes.PCIE_SWITCH}
    assert workload.applicable(one_switch, {attributes.PCIE_SWITCH: 1}) is None
    assert workload.applicable(workload.KINDS[0], {}) == workload.KINDS[0]


def test_half_of_the_authors_write_a_constraint() -> None:
    careful, careless = (workload.Arrival(size=2, careful=value, lifetime=1) for value in (True, False))
    half = workload.Kind(name="half", matches={2: PAIR}, half=True)
    assert (half.attribute(careful), half.attribute(careless)) == (PAIR, None)
    assert replace(half, half=False).attribute(careless) == PAIR


def test_a_claim_is_as_the_server_stores_it() -> None:
    claim = workload.claim(size=4, attribute=QUAD, driver="d.example")
    assert claim["spec"] == {
        "devices": {
            "requests": [
                {
                    "name": "gpu",
                    "exactly": {"deviceClassName": "d.example", "allocationMode": "ExactCount", "count": 4},
                }
            ],
            "constraints": [{"matchAttribute": "d.example/alignedQuad"}],
        }
    }
    standard = json.dumps(workload.claim(size=2, attribute=attributes.NUMA_NODE, driver="d.example"))
    assert '"matchAttribute": "resource.kubernetes.io/numaNode"' in standard


def test_a_contest_counted_by_hand() -> None:
    arrivals = [
        workload.Arrival(size=1, careful=True, lifetime=9),  # d0: breaks a pair, a quad, the island; one quad is left
        workload.Arrival(size=2, careful=True, lifetime=1),  # d2 d3, a whole pair of the broken quad
        workload.Arrival(size=4, careful=True, lifetime=9),  # d4 to d7; no quad is left
        workload.Arrival(size=8, careful=True, lifetime=9),  # does not fit
    ]
    kind = workload.Kind(name="k", matches=workload.ALIGNED)
    played = contest.play(offered(EIGHT, EIGHT.published()), kind, arrivals)
    assert played == contest.Outcome(pairs=1.0, quads=1.0, islands=1.0, aligned=0.5, refused=0.25)


def test_a_group_that_small_claims_fill_is_broken_and_one_that_a_large_one_fills_is_not() -> None:
    none = workload.Kind(name="none", matches={})
    singles = [workload.Arrival(size=1, careful=True, lifetime=9)] * 2
    pair = [workload.Arrival(size=2, careful=True, lifetime=9)]
    assert contest.play(offered(EIGHT, EIGHT.published()), none, singles).pairs == 1.0
    assert contest.play(offered(EIGHT, EIGHT.published()), none, pair).pairs == 0.0


def test_what_was_asked_before_is_not_asked_again() -> None:
    fit = FirstFit()
    fitted = contest.Offered(EIGHT, EIGHT.published(), fit)
    fitted.open()
    arrivals = workload.sequence("1", gpus=8, claims=50)
    first = contest.play(fitted, workload.KINDS[1], arrivals)
    asked = fit.asked
    assert contest.play(fitted, workload.KINDS[1], arrivals) == first
    assert fit.asked == asked


def test_the_orders_of_a_node() -> None:
    of = node({PAIR: "a"}, {PAIR: "b"}, {PAIR: "a"}, {PAIR: "b"}, minors=(3, None, 0, 1))
    turned = replace(of, devices=tuple(reversed(of.devices)))
    assert turned.published() == (0, 1, 2, 3)
    assert turned.by_address() == (3, 2, 1, 0)
    assert turned.by_minor() == (1, 0, 3, 2)
    assert turned.shuffled(1) == turned.shuffled(1)
    assert len({turned.shuffled(seed) for seed in range(20)}) > 5
    names = [device["name"] for device in turned.slices(turned.by_minor())[0]["spec"]["devices"]]
    assert names == ["d2", "d3", "d0", "d1"]


def test_what_first_fit_can_tell() -> None:
    of = node({PAIR: "a"}, {PAIR: "b"}, {PAIR: "a"}, {})
    assert of.groups(PAIR) == [frozenset({"d0", "d2"}), frozenset({"d1"})]
    assert of.shape((0, 1, 2, 3), [PAIR]) == ((0, 1, 0, -1),)
    assert of.shape((2, 1, 0, 3), [PAIR]) == of.shape((0, 1, 2, 3), [PAIR])
    assert of.shape((0, 2, 1, 3), [PAIR]) != of.shape((0, 1, 2, 3), [PAIR])
    assert of.shape((3, 1, 0, 2), [PAIR]) != of.shape((0, 1, 2, 3), [PAIR])


def test_a_search_finds_the_order_that_keeps_pairs_whole() -> None:
    crossed = node({PAIR: "a"}, {PAIR: "b"}, {PAIR: "b"}, {PAIR: "a"})
    found = search.search(
        crossed,
        FirstFit(),
        kinds=[workload.Kind(name="none", matches={})],
        sequences=[workload.sequence("1", gpus=4, claims=100)],
        measures=("pairs",),
        starts=0,
    )
    best = crossed.shape((0, 3, 1, 2), [PAIR])
    assert crossed.shape(found.order, [PAIR]) == best
    assert found.gain > 0
    assert found.tried == 3  # of 24 orders, those that first fit can tell apart


def test_an_order_breaks_one_group_at_a_time_or_more() -> None:
    of = node({PAIR: "a"}, {PAIR: "b"}, {PAIR: "a"}, {PAIR: "b"}, {})
    assert of.orderly((0, 2, 4, 1, 3), [PAIR])
    assert not of.orderly((0, 1, 2, 3, 4), [PAIR])
    assert of.orderly((0, 1, 2, 3, 4), [QUAD])


OURS = contest.Outcome(pairs=1.0, quads=1.0, islands=1.0, aligned=0.5, refused=0.1)


def result(order: str, outcome: contest.Outcome, *, alike: bool = False, orderly: bool = False) -> allocator.Result:
    return allocator.Result(
        machine="m",
        order=order,
        alike=alike,
        orderly=orderly,
        kinds={"k": outcome},
        choices=("pairs", "quads", "aligned"),
    )


@pytest.mark.parametrize(
    ("order", "alike", "changes", "said"),
    [
        (allocator.ADDRESS, True, {}, None),
        (allocator.ADDRESS, True, {"aligned": 0.499}, "cannot be told from ours"),
        (allocator.ADDRESS, False, {"pairs": 1.2}, None),
        (allocator.ADDRESS, False, {"pairs": 1.2, "aligned": 0.505}, None),
        (allocator.ADDRESS, False, {"pairs": 1.2, "aligned": 0.52}, "worse than by address in aligned"),
        (allocator.ADDRESS, False, {"pairs": 1.05}, "not clearly better than by address in pairs"),
        (allocator.RANDOM, False, {"pairs": 1.5, "quads": 1.2, "aligned": 0.2}, None),
        (
            allocator.RANDOM,
            False,
            {"pairs": 1.5, "quads": 1.05, "aligned": 0.2},
            "not clearly better than random in quads",
        ),
        (allocator.RANDOM, False, {"pairs": 1.5, "quads": 1.2, "aligned": 0.0}, None),
    ],
)
def test_the_verdict(order: str, alike: bool, changes: dict[str, float], said: str | None) -> None:
    other = result(order, replace(OURS, **changes), alike=alike)
    found = list(allocator.verdict([result(allocator.OURS, OURS, alike=True, orderly=True), other]))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_the_verdict_of_an_order_that_is_none() -> None:
    (found,) = allocator.verdict([result(allocator.OURS, OURS, alike=True)])
    assert "more than one group at a time" in found


def test_an_order_that_breaks_one_group_at_a_time_need_not_be_worse() -> None:
    ours = result(allocator.OURS, OURS, alike=True, orderly=True)
    assert list(allocator.verdict([ours, result(allocator.ADDRESS, OURS, orderly=True)])) == []


def test_the_table_leaves_out_what_there_is_no_choice_of() -> None:
    lines = list(allocator.table([result(allocator.OURS, OURS)], kinds=True))
    assert lines[2:] == [
        "| m | as published, k | 1.00 | 1.00 | - | 0.50 | 10.0 % |",
        "| m | as published | 1.00 | 1.00 | - | 0.50 | 10.0 % |",
    ]


CHILD = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "load" in asked:
        answer = {"devices": 1}
    elif "attempt" in asked:
        over = asked["limit"] < 1
        answer = {"results": None if over else [[{"request": "a/b", "device": "d0", "pool": "n"}]] * len(asked["attempt"])}
        answer |= {"steps": 7, "seconds": 0.5, "over": over}
    elif "d9" in asked["held"]:
        sys.exit(3)
    elif asked["held"]:
        answer = {"results": None} if asked["held"] == ["d0", "d1"] else {"error": "there is no device " + asked["held"][0]}
    else:
        answer = {"results": [{"request": "gpu", "driver": "d", "pool": "n", "device": "d0"}]}
    print(json.dumps(answer), flush=True)
"""


def test_the_child_answers_refuses_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "child"
    program.write_text(f"#!{sys.executable}\n{CHILD}")
    program.chmod(0o755)
    with upstream.started(program) as child:
        child.load([], [])
        assert child.fit({}, []) == ("d0",)
        assert child.fit({}, {"d1", "d0"}) is None
        got = (upstream.Result("a/b", "d0"),)
        assert child.attempt([{}, {}], []) == upstream.Attempt(results=(got, got), steps=7, seconds=0.5, over=False)
        assert child.attempt([{}], [], limit_s=0.5) == upstream.Attempt(results=None, steps=7, seconds=0.5, over=True)
        with pytest.raises(upstream.UpstreamError, match="there is no device x"):
            child.fit({}, ["x"])
        with pytest.raises(upstream.UpstreamError, match="it ended"):
            child.fit({}, ["d9"])
        with pytest.raises(upstream.UpstreamError, match="ended"):
            child.fit({}, [])


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out == command.USAGE
    assert command.main(["nobody"]) == 2
    assert "no judge 'nobody'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["allocator", "--claims", "0"])


def test_a_machine_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upstream, "build", lambda: tmp_path / "none")
    assert command.main(["allocator", "no-such-machine"]) == 1
    assert "no-such-machine" in capsys.readouterr().err


def test_a_machine_of_the_zoo_is_read_as_it_is_published() -> None:
    of = nodes.read("dgx-h100")
    assert len(of.devices) == 8
    assert [len(group) for group in of.groups(QUAD)] == [4, 4]
    assert of.by_address() == of.published()
