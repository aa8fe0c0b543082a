# SPDX-License-Identifier: Apache-2.0
"""The admission policy that bounds claims for MIG slices (deploy/daemonset/components/mig-claim-bounds), on the real API server.

- claims and templates within the bounds are taken, those beyond are refused with the bound and the number in the message
- whole GPUs are not counted; a list of alternatives counts by the one with the most
- claims that ask for nothing, or for all, or for more than a number holds, are answered as they should be
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.judges import migclaims
from tests.e2e.kit import waiting
from tests.e2e.kit.api import ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

POLICY = Path(__file__).parents[2] / "deploy/daemonset/components/mig-claim-bounds/policy.yaml"
SLICE = migclaims.asked(migclaims.of_profile("1g.10gb"))
GPU = migclaims.asked(of=migclaims.GPU_CLASS)

DEVICES, REQUESTS, APART = "may ask for 7 MIG slices", "may have 4 requests", "may ask for 4 MIG slices that differ"


@pytest.fixture(name="bounded")
def fixture_bounded(site: Site, space: Space) -> Iterator[Space]:
    objects = list(yaml.safe_load_all(POLICY.read_text(encoding="utf-8")))
    for body in objects:
        site.api.create(body)
    try:
        waiting.until(lambda: refusal(space, claim(migclaims.exactly("a", {**SLICE, "count": 8}))), "in force")
        yield space
    finally:
        for body in reversed(objects):
            site.api.delete(body["kind"], body["metadata"]["name"])


def claim(*requests: Any, distinct: str | None = None) -> dict[str, Any]:
    body = migclaims.claim("c", *requests, distinct=distinct)
    return {**body, "metadata": {"name": "c"}}


def refusal(space: Space, body: dict[str, Any]) -> str | None:
    """What the server says against an object; it is not kept."""
    try:
        space.create(body)
    except ApiError as error:
        return str(error)
    space.delete(body["kind"], body["metadata"]["name"])
    return None


def some(count: int) -> Any:
    return migclaims.exactly("a", {**SLICE, "count": count})


def several(count: int) -> list[Any]:
    return [migclaims.exactly(f"r{index}", SLICE) for index in range(count)]


CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "seven": (claim(some(7)), None),
    "eight": (claim(some(8)), DEVICES),
    "no count is one": (claim(migclaims.exactly("a", {"deviceClassName": migclaims.MIG_CLASS})), None),
    "eight whole GPUs": (claim(migclaims.exactly("a", {**GPU, "count": 8})), None),
    "four requests": (claim(*several(4)), None),
    "four requests and one for GPUs": (claim(*several(4), migclaims.exactly("g", {**GPU, "count": 8})), None),
    "five requests": (claim(*several(5)), REQUESTS),
    "four apart": (claim(some(4), distinct=migclaims.PARENT), None),
    "five apart": (claim(some(5), distinct=migclaims.PARENT), APART),
    "nine in a list": (claim(migclaims.first_available("a", {**SLICE, "count": 2}, {**SLICE, "count": 9})), DEVICES),
    "nine GPUs in a list": (claim(migclaims.first_available("a", SLICE, {**GPU, "count": 9})), None),
    "a number that none adds up to": (
        claim(*(migclaims.exactly(f"r{n}", {**SLICE, "count": 1 << 62}) for n in range(2))),
        "overflow",
    ),
    "nothing asked": ({**claim(), "spec": {"devices": {}}}, None),
    "no devices": ({**claim(), "spec": {}}, None),
    "a template for eight": (
        {**claim(), "kind": "ResourceClaimTemplate", "spec": {"spec": claim(some(8))["spec"]}},
        DEVICES,
    ),
    "a template for seven": (
        {**claim(), "kind": "ResourceClaimTemplate", "spec": {"spec": claim(some(7))["spec"]}},
        None,
    ),
}


def test_claims_within_and_beyond_the_bounds(bounded: Space) -> None:
    answers = {name: refusal(bounded, body) for name, (body, _) in CASES.items()}
    wrong = {
        name: answers[name]
        for name, (_, said) in CASES.items()
        if (said is None) != (answers[name] is None) or (said or "") not in (answers[name] or "")
    }
    assert wrong == {}
