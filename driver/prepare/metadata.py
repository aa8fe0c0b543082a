# SPDX-License-Identifier: Apache-2.0
"""What containers can read about their devices: the metadata files of KEP-5304, one for each request of a claim. Pure.

Kubelet has no part in them: a driver writes a file and mounts it, and programs in the container know its path from the pod's spec
(k8s.io/dynamic-resource-allocation/api/metadata, where the format is as well). A file is a stream of JSON objects that say the
same in every version of the format, newest first, of which a reader takes the first that it knows.

The mount is part of the CDI device of the first result of a request, which every container with that request gets: no CDI id of its
own, which an older version of the agent would not keep in the file that it writes anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

_CLAIMS, _TEMPLATES = "resourceclaims", "resourceclaimtemplates"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_NAME_MAX_LENGTH = 253
_GENERATION = 1
"""Nothing is learnt of a device after its claim was prepared."""


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


def documents(entry: ledger.Entry, *, driver: str, attributes: Mapping[str, Attributes]) -> Iterator[tuple[str, bytes]]:
    """The file of each request: its name and its content. `attributes`: what is published of the devices, by name; a device that is
    not published any more has what the record says of it.
    """
    devices = {device.name: device for device in entry.devices}
    described: dict[str, tuple[str, list[ledger.Result]]] = {}
    for result in entry.results:
        request = ledger.base_request(result.request)
        if result.described is not None:
            described[request] = (result.described, [])
        if request in described:
            described[request][1].append(result)
    for request, (folder, results) in described.items():
        parent, _, name = folder.partition("/")
        body = {
            "metadata": {
                "name": entry.claim.name,
                "namespace": entry.claim.namespace,
                "uid": entry.claim.uid,
                "generation": _GENERATION,
            },
            **({"podClaimName": name} if parent == _TEMPLATES else {}),
            "requests": [
                {
                    "name": results[0].request,
                    "devices": [
                        {
                            "driver": driver,
                            "pool": result.pool,
                            "name": result.device,
                            "attributes": _attributes(
                                result, devices[result.device], attributes.get(result.device, {})
                            ),
                        }
                        for result in results
                    ],
                }
            ],
        }
        rest = _ENCODER.encode(body)[1:]
        text = "".join(f'{{"kind":"DeviceMetadata","apiVersion":"{version}",{rest}\n' for version in VERSIONS)
        yield file_name(request), text.encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _attributes(
    result: ledger.Result, device: ledger.HeldDevice, published: Attributes
) -> dict[str, Mapping[str, str | int]]:
    """What is published of a device, and what only its claim has of it: which share, and what that is held to."""
    found: dict[str, Any] = {"uuid": {"string": device.uuid}}
    if (use := result.share) is not None:
        found["memoryEnforcement"] = {"string": use.enforcement.memory.value}
        found["computeEnforcement"] = {"string": use.enforcement.compute.value}
        limits = {
            "memoryLimit": use.memory_limit,
            "memorySoftLimit": use.soft_limit,
            "computeLimit": use.compute_limit,
        }
        found.update((name, {"int": limit}) for name, limit in limits.items() if limit is not None)
    if result.share_id is not None:
        found["shareID"] = {"string": result.share_id}
    room = MOST_ATTRIBUTES - len(found)
    others = [(name, value) for name, value in published.items() if name not in found]
    return {**dict(others[:room]), **found}
