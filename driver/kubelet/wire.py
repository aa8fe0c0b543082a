# SPDX-License-Identifier: Apache-2.0
"""Text on its way into a message. proto3 strings are valid UTF-8; what files and exceptions hold need not be."""

from __future__ import annotations

_ELLIPSIS = "..."


def text(value: str, *, max_bytes: int) -> str:
    """Valid UTF-8 of at most `max_bytes`; `...` at the end says that something was cut, never within a character."""
    data = value.encode("utf-8", "replace")
    if len(data) > max_bytes:
        return data[: max_bytes - len(_ELLIPSIS)].decode("utf-8", "ignore") + _ELLIPSIS
    return data.decode()


def line(value: str) -> str:
    """The same text on one line, for a log that is read line by line."""
    return " ".join(value.split())
