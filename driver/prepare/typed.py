# SPDX-License-Identifier: Apache-2.0
"""JSON of ours that a disk may have changed, read value by value: what is of another type than it was written as is damage. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class DamagedError(Exception):
    """Text that is no entry: cut, changed, or never one of ours."""


def load(text: str) -> Any:
    """JSON text as a value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {error}") from error


def shown(value: Any) -> str:
    """A value for a message: itself where it is short, else its kind."""
    return repr(value) if isinstance(value, int | str | None) and len(str(value)) < 100 else f"a {type(value).__name__}"


def mapping(value: Any) -> dict[str, Any]:
    """The value, an object."""
    if not isinstance(value, dict):
        raise DamagedError(f"{shown(value)} stands where an object belongs")
    return value


def items(value: Any) -> list[Any]:
    """The value, a list."""
    if not isinstance(value, list):
        raise DamagedError(f"{shown(value)} stands where a list belongs")
    return value


def text(value: Any) -> str:
    """The value, text."""
    if not isinstance(value, str):
        raise DamagedError(f"{shown(value)} stands where text belongs")
    return value


def number(value: Any) -> int:
    """The value, a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise DamagedError(f"{shown(value)} stands where a number belongs")
    return value


def string(document: Mapping[str, Any], key: str) -> str:
    """A field that is text."""
    return text(document.get(key))
