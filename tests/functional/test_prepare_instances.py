# SPDX-License-Identifier: Apache-2.0
"""Two real processes on one node, as while one instance of the agent replaces the other. Aspects: one truth, locks, who leads,
a record that only one of them could replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.prepare import locks, store
from tests.fakes import prepare_process, preparing
from tests.fakes.preparing import NAMES, Agent, ref


class Two:
    """An older and a newer process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.api = preparing.ClaimFolder(path / "claims")
        self.older = prepare_process.PrepareProcess(path, wait_s=0.05)
        assert self.older.started()
        self.newer = prepare_process.PrepareProcess(path, wait_s=0.05)
        assert self.newer.started()

    def close(self) -> None:
        self.older.close()
        self.newer.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def devices(answer: Any) -> dict[str, list[str]]:
    """Claim UID -> its devices, of those that were prepared."""
    return {uid: [d["device"] for d in value["devices"]] for uid, value in answer.items() if "devices" in value}


def test_what_one_prepares_the_other_knows(two: Two) -> None:
    claim, rival = two.api.allocate(ref(1), NAMES[0]), two.api.allocate(ref(2), NAMES[0])
    answer = two.older.ask("prepare", claim)
    two.api.down(is_down=True)
    assert two.newer.ask("prepare", claim) == answer
    two.api.down(is_down=False)
    assert "held by" in two.newer.ask("prepare", rival)[rival.uid]["message"]
    assert two.newer.ask("unprepare", claim) == {claim.uid: {}}
    assert devices(two.older.ask("prepare", rival)) == {rival.uid: [NAMES[0]]}


def test_at_the_same_time_a_device_goes_to_one_claim(two: Two) -> None:
    claims = [two.api.allocate(ref(number), NAMES[number % 4]) for number in range(24)]
    for number in range(12):
        two.older.send("prepare", claims[number], claims[23 - number])
        two.newer.send("prepare", claims[number + 12], claims[11 - number])
    given: dict[str, list[str]] = {}
    for _ in range(12):
        for process in (two.older, two.newer):
            for uid, names in devices(process.answer()).items():
                assert given.setdefault(uid, names) == names
    held = [name for names in given.values() for name in names]
    assert sorted(held) == sorted(NAMES[:4])


def test_a_claim_is_worked_at_by_one_process_at_a_time(two: Two, tmp_path: Path) -> None:
    third = Agent(tmp_path).start()
    claim = two.api.allocate(ref(1), NAMES[0])
    with third.locks.claim(claim.uid, patience=locks.Deadline(1)):
        two.older.send("prepare", claim)
        two.newer.send("prepare", claim)
    assert devices(two.older.answer()) == devices(two.newer.answer()) == {claim.uid: [NAMES[0]]}
    third.stop()


def test_the_newer_one_leads_until_it_dies(two: Two) -> None:
    assert two.newer.ask("leads") is True
    assert two.older.ask("leads") is False
    newest = prepare_process.PrepareProcess(two.path)
    assert newest.started()
    assert [process.ask("leads") for process in (two.older, two.newer, newest)] == [False, False, True]
    newest.kill()
    assert [process.ask("leads") for process in (two.older, two.newer)] == [False, True]
    two.newer.kill()
    assert two.older.ask("leads") is True
    newest.close()


def test_only_the_leader_mends_files(two: Two) -> None:
    claim = two.api.allocate(ref(1), NAMES[0])
    two.older.ask("prepare", claim)
    (path,) = (tmp for tmp in (two.path / "cdi").iterdir() if claim.uid in tmp.name)
    path.unlink()
    two.older.ask("look_after")
    assert not path.exists()
    two.newer.ask("look_after")
    assert path.exists()


def test_a_new_instance_does_not_take_a_damaged_record_away_from_an_old_one(two: Two) -> None:
    claim = two.api.allocate(ref(1), NAMES[0])
    two.older.ask("prepare", claim)
    two.newer.kill()
    record = two.path / "state" / store.FILE_NAME
    record.write_bytes(b"damaged" * 5000)
    third = Agent(two.path, wait_s=0.05).start()
    assert "another instance" in third.prepare(two.api.allocate(ref(2), NAMES[1])).message
    assert not third.epoch.leads()
    assert record.read_bytes() == b"damaged" * 5000
    two.older.kill()
    third.collector.look_after()
    assert third.prepared_uids() == {claim.uid}
    assert third.epoch.leads()
    assert hasattr(third.prepare(ref(2)), "devices")
    third.stop()
