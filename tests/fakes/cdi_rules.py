# SPDX-License-Identifier: Apache-2.0
"""What a container runtime accepts as a CDI file: the rules of SPEC.md of the Container Device Interface and of its library's
validation, as far as our files use them. Refuses every key that it does not know, as the runtimes do.
"""

from __future__ import annotations

import json
import re
from typing import Any

KNOWN_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
ANNOTATIONS_MAX_BYTES = 256 * 1024

_KIND_PART = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_ANNOTATION = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)


def violations(data: bytes) -> list[str]:
    """Everything that a runtime would refuse the file for."""
    spec = json.loads(data)
    found = _keys(spec, "spec", needed={"cdiVersion", "kind", "devices"}, allowed={"annotations", "containerEdits"})
    vendor, slash, kind_class = str(spec.get("kind")).partition("/")
    if not slash or not _KIND_PART.fullmatch(vendor) or not _KIND_PART.fullmatch(kind_class):
        found.append(f"kind {spec.get('kind')!r}")
    annotations = spec.get("annotations", {})
    found += [f"annotation key {key!r}" for key in annotations if not _ANNOTATION.fullmatch(key.lower())]
    found += [f"annotation {key!r} is no text" for key, value in annotations.items() if not isinstance(value, str)]
    if sum(len(key) + len(value) for key, value in annotations.items()) > ANNOTATIONS_MAX_BYTES:
        found.append("annotations too long")
    devices = spec.get("devices") or []
    if not devices:
        found.append("no devices")
    names = [device.get("name") for device in devices]
    found += [f"device {name!r} twice" for name in set(names) if names.count(name) > 1]
    every = [spec.get("containerEdits", {})]
    for device in devices:
        found += _keys(device, "device", needed={"name", "containerEdits"}, allowed={"annotations"})
        if not _DEVICE.fullmatch(str(device.get("name"))):
            found.append(f"device name {device.get('name')!r}")
        if not any(device.get("containerEdits", {}).values()):
            found.append(f"device {device.get('name')!r} has no edits")
        every.append(device.get("containerEdits", {}))
    for edits in every:
        found += _edit_violations(edits)
    version = spec.get("cdiVersion")
    if version not in KNOWN_VERSIONS or KNOWN_VERSIONS.index(version) < KNOWN_VERSIONS.index(
        _least_version(spec, every)
    ):
        found.append(f"version {version!r} is below {_least_version(spec, every)}")
    return found


def least_version(data: bytes) -> str:
    """The lowest version that allows what the file uses."""
    spec = json.loads(data)
    every = [spec.get("containerEdits", {}), *(device["containerEdits"] for device in spec["devices"])]
    return _least_version(spec, every)


def _least_version(spec: dict[str, Any], every: list[dict[str, Any]]) -> str:
    devices = spec.get("devices") or []
    if (
        spec.get("annotations")
        or any(device.get("annotations") for device in devices)
        or "." in str(spec.get("kind")).partition("/")[2]
    ):
        return "0.6.0"
    if any(str(device.get("name"))[:1].isdigit() for device in devices) or any(
        "hostPath" in node for edits in every for node in edits.get("deviceNodes", ())
    ):
        return "0.5.0"
    return "0.3.0"


def _edit_violations(edits: dict[str, Any]) -> list[str]:
    found = _keys(edits, "containerEdits", needed=set(), allowed={"env", "deviceNodes", "mounts"})
    for variable in edits.get("env", ()):
        if not re.fullmatch(r"[^=\0]+=[^\0]*", variable):
            found.append(f"variable {variable!r}")
    for node in edits.get("deviceNodes", ()):
        found += _keys(
            node, "deviceNode", needed={"path"}, allowed={"hostPath", "permissions", "type", "major", "minor"}
        )
        if not node.get("path", "").startswith("/dev/"):
            found.append(f"device node {node!r}")
    for mount in edits.get("mounts", ()):
        found += _keys(mount, "mount", needed={"hostPath", "containerPath"}, allowed={"options", "type"})
        if not all(str(mount.get(key, "")).startswith("/") for key in ("hostPath", "containerPath")):
            found.append(f"mount {mount!r}")
    return found


def _keys(value: dict[str, Any], what: str, *, needed: set[str], allowed: set[str]) -> list[str]:
    return [f"{what}: {key} is missing" for key in needed - value.keys()] + [
        f"{what}: unknown key {key}" for key in value.keys() - needed - allowed
    ]
