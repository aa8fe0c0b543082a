# SPDX-License-Identifier: Apache-2.0
"""The command behind `make e2e`, as far as it goes without a cluster: usage, and what a signal does."""

from __future__ import annotations

import os
import signal
import sys
import threading
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_pytest_so_that_it_takes_its_clusters_down(tmp_path: Path, number: signal.Signals) -> None:
    begun = tmp_path / "begun"

    def end() -> None:
        pause = threading.Event()
        while not begun.exists():
            pause.wait(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=end, daemon=True).start()
    before = signal.getsignal(number)
    assert scenarios._pytest([sys.executable, "-c", INTERRUPTED, str(begun)], dict(os.environ)) == 7
    assert signal.getsignal(number) is before
