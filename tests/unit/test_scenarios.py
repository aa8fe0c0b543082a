# SPDX-License-Identifier: Apache-2.0
"""The command behind `make e2e`, as far as it goes without a cluster: usage, and what a signal does, also in the background."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hack import scenarios

INTERRUPTED = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_name_that_no_cluster_can_have_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios.main(["--cluster", "Much-Too-Long", "-k", "x"]) == 1
    assert "Much-Too-Long" in capsys.readouterr().err


@pytest.fixture
def ignoring() -> Iterator[Callable[[signal.Signals], None]]:
    """Has this process ignore a signal, as a shell or nohup does; until the end of the test."""
    with contextlib.ExitStack() as undo:

        def ignore(number: signal.Signals) -> None:
            undo.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))

        yield ignore


def when_begun(folder: Path, *numbers: signal.Signals) -> list[str]:
    """A command that an interrupt ends with status 7; once it runs, these signals come to this process, in order."""
    begun = folder / "begun"

    def send() -> None:
        pause = threading.Event()
        while not begun.exists():
            pause.wait(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    return [sys.executable, "-c", INTERRUPTED, str(begun)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_pytest_so_that_it_takes_its_clusters_down(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    assert scenarios._pytest(when_begun(tmp_path, number), dict(os.environ)) == 7
    assert signal.getsignal(number) is before


def test_it_does_so_too_where_interrupts_are_ignored(
    tmp_path: Path, ignoring: Callable[[signal.Signals], None]
) -> None:
    ignoring(signal.SIGINT)
    assert scenarios._pytest(when_begun(tmp_path, signal.SIGTERM), dict(os.environ)) == 7


def test_under_nohup_a_hangup_is_none(tmp_path: Path, ignoring: Callable[[signal.Signals], None]) -> None:
    ignoring(signal.SIGHUP)
    # A hangup that counted would be the first signal, and the second one kills.
    assert scenarios._pytest(when_begun(tmp_path, signal.SIGHUP, signal.SIGTERM), dict(os.environ)) == 7
