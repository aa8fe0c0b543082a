# SPDX-License-Identifier: Apache-2.0
"""Waiting for what cannot be watched: files, metrics, processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import urllib3

from hack.realnode.errors import ClusterError
from tests.e2e.kit.api import ApiError

T = TypeVar("T")

PAUSE_S = 0.1
USUAL_S = 120.0
"""Nothing that is waited for takes a quarter of it, unless the machine is busy with something else."""

_NOTHING_FOUND = (AssertionError, OSError, ApiError, ClusterError, urllib3.exceptions.HTTPError)


def until(
    look: Callable[[], T | None], what: str, *, timeout_s: float = USUAL_S, told: Callable[[], object] | None = None
) -> T:
    """What a look gives once it gives something true. A look that raises an AssertionError, or hears that something does not
    answer or is not there, is one that found nothing. `told` is asked for what to say at the end, unless the last look raised something.
    """
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            found = look()
            if found:
                return found
            last = found
        except _NOTHING_FOUND as error:
            last = error
        if time.monotonic() >= deadline:
            seen = told() if told and not isinstance(last, Exception) else repr(last)
            raise AssertionError(f"Not within {timeout_s:g} s: {what}; last seen: {seen}")
        time.sleep(PAUSE_S)
