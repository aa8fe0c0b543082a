# SPDX-License-Identifier: Apache-2.0
"""locks: between threads, and between open files, which to the kernel is the same as between processes.

Aspects: exclusion, order, waiting and giving up, what is left, shared and alone, numbers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from discovery.address import PciAddress
from driver.prepare import locks
from tests.fakes import preparing


def two_instances(directory: Path) -> tuple[locks.Locks, locks.Locks]:
    return locks.Locks(directory, stop=threading.Event()), locks.Locks(directory, stop=threading.Event())


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("same_process", [True, False])
def test_a_claim_is_held_by_one_at_a_time(tmp_path: Path, same_process: bool) -> None:
    first, other = two_instances(tmp_path)
    second = first if same_process else other
    entered, order = threading.Event(), []

    def later() -> None:
        entered.set()
        with second.claim("a", patience=locks.Deadline(30)):
            order.append("second")

    with first.claim("a", patience=locks.Deadline(1)):
        thread = in_thread(later)
        assert entered.wait(40)
        thread.join(0.05)
        order.append("first")
    thread.join(40)
    assert order == ["first", "second"]


@pytest.mark.parametrize("same_process", [True, False])
def test_giving_up_leaves_the_lock_to_its_holder_and_frees_it_afterwards(tmp_path: Path, same_process: bool) -> None:
    first, other = two_instances(tmp_path)
    second = first if same_process else other
    with first.claim("a", patience=locks.Deadline(1)):
        with pytest.raises(locks.LockUnavailableError), second.claim("a", patience=locks.Deadline(0.02)):
            pytest.fail("held twice")
        with second.claim("b", patience=locks.Deadline(0)):
            pass
    with second.claim("a", patience=locks.Deadline(0)):
        pass


def test_a_stopping_agent_does_not_wait_for_another_one(tmp_path: Path) -> None:
    stop = threading.Event()
    first = locks.Locks(tmp_path, stop=threading.Event())
    second = locks.Locks(tmp_path, stop=stop)
    with first.claim("a", patience=locks.Deadline(1)):
        stop.set()
        with pytest.raises(locks.LockUnavailableError), second.claim("a", patience=locks.Deadline(3600)):
            pytest.fail("held twice")


def test_an_error_in_the_block_frees_the_lock(tmp_path: Path) -> None:
    held = locks.Locks(tmp_path, stop=threading.Event())
    with pytest.raises(KeyError), held.gpus(preparing.ADDRESSES, patience=locks.Deadline(1)):
        raise KeyError
    with held.gpus(preparing.ADDRESSES, patience=locks.Deadline(0)):
        pass


@pytest.mark.parametrize("same_process", [True, False])
def test_gpus_in_any_order_never_block_each_other_for_good(tmp_path: Path, same_process: bool) -> None:
    first, other = two_instances(tmp_path)
    both = (first, first if same_process else other)
    done = []

    def work(number: int) -> None:
        addresses = preparing.ADDRESSES if number % 2 else tuple(reversed(preparing.ADDRESSES))
        for _ in range(20):
            with both[number % 2].gpus(addresses, patience=locks.Deadline(30)):
                pass
        done.append(number)

    threads = [in_thread(functools.partial(work, number)) for number in range(4)]
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [0, 1, 2, 3]


def test_some_gpus_that_are_not_obtained_are_all_let_go(tmp_path: Path) -> None:
    first, second = two_instances(tmp_path)
    with first.gpus(preparing.ADDRESSES[3:4], patience=locks.Deadline(1)):
        with pytest.raises(locks.LockUnavailableError), second.gpus(preparing.ADDRESSES, patience=locks.Deadline(0.02)):
            pytest.fail("held twice")
        with first.gpus(preparing.ADDRESSES[:3], patience=locks.Deadline(0)):
            pass


def test_every_gpu_has_a_lock_of_its_own(tmp_path: Path) -> None:
    first, second = two_instances(tmp_path)
    addresses = [PciAddress(0, 0, 0, 0), PciAddress(0, 0, 0, 1), PciAddress(0, 0, 1, 0), PciAddress(0, 1, 0, 0)]
    addresses += [PciAddress(1, 0, 0, 0), PciAddress(0xFFFFFFFF, 0xFF, 0x1F, 7)]
    for address in addresses:
        others = [other for other in addresses if other != address]
        with first.gpus([address], patience=locks.Deadline(0)), second.gpus(others, patience=locks.Deadline(0)):
            pass


def test_a_lock_that_all_share_is_had_alone_only_by_the_last(tmp_path: Path) -> None:
    first, second = locks.SharedLock(tmp_path / "lock"), locks.SharedLock(tmp_path / "lock")
    assert first.share()
    assert second.share()
    assert not first.take_alone()
    second.release()
    assert first.take_alone()
    assert not second.share()
    assert first.share()
    assert second.share()
    first.close()
    assert second.take_alone()
    second.close()


def test_a_failed_attempt_to_have_it_alone_keeps_the_share(tmp_path: Path) -> None:
    first, second = locks.SharedLock(tmp_path / "lock"), locks.SharedLock(tmp_path / "lock")
    assert first.share()
    assert second.share()
    assert not first.take_alone()
    assert not second.take_alone()
    first.close()
    second.close()


def test_numbers_are_seen_while_their_holder_lives(tmp_path: Path) -> None:
    first, second, third = (locks.NumberLocks(tmp_path / "numbers") for _ in range(3))
    assert first.highest() == 0
    assert first.hold(5)
    assert not second.hold(5)
    assert second.hold(6)
    assert third.hold(9)
    assert first.held_above(5)
    assert not third.held_above(9)
    assert first.highest() == 9
    third.close()
    assert first.highest() == 6
    second.close()
    assert not first.held_above(5)
    assert first.highest() == 0, "the own number is nobody else's"
    first.close()


def test_a_deadline_counts_down_by_the_clock_it_was_given() -> None:
    now = [100.0]
    deadline = locks.Deadline(5, clock=lambda: now[0])
    assert (deadline.remaining_s(), deadline.over()) == (5.0, False)
    now[0] = 106.0
    assert (deadline.remaining_s(), deadline.over()) == (-1.0, True)
