# SPDX-License-Identifier: Apache-2.0
"""What containers can read about their devices: the metadata files of KEP-5304, one for each request of a claim. Pure.

Kubelet has no part in them: a driver writes a file and mounts it, and programs in the container know its path from the pod's spec
(k8s.io/dynamic-resource-allocation/api/metadata, where the format is as well). A file is a stream of JSON objects that say the
same in every version of the format, newest first, of which a reader takes the first that it knows.

The mount is part of the CDI device of the first result of a request, which every container with that request gets: no CDI id of its
own, which an older version of the agent would not keep in the file that it writes anew.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from driver import values
from driver.prepare import ledger

VERSIONS = ("metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1")
"""Kubernetes 1.37 and 1.36. Both have the same fields."""

CONTAINER_FOLDER = "/var/run/kubernetes.io/dra-device-attributes"
POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was made of a template: its name in the pod's spec."""

MOST_ATTRIBUTES = 32
"""Of a device, in the format."""

Attributes = Mapping[str, Mapping[str, Any]]
"""Of one device, as in a ResourceSlice: `{"numaNode": {"int": 0}}`."""

_LEVELS = ("memoryEnforcement", "computeEnforcement")
_LIMITS = ("memoryLimit", "memorySoftLimit", "computeLimit")
_SHARE_ID = "shareID"
_OWN = frozenset(("uuid", *_LEVELS, *_LIMITS, _SHARE_ID))

_CLAIMS, _TEMPLATES = "resourceclaims", "resourceclaimtemplates"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_NAME_MAX_LENGTH = 253
_GENERATION = 1
"""Nothing is learnt of a device after its claim was prepared."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def marked(results: Sequence[ledger.Result], claim: Any, ref: values.ClaimRef) -> tuple[ledger.Result, ...]:
    """The results, the first of each request with the folder in which containers look for its file. None has one where a path
    cannot be made of the names, which the API server does not let happen.

    The annotation is written by users. What is no name of a claim in a pod is no annotation.
    """
    annotations = claim["metadata"].get("annotations")
    pod_claim = annotations.get(POD_CLAIM) if isinstance(annotations, dict) else None
    if isinstance(pod_claim, str) and _LABEL.fullmatch(pod_claim):
        folder = f"{_TEMPLATES}/{pod_claim}"
    elif len(ref.name) <= _NAME_MAX_LENGTH and all(_LABEL.fullmatch(part) for part in ref.name.split(".")):
        folder = f"{_CLAIMS}/{ref.name}"
    else:
        return tuple(results)
    seen: set[str] = set()
    found = []
    for result in results:
        request = ledger.base_request(result.request)
        first = request not in seen and _LABEL.fullmatch(request) is not None
        seen.add(request)
        found.append(replace(result, described=folder) if first else result)
    return tuple(found)


def requests(entry: ledger.Entry) -> tuple[str, ...]:
    """The requests of a claim that have a file; none for a claim that was prepared before there were any."""
    return tuple(ledger.base_request(result.request) for result in entry.results if result.described is not None)


def file_name(request: str) -> str:
    """Of the file of a request, in the folder of its claim on the host."""
    return f"{request}.json"


def container_path(described: str, request: str, driver: str) -> str:
    """Where containers look for the file of a request."""
    return f"{CONTAINER_FOLDER}/{described}/{request}/{driver}-metadata.json"


@dataclass(frozen=True, slots=True)
class Published:
    """What is published of a device, ready to be written: members of a JSON object, each with a comma behind it. `levels`: what shares
    know better.
    """

    text: str = ""
    levels: str = ""


def published(attributes: Attributes) -> Published:
    """The attributes of a device, but for those that the record knows better; as many as leave room for what claims add."""
    others = ((name, value) for name, value in attributes.items() if name not in _OWN)
    return Published(
        _members(dict(itertools.islice(others, MOST_ATTRIBUTES - len(_OWN)))),
        _members({name: attributes[name] for name in _LEVELS if name in attributes}),
    )


def _members(value: Mapping[str, Any]) -> str:
    return f"{_encode(value)[1:-1]}," if value else ""


_UNKNOWN = Published()


def documents(entry: ledger.Entry, *, driver: str, devices: Mapping[str, Published]) -> Iterator[tuple[str, bytes]]:
    """The file of each request: its name and its content. A device that is not published any more has what the record says of it."""
    held = {device.name: device for device in entry.devices}
    described: dict[str, tuple[str, list[ledger.Result]]] = {}
    for result in entry.results:
        request = ledger.base_request(result.request)
        if result.described is not None:
            described[request] = (result.described, [])
        if request in described:
            described[request][1].append(result)
    claim = entry.claim
    for request, (folder, results) in described.items():
        parent, _, name = folder.partition("/")
        pod_claim = f'"podClaimName":{_encode(name)},' if parent == _TEMPLATES else ""
        listed = ",".join(
            f'{{"driver":{_encode(driver)},"pool":{_encode(result.pool)},"name":{_encode(result.device)},"attributes":'
            + _attributes(result, held[result.device], devices.get(result.device, _UNKNOWN))
            + "}"
            for result in results
        )
        body = (
            f'"metadata":{{"name":{_encode(claim.name)},"namespace":{_encode(claim.namespace)},"uid":{_encode(claim.uid)},'
            f'"generation":{_GENERATION}}},{pod_claim}'
            f'"requests":[{{"name":{_encode(results[0].request)},"devices":[{listed}]}}]}}\n'
        )
        text = "".join(f'{{"kind":"DeviceMetadata","apiVersion":"{version}",{body}' for version in VERSIONS)
        yield file_name(request), text.encode()


def _attributes(result: ledger.Result, device: ledger.HeldDevice, known: Published) -> str:
    """What is published of a device, and what only its claim has of it: which share, and what that is held to. Text by text, as
    every Prepare comes by.
    """
    text = known.text
    if (use := result.share) is None:
        text += known.levels
    else:
        for name, level in zip(_LEVELS, (use.enforcement.memory.value, use.enforcement.compute.value), strict=True):
            text += f'"{name}":{{"string":"{level}"}},'
        for name, limit in zip(_LIMITS, (use.memory_limit, use.soft_limit, use.compute_limit), strict=True):
            if limit is not None:
                text += f'"{name}":{{"int":{limit}}},'
    if result.share_id is not None:
        text += f'"{_SHARE_ID}":{{"string":{_encode(result.share_id)}}},'
    return f'{{{text}"uuid":{{"string":{_encode(device.uuid)}}}}}'
