# SPDX-License-Identifier: Apache-2.0
"""What the agent does for prepared claims while nobody asks. Aspects: reconciling at the start, files, claims that are gone,
leadership, the loop.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from driver import values
from driver.errors import RecordError
from driver.prepare import locks
from tests.fakes import preparing
from tests.fakes.preparing import NAMES, Agent, ref


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agent(tmp_path: Path, clock: Clock) -> Iterator[Agent]:
    made = Agent(tmp_path, clock=clock).start()
    yield made
    made.stop()


def path_of(agent: Agent, claim: values.ClaimRef) -> Path:
    return agent.directory.path / agent.dialect.claim_file(claim.uid)


def prepared(agent: Agent, number: int, *devices: str) -> values.ClaimRef:
    claim = agent.api.allocate(ref(number), *devices)
    assert isinstance(agent.prepare(claim), values.Prepared)
    return claim


def forget(agent: Agent, claim: values.ClaimRef) -> None:
    """Lose the row of a claim, as the end of a damaged log loses it."""
    entry = agent.record.get(claim.uid)
    assert entry is not None
    agent.record.remove(entry, timeout_s=30)


# Reconciling


def test_a_file_whose_row_was_lost_gives_it_back_at_the_next_start(agent: Agent, tmp_path: Path) -> None:
    claim = prepared(agent, 1, NAMES[0])
    answer = agent.prepare(claim)
    forget(agent, claim)
    agent.stop()
    second = Agent(tmp_path, wait_s=0.05).start()
    assert second.prepared_uids() == {claim.uid}
    assert second.prepare(claim) == answer
    assert second.api.reads == 0
    assert isinstance(second.prepare(second.api.allocate(ref(2), NAMES[0])), values.Failed)
    second.stop()


def test_a_file_whose_device_somebody_else_has_is_removed_at_the_next_start(agent: Agent, tmp_path: Path) -> None:
    claim = prepared(agent, 1, NAMES[0])
    data = path_of(agent, claim).read_bytes()
    agent.unprepare(claim)
    other = prepared(agent, 2, NAMES[0])
    path_of(agent, claim).write_bytes(data)
    agent.stop()
    second = Agent(tmp_path).start()
    assert second.claim_files() == {path_of(agent, other).name}
    assert second.prepared_uids() == {other.uid}
    second.stop()


@pytest.mark.parametrize("when", ["start", "round"])
def test_metadata_of_claims_that_are_not_prepared_goes(agent: Agent, tmp_path: Path, when: str) -> None:
    """Such as that of a Prepare that was killed before its CDI file."""
    kept = prepared(agent, 1, NAMES[0])
    for name in (ref(7).uid, "no claim of ours"):
        (agent.metadata.path / name).mkdir()
        (agent.metadata.path / name / "gpu.json").touch()
    if when == "start":
        agent.stop()
        agent = Agent(tmp_path).start()
    else:
        agent.collector.collect()
    assert {path.name for path in agent.metadata.path.iterdir()} == {kept.uid, "no claim of ours"}
    agent.unprepare(kept)
    assert agent.directory.with_metadata() == frozenset()
    agent.stop()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"cdiVersion": "0.6.0"'])
def test_a_file_that_says_nothing_is_removed_at_the_next_start(agent: Agent, tmp_path: Path, content: bytes) -> None:
    path_of(agent, ref(7)).write_bytes(content)
    agent.stop()
    second = Agent(tmp_path).start()
    assert second.claim_files() == set()
    second.stop()


def test_temporary_files_and_files_of_another_boot_go_at_the_next_start(agent: Agent, tmp_path: Path) -> None:
    claim = prepared(agent, 1, NAMES[0])
    (agent.directory.path / f".{path_of(agent, ref(5)).name}.tmp").write_bytes(b"half")
    (agent.directory.path / "of-somebody-else.json").write_text("{}")
    agent.stop()
    second = Agent(tmp_path, boot_id="another boot").start()
    assert second.claim_files() == {"of-somebody-else.json"}
    assert second.prepared_uids() == {claim.uid}
    assert isinstance(second.prepare(claim), values.Prepared)
    assert path_of(agent, claim).exists()
    second.stop()


def test_a_start_leaves_alone_what_another_instance_is_preparing(agent: Agent, tmp_path: Path) -> None:
    claim = ref(1)
    with agent.locks.claim(claim.uid, patience=locks.Deadline(1)):
        path_of(agent, claim).write_bytes(b"being written")
        second = Agent(tmp_path).start()
        assert path_of(agent, claim).exists()
    second.stop()


# Files


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "edited": lambda path: path.write_bytes(path.read_bytes().replace(b"GPU-0", b"GPU-9")),
    "touched": os.utime,
    "emptied": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_changed_file_is_written_again(agent: Agent, tmp_path: Path, change: str, restarted: bool) -> None:
    claim = prepared(agent, 1, NAMES[0])
    content = path_of(agent, claim).read_bytes()
    agent.collector.look_after()
    CHANGES[change](path_of(agent, claim))
    mending = Agent(tmp_path).start() if restarted else agent
    mending.collector.look_after()
    assert path_of(agent, claim).read_bytes() == content
    assert mending.reports.repaired == (change != "touched")
    mending.stop()


def test_a_file_of_a_claim_that_is_not_prepared_is_removed(agent: Agent) -> None:
    claim = prepared(agent, 1, NAMES[0])
    data = path_of(agent, claim).read_bytes()
    agent.unprepare(claim)
    path_of(agent, claim).write_bytes(data)
    kept = prepared(agent, 2, NAMES[1])
    agent.collector.look_after()
    assert agent.claim_files() == {path_of(agent, kept).name}
    assert agent.prepared_uids() == {kept.uid}


def test_a_folder_that_was_removed_comes_back_with_all_its_files(agent: Agent) -> None:
    claims = [prepared(agent, number, NAMES[number]) for number in range(3)]
    agent.collector.look_after()
    names = {path.name for path in agent.directory.path.iterdir()}
    for path in agent.directory.path.iterdir():
        path.unlink()
    agent.directory.path.rmdir()
    agent.collector.look_after()
    assert {path.name for path in agent.directory.path.iterdir()} == names
    assert len(names) == len(claims) + 1


def test_a_file_that_cannot_be_mended_is_said_once_and_holds_nobody_up(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = prepared(agent, 1, NAMES[0]), prepared(agent, 2, NAMES[1])
    for claim in (stuck, other):
        path_of(agent, claim).unlink()
    path_of(agent, stuck).mkdir()
    for _ in range(3):
        agent.collector.look_after()
    assert path_of(agent, other).is_file()
    assert len([record for record in caplog.records if "cannot be looked after" in record.message]) == 1
    path_of(agent, stuck).rmdir()
    agent.collector.look_after()
    assert path_of(agent, stuck).is_file()


def test_nothing_is_written_while_nothing_has_changed(agent: Agent) -> None:
    prepared(agent, 1, NAMES[0])
    agent.collector.look_after()
    before = {path.name: path.stat() for path in agent.directory.path.iterdir()}
    version = agent.record.version()
    for _ in range(3):
        agent.collector.look_after()
    assert {path.name: path.stat() for path in agent.directory.path.iterdir()} == before
    assert agent.record.version() == version


def test_looking_at_all_files_takes_little_time_and_a_lost_one_is_found_at_once(tmp_path: Path) -> None:
    now_s = itertools.count(step=0.001)
    later_s = [0.0]
    agent = Agent(tmp_path, clock=lambda: next(now_s) + later_s[0]).start()
    first, second = prepared(agent, 1, NAMES[0]), prepared(agent, 2, NAMES[1])
    time.sleep(0.05)  # until a change would show in the times of the files
    for _ in range(2):
        agent.collector.look_after()
    edited = path_of(agent, first)
    content = edited.read_bytes()
    edited.write_bytes(content.replace(b"GPU-0", b"GPU-9"))
    agent.collector.look_after()
    assert edited.read_bytes() != content, "not yet: all were looked at a moment ago"
    path_of(agent, second).unlink()
    agent.collector.look_after()
    assert path_of(agent, second).exists()
    later_s[0] = 1000.0
    agent.collector.look_after()
    assert edited.read_bytes() == content
    agent.stop()


# Claims that are gone


def gone(agent: Agent, claim: values.ClaimRef) -> None:
    agent.api.delete(claim)


def replaced(agent: Agent, claim: values.ClaimRef) -> None:
    agent.api.put(claim, preparing.claim(ref(99), [preparing.result(NAMES[0])]))


def deallocated(agent: Agent, claim: values.ClaimRef) -> None:
    agent.api.put(claim, {**preparing.claim(claim, []), "status": {}})


@pytest.mark.parametrize("release", [gone, replaced, deallocated])
def test_a_claim_that_is_released_twice_a_minute_apart_is_unprepared(
    agent: Agent, clock: Clock, release: Callable[[Agent, values.ClaimRef], None]
) -> None:
    claim, kept = prepared(agent, 1, NAMES[0]), prepared(agent, 2, NAMES[1])
    release(agent, claim)
    agent.collector.collect()
    clock.now_s = 59.0
    agent.collector.collect()
    agent.collector.confirm()
    assert agent.prepared_uids() == {claim.uid, kept.uid}
    clock.now_s = 61.0
    agent.collector.confirm()
    assert agent.prepared_uids() == {kept.uid}
    assert agent.claim_files() == {path_of(agent, kept).name}
    assert agent.reports.collected == [claim]


def test_a_claim_that_is_there_again_at_the_second_look_is_kept(agent: Agent, clock: Clock) -> None:
    claim = prepared(agent, 1, NAMES[0])
    agent.api.delete(claim)
    agent.collector.collect()
    agent.api.allocate(claim, NAMES[0])
    clock.now_s = 100.0
    agent.collector.confirm()
    agent.api.delete(claim)
    agent.collector.confirm()
    clock.now_s = 159.0
    agent.collector.collect()
    assert agent.prepared_uids() == {claim.uid}, "the first doubt was dispelled, the second is a minute old in a second"


def test_an_api_server_that_does_not_answer_concludes_nothing(agent: Agent, clock: Clock) -> None:
    claim = prepared(agent, 1, NAMES[0])
    agent.api.down(is_down=True)
    for now_s in (0.0, 100.0, 200.0):
        clock.now_s = now_s
        agent.collector.collect()
        agent.collector.confirm()
    agent.api.down(is_down=False)
    agent.api.put(claim, ["no", "claim"])
    for now_s in (300.0, 400.0):
        clock.now_s = now_s
        agent.collector.collect()
    assert agent.prepared_uids() == {claim.uid}


def test_claims_of_another_boot_are_collected_too(agent: Agent, tmp_path: Path, clock: Clock) -> None:
    claim = prepared(agent, 1, NAMES[0])
    agent.stop()
    agent.api.delete(claim)
    second = Agent(tmp_path, boot_id="another boot", clock=clock).start()
    second.collector.collect()
    clock.now_s = 100.0
    second.collector.confirm()
    assert second.prepared_uids() == set()
    second.stop()


# Leadership and the loop


def test_an_older_instance_leaves_everything_to_the_newer_one_until_that_is_gone(agent: Agent, tmp_path: Path) -> None:
    claim = prepared(agent, 1, NAMES[0])
    newer = Agent(tmp_path).start()
    assert not agent.epoch.leads()
    assert newer.epoch.leads()
    path_of(agent, claim).unlink()
    agent.collector.look_after()
    agent.collector.collect()
    assert not path_of(agent, claim).exists()
    assert agent.api.reads == 1
    newer.stop()
    assert agent.epoch.leads()
    agent.collector.look_after()
    assert path_of(agent, claim).exists()


def test_an_instance_that_cannot_use_the_record_does_not_lead(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "record.db").mkdir()
    agent = Agent(tmp_path).start()
    agent.collector.look_after()
    assert not agent.epoch.leads()
    (tmp_path / "state" / "record.db").rmdir()
    agent.collector.look_after()
    assert agent.epoch.leads()
    agent.stop()


def test_a_damaged_record_is_noticed_and_replaced_without_any_claim(agent: Agent) -> None:
    claim = prepared(agent, 1, NAMES[0])
    agent.record.path.unlink()
    agent.collector.look_after()
    assert agent.prepared_uids() == {claim.uid}


@pytest.mark.parametrize("how", ["removed", "cut off in its place"])
def test_a_record_that_is_lost_when_all_files_are_known_loses_no_claim(agent: Agent, how: str) -> None:
    claim = prepared(agent, 1, NAMES[0])
    while claim.uid not in agent.directory.listing().untouched:
        agent.collector.look_after()
    if how == "removed":
        agent.record.path.unlink()
        agent.collector.look_after()
    else:
        agent.record.path.write_bytes(b"")
        with pytest.raises(RecordError, match="opened anew"):
            agent.prepared_uids()
    assert isinstance(agent.prepare(agent.api.allocate(ref(2), NAMES[0])), values.Failed)
    agent.collector.look_after()
    assert agent.prepared_uids() == {claim.uid}
    assert path_of(agent, claim).exists()


def test_a_folder_that_cannot_be_used_is_said_once_and_looked_after_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    agent = Agent(tmp_path, look_after_s=0.01).start()
    claim = prepared(agent, 1, NAMES[0])
    aside = tmp_path / "aside"
    agent.directory.path.rename(aside)
    agent.directory.path.write_text("no folder")
    thread = threading.Thread(target=agent.collector.run, daemon=True)
    thread.start()
    while "cannot be looked after" not in caplog.text:
        thread.join(0.05)
    thread.join(0.2)
    agent.directory.path.unlink()
    while not path_of(agent, claim).exists() or "looked after again" not in caplog.text:
        thread.join(0.01)
    agent.stop_event.set()
    thread.join(40)
    agent.stop()
    assert caplog.text.count("What is prepared cannot be looked after") == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_the_loop_lives_through_a_bad_round_and_ends_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, look_after_s=0.01).start()
    claim = prepared(agent, 1, NAMES[0])
    leads = agent.epoch.leads
    rounds = iter([True])

    def once_broken() -> bool:
        if next(rounds, False):
            raise ZeroDivisionError
        return leads()

    monkeypatch.setattr(agent.epoch, "leads", once_broken)
    path_of(agent, claim).unlink()
    thread = threading.Thread(target=agent.collector.run, daemon=True)
    thread.start()
    while not path_of(agent, claim).exists():
        thread.join(0.01)
        assert thread.is_alive()
    agent.stop_event.set()
    thread.join(40)
    assert not thread.is_alive()
    agent.stop()
    assert [record for record in caplog.records if record.exc_info]
