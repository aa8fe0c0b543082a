# SPDX-License-Identifier: Apache-2.0
"""Whether an API server takes objects as they are: slices of a machine, claims of an example."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import yaml

from tests.e2e.kit import machines
from tests.e2e.kit.api import KINDS, ApiError, Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


def require(site: Site, *names: str) -> None:
    """`kubectl create --dry-run=server` accepts the slices of these machines, all their GPUs are in them, and no field is dropped."""
    sent: list[Json] = []
    for number, machine in enumerate(names):
        bodies = list(yaml.safe_load_all(machines.slices(machine, site.node_name)))
        assert sum(len(body["spec"]["devices"]) for body in bodies) == machines.gpus(machine)
        for body in bodies:
            # Not the name of the slice that the agent published here, which a dry run too must not take.
            body["metadata"]["name"] = f"dry-run-{number}-{body['metadata']['name']}"
        sent += bodies
    assert _stored(site, sent) == [item["spec"] for item in sent]


def require_shared(site: Site, machine: str, config: str) -> tuple[Json, ...]:
    """The server accepts the slices of a machine whose GPUs are shared, and keeps every field. The devices."""
    sent = list(yaml.safe_load_all(machines.slices(machine, site.node_name, config)))
    for body in sent:
        body["metadata"]["name"] = f"dry-run-{body['metadata']['name']}"
    assert _stored(site, sent) == [item["spec"] for item in sent]
    return tuple(device for body in sent for device in body["spec"]["devices"])


def _stored(site: Site, sent: Sequence[Json]) -> list[Json]:
    """The specs that the server would keep."""
    text = yaml.safe_dump_all(sent)
    answered = site.cluster.kubectl("create", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=text)
    return [item["spec"] for item in yaml.safe_load_all(answered)]


def whole(space: Space, objects: Sequence[Json]) -> bool:
    """Whether the server would make all of these, with all that is said in them."""
    for body in objects:
        create = space.create if KINDS[body["kind"]].namespaced else space.api.create
        try:
            made = create(body, dry_run=True)
        except ApiError as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            return False
        if not _kept(body["spec"], made["spec"]):
            return False
    return True


def _kept(sent: object, made: object) -> bool:
    """What was sent is there; what the server added does not count."""
    if isinstance(sent, dict) and isinstance(made, dict):
        return all(key in made and _kept(value, made[key]) for key, value in sent.items())
    if isinstance(sent, list) and isinstance(made, list):
        return len(sent) == len(made) and all(_kept(*pair) for pair in zip(sent, made, strict=True))
    return str(sent) == str(made)  # a quantity may be written as a number
