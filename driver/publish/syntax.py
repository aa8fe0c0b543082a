# SPDX-License-Identifier: Apache-2.0
"""How names, versions and lists of resource.k8s.io/v1 must look. Pure.

Sources: apimachinery's util/validation (DNS labels and subdomains, label names, C identifiers) and the constants of
k8s.io/api/resource/v1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_VALUE_BYTES = 64
"""DeviceAttributeMaxValueLength: of a string or version attribute."""

MAX_LABEL = 63
MAX_SUBDOMAIN = 253
MAX_DRIVER_NAME = 63
MAX_ID = 32
MAX_INT64 = 2**63 - 1
_MAX_UINT64 = 2**64 - 1

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]*)"
_PRERELEASE = r"(0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_PRERELEASE}(\.{_PRERELEASE})*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?", re.ASCII
)

_TYPE_NAMES = {str: "a string", int: "an integer", bool: "a boolean"}


def is_label(text: object) -> bool:
    """A DNS label as device and counter names are."""
    return isinstance(text, str) and len(text) <= MAX_LABEL and _LABEL.fullmatch(text) is not None


def is_subdomain(text: object, *, most: int = MAX_SUBDOMAIN) -> bool:
    """A DNS subdomain as object, node and driver names are."""
    return isinstance(text, str) and len(text) <= most and _SUBDOMAIN.fullmatch(text) is not None


def is_driver_name(text: object) -> bool:
    """A DRA driver name. Upper case passes the API, with a warning (ValidateCSIDriverName)."""
    return isinstance(text, str) and is_subdomain(text.lower(), most=MAX_DRIVER_NAME)


def is_semver(text: object) -> bool:
    """A strict semantic version 2.0.0 that the API stores and CEL can compare (its numbers are 64 bits wide)."""
    if not isinstance(text, str) or len(text) > MAX_VALUE_BYTES or (match := _SEMVER.fullmatch(text)) is None:
        return False
    return all(int(match.group(part)) <= _MAX_UINT64 for part in (1, 2, 3))


def is_storable_semver(text: str) -> bool:
    """A strict semantic version 2.0.0 as the API checks it, numbers of any size."""
    return _SEMVER.fullmatch(text) is not None


def is_c_identifier(text: str) -> bool:
    """The part of an attribute or capacity name after its domain."""
    return len(text) <= MAX_ID and _C_IDENTIFIER.fullmatch(text) is not None


def is_label_value(text: object) -> bool:
    """A label value, the empty one included."""
    return isinstance(text, str) and len(text) <= MAX_LABEL and _LABEL_VALUE.fullmatch(text) is not None


def is_label_name(text: object) -> bool:
    """A label key: a name of label-value form, perhaps with a domain before it."""
    if not isinstance(text, str):
        return False
    domain, slash, name = text.rpartition("/")
    return name != "" and is_label_value(name) and (not slash or is_subdomain(domain))


def typed(value: object, kind: type, path: str) -> Iterator[str]:
    """Whether a JSON value has the type the API decodes it into."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{path}: must be {_TYPE_NAMES[kind]}"
    elif isinstance(value, int) and not -MAX_INT64 - 1 <= value <= MAX_INT64:
        yield f"{path}: does not fit 64 bits"


def unique_items(
    items: object, check: Callable[[Any, str], Iterator[str]], *, key: str, most: int, path: str
) -> Iterator[str]:
    """A list with a size limit whose items are objects told apart by one key."""
    if items is None:
        return
    if not isinstance(items, list):
        yield f"{path}: must be a list"
        return
    if len(items) > most:
        yield f"{path}: Too many: {len(items)}: must have at most {most} items"
        return
    seen: set[object] = set()
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            yield f"{path}[{index}]: must be an object"
            continue
        yield from check(item, f"{path}[{index}]")
        name = str(item.get(key))
        if name in seen:
            yield f"{path}[{index}]: Duplicate value: {name!r}"
        seen.add(name)
