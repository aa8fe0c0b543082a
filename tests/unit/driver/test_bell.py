# SPDX-License-Identifier: Apache-2.0
"""bell: the main thread is woken by whoever rings, and by a signal whichever thread the kernel gives it to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from driver import bell


@pytest.fixture
def ended() -> Iterator[bell.Bell]:
    made = bell.Bell()
    before = signal.signal(signal.SIGUSR1, lambda *_: made.ring())
    made.wake_by_signals()
    yield made
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, before)


def test_nobody_rings(ended: bell.Bell) -> None:
    assert not ended.wait(0.01)


def test_another_thread_rings(ended: bell.Bell) -> None:
    ringing = threading.Timer(0.05, ended.ring)
    ringing.start()
    assert ended.wait()
    assert ended.wait(0)
    ringing.join()


def test_it_may_ring_more_often_than_anybody_looks(ended: bell.Bell) -> None:
    for _ in range(100_000):
        ended.ring()
    assert ended.wait()


def test_a_handler_rings_for_a_signal_that_another_thread_got(ended: bell.Bell) -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    assert other.ident is not None
    telling = threading.Timer(0.05, signal.pthread_kill, (other.ident, signal.SIGUSR1))
    telling.start()
    assert ended.wait()
    over.set()
    other.join()
    telling.join()


def test_signals_that_do_not_ring_wake_nobody_for_good(ended: bell.Bell) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    telling = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2))
    telling.start()
    assert not ended.wait(0.2)
    telling.join()
    assert heard == [signal.SIGUSR2]
    signal.signal(signal.SIGUSR2, before)
