# SPDX-License-Identifier: Apache-2.0
"""The judge of shared GPUs, without upstream's allocator and without an agent: claims are all kinds of them, and none that the API
server would refuse; a sequence is tallied; each thing that an agent may do wrong is found.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery import limits
from driver import quantity, values
from driver.standin import apiserver_claims
from hack.judges import agentnode, playing, shareclaims, sharenode, shares, upstream
from tests.fakes import judged

_MODES = limits.ComputeMode
GIB = 1 << 30
ROOM = {"memory": 10 * GIB + 7, "compute": 100, "shares": 3}
NAMES = ("gpu-0000-01-00-0", "gpu-0000-02-00-0")


def spelled(name: str, *, by: str = "cgroup") -> dict[str, Any]:
    return {
        "name": name,
        "allowMultipleAllocations": True,
        "attributes": {"memoryEnforcement": {"string": by}},
        "capacity": {what: {"value": str(amount)} for what, amount in ROOM.items()},
    }


class FirstFit(upstream.Allocator):
    """Gives each request a share of the first device that has as much left."""

    def __init__(self) -> None:
        self.asked = 0

    def load(self, slices: Sequence[upstream.Body], classes: Sequence[upstream.Body]) -> None:
        assert list(classes) == list(shareclaims.CLASSES)

    def attempt(
        self,
        claims: Sequence[upstream.Body],
        held: Iterable[str],
        *,
        shares: Iterable[upstream.Result] = (),
        limit_s: float = 10.0,
    ) -> upstream.Attempt:
        assert not list(held)
        left = {name: Counter(ROOM) for name in NAMES}
        for one in shares:
            left[one.device].subtract({what: int(quantity.parse(amount)) for what, amount in one.consumed.items()})
        given = []
        for request in claims[0]["spec"]["devices"]["requests"]:
            what = request.get("exactly") or request["firstAvailable"][0]
            wanted = _rounded(what.get("capacity", {}).get("requests", {}))
            free = [name for name in NAMES if all(left[name][kind] >= amount for kind, amount in wanted.items())]
            if len(free) < what["count"]:
                return upstream.Attempt(results=None, steps=1, seconds=0.0, over=False)
            for name in free[: what["count"]]:
                left[name].subtract(wanted)
                consumed = {kind: str(amount) for kind, amount in wanted.items()}
                given.append(upstream.Result(request["name"], name, str(uuid.uuid4()), consumed))
        return upstream.Attempt(results=(tuple(given),), steps=1, seconds=0.0, over=False)


def _rounded(requests: Mapping[str, str]) -> dict[str, int]:
    memory = -(-int(quantity.parse(requests.get("memory", "10Gi"))) // GIB) * GIB
    return {"memory": memory, "compute": -(-int(requests.get("compute", "100")) // 5) * 5, "shares": 1}


class Agent(judged.JudgedNode, sharenode.SharedNode):
    """With pods, and limits for them."""

    points = shares.POINTS

    def __init__(self, wrong: str = "") -> None:
        super().__init__(wrong)
        self.pods: dict[str, values.ClaimRef] = {}

    def offers(self) -> list[dict[str, Any]]:
        listed = [spelled(name) for name in NAMES]
        if self.wrong == "slices" and self.claims:
            listed[0]["attributes"]["memoryEnforcement"] = {"string": "none"}
        return listed

    def answered(self, ref: values.ClaimRef) -> Sequence[upstream.Result]:
        said = self.claims[ref]
        return [replace(one, share_id="another") for one in said] if self.wrong == "another share" else said

    def consumed(self, one: upstream.Result) -> Mapping[str, str]:
        more = 100 if self.wrong == "overdraft" else 1
        return {**one.consumed, "memory": str(int(one.consumed["memory"]) * more)}

    def run_pod(self, claim: Any, results: Sequence[upstream.Result], pod: str) -> tuple[values.ClaimRef, Path | None]:
        self.pods[pod] = self.allocate(claim, results, pods=[pod])
        return self.pods[pod], Path("/cgroup") / pod

    def end_pod(self, pod: str) -> None:
        assert self.pods.pop(pod) not in self.claims

    def limited(self, pods: Mapping[str, str]) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for pod, ref in self.pods.items():
            for one in self.claims[ref] if ref in self.prepared else ():
                if (memory := int(quantity.parse(one.consumed["memory"]))) < 10 * GIB:
                    found[one.device, pod] += memory
        if self.wrong == "limit" and found:
            found[min(found)] += 1
        return dict(found)

    def modes(self) -> frozenset[limits.ComputeMode]:
        return frozenset({_MODES.EXCLUSIVE_PROCESS if self.wrong == "mode" else _MODES.DEFAULT})


def player(agent: Agent, *, steps_a_crash: int = 1 << 30) -> shares.Player:
    odds = playing.Odds(seed="m 0", steps_a_crash=steps_a_crash, points=shares.POINTS, moment_s=0.03)
    return shares.Player("m", agent, FirstFit(), odds)


def test_claims_are_the_same_for_the_same_seed_and_of_all_kinds() -> None:
    written = [shareclaims.Author("a", 40 * GIB).claim("c") for _ in range(2)]
    assert written[0] == written[1]
    author = shareclaims.Author("b", 40 * GIB)
    claims = [author.claim(f"c{number}") for number in range(200)]
    for claim in claims:
        assert apiserver_claims.claim_violations(claim, None) == ()
    text = json.dumps(claims)
    for word in ("firstAvailable", '"count": 2', "1536Mi", "share-1", shareclaims.SHARE_CLASS, '"gpu.nearfield.dev"'):
        assert word in text


def test_an_agent_that_does_everything_right() -> None:
    agent = Agent()
    tally = player(agent).play(80)
    assert (tally.steps, tally.crashes, tally.abandoned) == (80, 0, 0)
    assert tally.allocated > 10
    assert tally.refused > 0
    assert tally.shares > tally.allocated
    assert tally.most_sharers == 3
    assert tally.limits > 0
    assert agent.claims == {}


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
        ("another share", "and was answered"),
        ("not unprepared", "was not unprepared"),
        ("overdraft", "and the record holds"),
        ("limit", r"the limit of pod \S+ at gpu-\S+ is \d+ in place of \d+ bytes, not exactly \d+ limits"),
        ("mode", "compute modes"),
        ("row", "rows"),
        ("file", "CDI files"),
        ("slices", "slices"),
    ],
)
def test_what_an_agent_does_wrong_is_found(wrong: str, said: str) -> None:
    with pytest.raises(agentnode.NodeError, match=said):
        player(Agent(wrong)).play(80)
