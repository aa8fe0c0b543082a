# SPDX-License-Identifier: Apache-2.0
"""`nearfield capture` ends even where what it reads does not."""

from __future__ import annotations

import threading

import pytest

from discovery.errors import DocumentError
from driver.cli import capture
from driver.errors import DriverError


def test_what_is_read_in_time_is_handed_on() -> None:
    assert capture.within(60, lambda: 7) == 7


def test_what_fails_fails_as_it_did() -> None:
    def fail() -> None:
        raise DocumentError("too large")

    with pytest.raises(DocumentError, match="too large"):
        capture.within(60, fail)


def test_what_never_comes_is_given_up() -> None:
    held = threading.Event()
    try:
        with pytest.raises(DriverError, match="does not answer"):
            capture.within(0.01, held.wait)
    finally:
        held.set()
