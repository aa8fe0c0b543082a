# SPDX-License-Identifier: Apache-2.0
"""Objects as dicts, with what every scenario needs already said: images that are on the node, a pod that ends at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driver import values
from hack.agentimage import build
from tests.e2e.kit.api import Json

BUSYBOX = "localhost/nearfield/busybox:e2e"
AGENT_IMAGE = build.TAG
"""It has glibc and Python, which busybox has not."""

CLASS = values.DRIVER_NAME
"""The DeviceClass of our manifests."""

API = "resource.k8s.io/v1"
WAIT = "trap 'exit 0' TERM; sleep 3600 & wait"
"""Runs until it is told to end, and then ends at once: process 1 of a container is not ended by a signal that it does not handle."""

STUBBORN = "trap '' TERM; sleep 3600"
"""Ends by SIGKILL only."""


def namespace(name: str, *, labels: Mapping[str, str] | None = None) -> Json:
    """A namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}}


def request(
    name: str = "gpu",
    *,
    count: int | None = None,
    every: bool = False,
    where: str | Sequence[str] = (),
    admin: bool = False,
    device_class: str = CLASS,
    tolerations: Sequence[Json] = (),
    capacity: Mapping[str, str] | None = None,
) -> Json:
    """A request for `count` devices (1), or for `every` one that matches. `where`: CEL expressions."""
    exactly: Json = {"deviceClassName": device_class}
    if every:
        exactly["allocationMode"] = "All"
    elif count is not None:
        exactly["count"] = count
    expressions = [where] if isinstance(where, str) else where
    if expressions:
        exactly["selectors"] = [{"cel": {"expression": expression}} for expression in expressions]
    if admin:
        exactly["adminAccess"] = True
    if tolerations:
        exactly["tolerations"] = list(tolerations)
    if capacity:
        exactly["capacity"] = {"requests": dict(capacity)}
    return {"name": name, "exactly": exactly}


def first_of(name: str, *choices: Json) -> Json:
    """A request that is content with the first of several (each made by `request`) that can be had."""
    return {"name": name, "firstAvailable": [{"name": choice["name"], **choice["exactly"]} for choice in choices]}


def match(attribute: str, *requests: str) -> Json:
    """All devices (of some requests) have the same value of an attribute; a bare name is ours."""
    return {"matchAttribute": _qualified(attribute), **({"requests": list(requests)} if requests else {})}


def distinct(attribute: str, *requests: str) -> Json:
    """All devices (of some requests) have different values of an attribute."""
    return {"distinctAttribute": _qualified(attribute), **({"requests": list(requests)} if requests else {})}


def claim(name: str, *requests: Json, constraints: Sequence[Json] = (), config: Sequence[Json] = ()) -> Json:
    """A claim for itself; one GPU where no request is given."""
    return {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": _claim_spec(requests, constraints, config),
    }


def template(name: str, *requests: Json, constraints: Sequence[Json] = (), config: Sequence[Json] = ()) -> Json:
    """A claim for each pod; one GPU where no request is given."""
    return {
        "apiVersion": API,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": _claim_spec(requests, constraints, config)},
    }


def container(
    name: str = "main",
    *,
    claims: Sequence[str] = (),
    script: str = WAIT,
    command: Sequence[str] | None = None,
    image: str = BUSYBOX,
    resources: Mapping[str, str] | None = None,
    **more: object,
) -> Json:
    """A container that runs a shell script. `claims`: `gpu` for all of a claim, `gpu/one` for one request of it.
    `resources`: limits such as an extended resource. `more`: fields as the API names them.
    """
    wanted: Json = {}
    if claims:
        wanted["claims"] = [
            {"name": base, **({"request": part} if part else {})}
            for base, _, part in (c.partition("/") for c in claims)
        ]
    if resources:
        wanted["limits"] = dict(resources)
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command) if command is not None else ["sh", "-c", script],
        **({"resources": wanted} if wanted else {}),
        **more,
    }


def sidecar(name: str, **options: object) -> Json:
    """An init container that goes on running beside the others."""
    return container(name, **options, restartPolicy="Always")  # type: ignore[arg-type]


def pod(
    name: str,
    *,
    claims: Mapping[str, str] | None = None,
    containers: Sequence[Json] | None = None,
    init: Sequence[Json] = (),
    script: str = WAIT,
    restart: str = "Never",
    grace_s: int = 1,
    labels: Mapping[str, str] | None = None,
    **more: object,
) -> Json:
    """A pod. `claims`: its name for a claim -> `template:NAME`, or the name of a claim that exists. Where no containers are
    given, one named `main` runs the script with all claims. `more`: fields of its spec as the API names them.
    """
    named = claims or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "dnsPolicy": "Default",
            "containers": list(containers or [container(claims=tuple(named), script=script)]),
            **({"initContainers": list(init)} if init else {}),
            **({"resourceClaims": [_source(key, value) for key, value in named.items()]} if named else {}),
            **more,
        },
    }


def _source(name: str, value: str) -> Json:
    kind, colon, template_name = value.partition(":")
    if colon:
        assert kind == "template", value
        return {"name": name, "resourceClaimTemplateName": template_name}
    return {"name": name, "resourceClaimName": value}


def _claim_spec(requests: Sequence[Json], constraints: Sequence[Json], config: Sequence[Json]) -> Json:
    devices: Json = {"requests": list(requests or [request()])}
    if constraints:
        devices["constraints"] = list(constraints)
    if config:
        devices["config"] = list(config)
    return {"devices": devices}


def _qualified(attribute: str) -> str:
    return attribute if "/" in attribute else f"{values.DRIVER_NAME}/{attribute}"
