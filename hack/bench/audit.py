# SPDX-License-Identifier: Apache-2.0
"""Counts the writes of a program in the audit log of an API server (audit.k8s.io/v1, one Event a line). Pure."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Sequence
from http import HTTPStatus


def count_writes(lines: Iterable[str], *, programs: Sequence[str]) -> int:
    """Writes that were stored, of programs whose user agent begins so; dry ones are none. A last line may be cut short."""
    return sum(_is_write(line, programs) for line in lines)


def _is_write(line: str, programs: Sequence[str]) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(event.get("requestURI", "")).query)
    return (
        event.get("stage") == "ResponseComplete"
        and event.get("userAgent", "").startswith(tuple(programs))
        and event.get("verb") not in {"get", "list", "watch"}
        and "dryRun" not in query
        and event.get("responseStatus", {}).get("code", 0) < HTTPStatus.BAD_REQUEST
    )
