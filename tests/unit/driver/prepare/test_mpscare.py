# SPDX-License-Identifier: Apache-2.0
"""mpscare: a supervisor that forgot its shares has them again, one that has too many has them no more, and people are told of programs
that were ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from driver.errors import MpsError
from driver.mps import values as mps_values
from driver.mps.values import DaemonState
from driver.prepare import ledger, locks, mpscare
from driver.sharing.shares import Compute, Enforcement, Memory
from tests.fakes import keeping
from tests.fakes.keeping import OTHER, share
from tests.fakes.publishing import until

MPS = Enforcement(memory=Memory.MPS, compute=Compute.MPS)
DEVICE = share(1).holds[0]


class Watched:
    """A care in its thread, over rows that a test changes."""

    def __init__(self, state: Path) -> None:
        self.rows: list[ledger.Entry] = []
        self.supervisor = keeping.Supervisor()
        self.events = keeping.Events()
        self.stop = threading.Event()
        self.leads = True
        self.care = mpscare.MpsCare(
            self.supervisor,
            rows=lambda: tuple(self.rows),
            claim_locks=locks.Locks(state, stop=self.stop),
            leads=lambda: self.leads,
            events=self.events,
            stop=self.stop,
            wait_s=0.1,
            pauses_s=(0.01,),
        )
        self.thread = threading.Thread(target=self.care.run)
        self.thread.start()

    def prepare(self, *rows: ledger.Entry) -> None:
        for row in rows:
            self.rows.append(row)
            for device, result in row.shared:
                placed = ledger.mps_share(device, result)
                assert placed is not None
                self.supervisor.place(placed, timeout_s=30)
        self.care.needed(needed=True)

    def has(self) -> set[str]:
        return {share_id for _, share_id in self.supervisor.shares}

    def codes(self) -> list[str]:
        return [finding.code for finding in self.care.findings()]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.stop.set()
    made.care.needed(needed=True)
    made.thread.join(40)
    assert not made.thread.is_alive()


def seen(watched: Watched) -> None:
    """Wait until it has heard of what there is."""
    status = watched.supervisor.status(timeout_s=30)
    until(lambda: watched.care._status is not None and watched.care._status.change >= status.change)


def test_a_supervisor_that_was_restarted_has_its_shares_again_and_claims_are_told(watched: Watched) -> None:
    watched.prepare(share(1, by=MPS), share(2, by=MPS), share(3, by=MPS, gpu=OTHER))
    seen(watched)
    watched.supervisor.restart()
    until(lambda: watched.has() == {"share-1", "share-2", "share-3"})
    until(lambda: len(watched.events.told) == 3)
    assert {reason for _, reason, _ in watched.events.told} == {"MpsRestarted"}
    assert all("started again" in message for _, _, message in watched.events.told)


def test_what_no_row_asks_for_is_removed(watched: Watched) -> None:
    watched.prepare(share(1, by=MPS), share(2, by=MPS))
    del watched.rows[0]
    watched.supervisor.tell(daemon(restarts=0, shares=("share-1", "share-2")))
    until(lambda: watched.has() == {"share-2"})
    watched.care.needed(needed=False)
    watched.rows.clear()
    watched.supervisor.daemons.clear()
    watched.care.sweep()
    assert watched.has() == set()


def daemon(
    *,
    restarts: int,
    state: DaemonState = DaemonState.RUNNING,
    shares: tuple[str, ...] = ("share-1",),
    error: str | None = None,
) -> mps_values.Daemon:
    row = share(1, by=MPS)
    placed = ledger.mps_share(*row.shared[0])
    assert placed is not None
    return mps_values.Daemon(
        device=DEVICE,
        uuid=placed.uuid,
        protocol=placed.protocol,
        state=state,
        restarts=restarts,
        shares=shares,
        error=error,
    )


def test_a_daemon_that_ends_is_told_on_its_claims_and_shown_while_it_is_down(watched: Watched) -> None:
    watched.prepare(share(1, by=MPS), share(2, by=MPS, gpu=OTHER))
    seen(watched)
    # What a program says is no pattern.
    watched.supervisor.tell(daemon(restarts=0, state=DaemonState.WAITING, error="killed by signal 9 {} {device.x}"))
    until(lambda: len(watched.events.told) == 1)
    claim, reason, message = watched.events.told[0]
    assert (claim, reason) == (share(1).claim, "MpsDaemonEnded")
    assert "killed by signal 9 {} {device.x}" in message
    until(lambda: watched.codes() == ["mps-daemon-down"])
    watched.supervisor.tell(daemon(restarts=1))
    until(lambda: watched.codes() == [])
    until(lambda: len(watched.events.told) == 2)


def test_a_supervisor_that_is_away_is_a_finding_until_it_is_back(watched: Watched) -> None:
    watched.prepare(share(1, by=MPS))
    watched.supervisor.down = True
    until(lambda: watched.codes() == ["mps-supervisor-away"])
    watched.supervisor.down = False
    watched.supervisor.restart()
    until(lambda: watched.has() == {"share-1"})
    until(lambda: watched.codes() == [])


def test_a_share_that_cannot_be_placed_is_a_finding_and_tried_again(watched: Watched) -> None:
    watched.rows.append(share(1, by=MPS))
    watched.supervisor.unplaceable = MpsError("no memory for it", retryable=True)
    watched.care.needed(needed=True)
    until(lambda: watched.codes() == ["mps-daemon-down"])
    assert "no memory for it" in watched.care.findings()[0].message
    watched.supervisor.unplaceable = None
    until(lambda: watched.has() == {"share-1"})
    until(lambda: watched.codes() == [])


def test_one_that_does_not_lead_touches_nothing(watched: Watched) -> None:
    watched.leads = False
    watched.rows.append(share(1, by=MPS))
    watched.care.needed(needed=True)
    assert not watched.stop.wait(0.1)
    assert watched.has() == set()


def test_a_device_whose_name_is_none_of_ours_is_left_alone(watched: Watched) -> None:
    odd = replace(daemon(restarts=0), device="somebody-else")
    placed = ledger.mps_share(*share(1, by=MPS).shared[0])
    assert placed is not None
    watched.supervisor.place(replace(placed, device="somebody-else"), timeout_s=30)
    watched.supervisor.daemons["somebody-else"] = odd
    watched.care.sweep()
    assert watched.has() == {"share-1"}
