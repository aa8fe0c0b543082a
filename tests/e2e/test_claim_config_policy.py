# SPDX-License-Identifier: Apache-2.0
"""The admission policy for the configuration of claims (deploy/daemonset/components/claim-config-policy), on the real API server.

- what is as documented is taken, in claims, templates and classes; what is not is refused with what there may be
- configuration for another driver, and objects without configuration, are nobody's business
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.kit import waiting
from tests.e2e.kit.api import Api, ApiError
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space
from tests.fakes import claimconfigs

POLICY = Path(__file__).parents[2] / "deploy/daemonset/components/claim-config-policy/policy.yaml"
DRIVER = "gpu.nearfield.dev"
REFUSED = claimconfigs.MALFORMED | claimconfigs.WRONG

Json = dict[str, Any]


def entry(parameters: Any, driver: str = DRIVER) -> Json:
    return {"opaque": {"driver": driver, "parameters": parameters}}


def claim(*config: Json) -> Json:
    requests = [{"name": "share", "exactly": {"deviceClassName": "share.nearfield.dev"}}]
    spec = {"devices": {"requests": requests, **({"config": list(config)} if config else {})}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": spec}


def template(*config: Json) -> Json:
    return {**claim(), "kind": "ResourceClaimTemplate", "spec": {"spec": claim(*config)["spec"]}}


def device_class(*config: Json) -> Json:
    spec = {"config": list(config)} if config else {}
    return {**claim(), "kind": "DeviceClass", "metadata": {"name": "claim-config-e2e"}, "spec": spec}


@pytest.fixture(scope="module")
def policy(site: Site) -> Iterator[None]:
    """In force for this file, and for no other one: the server takes a moment to heed it, and to forget it."""
    objects = list(yaml.safe_load_all(POLICY.read_text(encoding="utf-8")))
    bad = claim(entry({}))
    bad["metadata"]["namespace"] = "default"
    for body in objects:
        site.api.create(body)
    try:
        waiting.until(lambda: answer(site.api, bad), "in force")
        yield
    finally:
        for body in reversed(objects):
            site.api.delete(body["kind"], body["metadata"]["name"])
        waiting.until(lambda: answer(site.api, bad) is None, "not in force any more")


@pytest.fixture(name="checked")
def fixture_checked(policy: None, space: Space) -> Space:
    del policy
    return space


def answer(api: Api, body: Json) -> str | None:
    """What the server says against an object; it is not kept."""
    try:
        api.create(body, dry_run=True)
    except ApiError as error:
        return str(error)
    return None


def refusal(space: Space, body: Json) -> str | None:
    """The same of an object in a namespace, or in none."""
    if body["kind"] == "DeviceClass":
        return answer(space.api, body)
    return answer(space.api, {**body, "metadata": {**body["metadata"], "namespace": space.name}})


@pytest.mark.parametrize("kind", [claim, template, device_class])
def test_configuration_is_taken_or_refused_as_nodes_would(checked: Space, kind: Any) -> None:
    good = {name: refusal(checked, kind(entry(parameters))) for name, parameters in claimconfigs.GOOD.items()}
    assert good == dict.fromkeys(claimconfigs.GOOD)
    answers = {name: refusal(checked, kind(entry(parameters))) for name, (parameters, _) in REFUSED.items()}
    assert {name: answers[name] for name, (_, said) in REFUSED.items() if said not in (answers[name] or "")} == {}


@pytest.mark.parametrize("kind", [claim, template, device_class])
def test_what_is_for_others_is_not_looked_at(checked: Space, kind: Any) -> None:
    assert refusal(checked, kind()) is None
    assert refusal(checked, kind(entry({"any": "thing"}, driver="gpu.nvidia.com"))) is None
    second = entry({**claimconfigs.HEADER, "compute": {"limit": 0}})
    assert "compute.limit" in (refusal(checked, kind(entry({}, driver="gpu.nvidia.com"), second)) or "")


def test_as_much_as_a_claim_may_have_is_within_the_budget_of_the_policy(checked: Space) -> None:
    assert refusal(checked, claim(*[entry(claimconfigs.GOOD["everything"])] * 32)) is None
