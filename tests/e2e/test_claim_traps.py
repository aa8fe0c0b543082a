# SPDX-License-Identifier: Apache-2.0
"""What docs/claims.md calls wrong does what the page says of it, on a DGX H100.

The claims are those of the page. Two more are elsewhere: one that needs NICs (test_nics.py), and one that needs two kinds of nodes
(test_hollow.py).

- the pod waits, and its event says this
- the claim is refused
- the pod runs, with GPUs that do not belong together
"""

from __future__ import annotations

from http import HTTPStatus

import pytest

from tests.e2e.kit import given, page
from tests.e2e.kit.api import ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

WAITS = {
    "All under a constraint": "because a claim constraint would not be satisfied",
    "80 GB taken for 80Gi": "cannot allocate all claims",
    "a version as text": "CEL runtime error: no such overload",
    "a number as text": "cannot allocate all claims",
    "the domain of another driver": "CEL runtime error: no such key: productName",
}


def test_pods_that_wait(space: Space) -> None:
    for number, title in enumerate(WAITS):
        requests, constraints = page.wrong(title)
        given.ask(space, f"p{number}", *requests, constraints=constraints)
    for number, said in enumerate(WAITS.values()):
        space.pending(f"p{number}", saying=said)


def test_a_claim_that_is_refused(space: Space) -> None:
    requests, constraints = page.wrong("a constraint without a domain")
    with pytest.raises(ApiError, match="a fully qualified name must be a domain and a name") as refused:
        given.ask(space, "p", *requests, constraints=constraints)
    assert refused.value.status == HTTPStatus.UNPROCESSABLE_ENTITY


def test_gpus_that_do_not_belong_together(site: Site, space: Space) -> None:
    pairs = {item["name"]: item["attributes"]["alignedPair"] for item in site.agent.devices()}
    given.get(site, space, "single")
    requests, constraints = page.wrong("two GPUs and no constraint")
    one, other = given.get(site, space, "two", *requests, constraints=constraints)
    assert pairs[one] != pairs[other]
