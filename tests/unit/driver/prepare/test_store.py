# SPDX-License-Identifier: Apache-2.0
"""store: the record. Aspects: rows and holders, cost, damage and rebuilding, newer versions, two instances, epochs,
what was published, reading beside an agent, parts of GPUs, shares.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import mig
from driver.errors import RecordError
from driver.prepare import cdi, claims, ledger, plan, recordfile, schema, store
from driver.sharing import shares
from tests.fakes import preparing

DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=True)


def planned(number: int, *devices: int, admin: bool = False, boot_id: str = preparing.BOOT_ID) -> plan.PreparePlan:
    allocation = claims.Allocation(
        claim=preparing.ref(number),
        results=tuple(
            ledger.Result(request="gpu", pool=preparing.POOL, device=preparing.NAMES[device], admin=admin)
            for device in devices
        ),
    )
    made = plan.plan_prepare(
        allocation, devices=preparing.FixedIndex().devices, holders=(), dialect=DIALECT, boot_id=boot_id
    )
    assert isinstance(made, plan.PreparePlan)
    return made


class Records:
    """Instances of the record of one node, closed at the end; what CDI files would give back is `salvaged`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / store.FILE_NAME
        self.salvaged: list[ledger.Entry] = []
        self.reports = preparing.Reports()
        self._made: list[store.Store] = []

    def make(self, *, salvage: Callable[[], Iterable[ledger.Entry]] | None = None) -> store.Store:
        """One more instance, not open yet."""
        made = store.Store(
            self.directory,
            boot_id=preparing.BOOT_ID,
            salvage=salvage or (lambda: self.salvaged),
            reports=self.reports,
        )
        self._made.append(made)
        return made

    def opened(self) -> store.Store:
        """One more instance that can be used."""
        made = self.make()
        assert made.open() is None
        return made

    def filled(self, *, claims_count: int = 5) -> bytes:
        """A record of some claims, closed; its bytes."""
        record = self.opened()
        for number in range(claims_count):
            record.put(planned(number, number), previous=None, timeout_s=30)
        self.close()
        return self.path.read_bytes()

    def close(self) -> None:
        for made in self._made:
            made.close()
        self._made.clear()

    def aside(self) -> list[str]:
        """Names of what was moved aside."""
        return sorted(path.name for path in self.directory.iterdir() if "damaged" in path.name)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    made = Records(tmp_path)
    yield made
    made.close()


def uids(record: store.Store) -> set[str]:
    return {entry.claim.uid for entry in record.rows()}


def test_what_is_put_is_got_and_what_is_removed_is_gone(records: Records) -> None:
    record = records.opened()
    first, second = planned(1, 0, 1), planned(2, 2)
    assert record.get(preparing.ref(1).uid) is None
    record.put(first, previous=None, timeout_s=30)
    record.put(second, previous=None, timeout_s=30)
    assert record.get(preparing.ref(1).uid) == first.entry
    assert record.rows() == (first.entry, second.entry)
    assert record.count() == 2
    assert record.held_devices() == frozenset(preparing.NAMES[:3])
    holder = plan.Holder(entry=first.entry, device=first.entry.devices[1])
    assert record.holders(preparing.NAMES[1:2] + preparing.NAMES[5:]) == (holder,)
    record.remove(first.entry, timeout_s=30)
    assert record.rows() == (second.entry,)
    assert record.held_devices() == frozenset(preparing.NAMES[2:3])
    record.remove(first.entry, timeout_s=30)


def test_rows_survive_a_restart(records: Records) -> None:
    records.filled()
    assert len(records.opened().rows()) == 5
    assert records.reports.rebuilt == []


def test_a_device_never_has_two_claims_whatever_is_asked(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)
    with pytest.raises(RecordError) as caught:
        record.put(planned(2, 1, 0), previous=None, timeout_s=30)
    assert caught.value.retryable
    assert uids(record) == {preparing.ref(1).uid}
    assert record.held_devices() == {preparing.NAMES[0]}
    record.put(planned(3, 0, admin=True), previous=None, timeout_s=30)
    assert record.held_devices() == {preparing.NAMES[0]}


def test_a_claim_that_is_prepared_again_has_its_new_devices_only(records: Records) -> None:
    record = records.opened()
    old = planned(1, 0, 1, boot_id="before")
    record.put(old, previous=None, timeout_s=30)
    record.put(planned(1, 1, 2), previous=old.entry, timeout_s=30)
    assert record.held_devices() == frozenset(preparing.NAMES[1:3])
    assert record.count() == 1


def test_a_displaced_holder_loses_that_device_only(records: Records) -> None:
    record = records.opened()
    old = planned(1, 0, 1, boot_id="before")
    record.put(old, previous=None, timeout_s=30)
    new = planned(2, 0)
    displacing = plan.PreparePlan(
        entry=new.entry, columns=new.columns, displaced=((preparing.NAMES[0], old.entry.claim.uid),)
    )
    record.put(displacing, previous=None, timeout_s=30)
    assert {holder.device.name: holder.claim for holder in record.holders(preparing.NAMES)} == {
        preparing.NAMES[0]: preparing.ref(2),
        preparing.NAMES[1]: preparing.ref(1),
    }
    record.remove(old.entry, timeout_s=30)
    assert record.held_devices() == {preparing.NAMES[0]}
    records.close()
    assert records.opened().count() == 1
    assert records.reports.rebuilt == []


def test_the_version_changes_with_every_change_by_anybody(records: Records) -> None:
    first, second = records.opened(), records.opened()
    before = second.version()
    assert second.version() == before
    first.put(planned(1, 0), previous=None, timeout_s=30)
    between = second.version()
    assert between != before
    second.put(planned(2, 1), previous=None, timeout_s=30)
    assert second.version() != between


def test_nothing_on_the_path_of_a_claim_reads_all_rows(records: Records) -> None:
    records.filled()
    with closing(sqlite3.connect(records.path)) as connection:
        for statement in (store._SELECT_ONE, recordfile._HOLDERS_ON, *recordfile._LET_GO):
            values = ("x", "y")[: len(set(re.findall(r"\?1|\?2", statement)) or statement.count("?") * "?")]
            steps = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
            assert not [step for step in steps if "SCAN" in step[-1]], steps


def test_only_the_agent_may_read_the_record(records: Records) -> None:
    records.filled()
    records.opened()
    for path in records.directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "garbage": lambda data: random.Random(1).randbytes(len(data)),
    "text": lambda _: b'{"prepared": []}\n' * 300,
    "half a page": lambda data: data[:2000],
    "one page": lambda data: data[:4096],
    "half": lambda data: data[: len(data) // 2],
    "one page less": lambda data: data[:-4096],
    "zeros in front": lambda data: bytes(4096) + data[4096:],
    "zeros behind": lambda data: data[:8192] + bytes(len(data) - 8192),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_moved_aside_and_rebuilt_from_cdi_files(records: Records, kind: str) -> None:
    data = DAMAGE[kind](records.filled())
    records.path.write_bytes(data)
    Path(f"{records.path}-wal").write_bytes(b"log")
    records.salvaged = [planned(number, number).entry for number in range(3)]
    record = records.opened()
    assert record.rows() == tuple(records.salvaged)
    assert [count for _, count in records.reports.rebuilt] == [3]
    (aside,) = (name for name in records.aside() if not name.endswith(("-wal", "-shm")))
    assert records.directory.joinpath(aside).read_bytes() == data, "nothing is lost"
    record.put(planned(7, 7), previous=None, timeout_s=30)
    records.close()
    assert len(records.opened().rows()) == 4
    assert len(records.reports.rebuilt) == 1


def test_another_applications_database_is_moved_aside(records: Records) -> None:
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("CREATE TABLE claims (claim_uid TEXT PRIMARY KEY)")
        connection.commit()
    assert records.opened().rows() == ()
    ((reason, _),) = records.reports.rebuilt
    assert "application id" in reason


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE holdings",
        "DROP TABLE meta",
        "DELETE FROM meta",
        "DELETE FROM holdings WHERE rowid IN (SELECT 1) OR device LIKE '%10-00-0'",
        "UPDATE holdings SET device = 'gpu-0000-1f-00-0' WHERE device LIKE '%10-00-0'",
        "UPDATE claims SET results = replace(results, '-10-', '-17-')",
        "UPDATE claims SET devices = NULL_TEXT",
        "UPDATE claims SET checksum = checksum + 1",
    ],
)
def test_a_record_that_contradicts_itself_is_replaced(records: Records, statement: str) -> None:
    records.filled()
    statement = statement.replace("NULL_TEXT", "x'ff00'").replace("rowid IN (SELECT 1) OR ", "")
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute(statement)
        connection.commit()
    records.salvaged = [planned(1, 1).entry]
    assert records.opened().rows() == tuple(records.salvaged)
    assert len(records.aside()) == 1


def test_any_flipped_byte_is_harmless_or_found(records: Records, tmp_path: Path) -> None:
    data = records.filled()
    expected = records.opened().rows()
    records.close()
    chance = random.Random(20261129)
    found = 0
    for spot in chance.sample([spot for spot, byte in enumerate(data) if byte], 60):
        flipped = bytearray(data)
        flipped[spot] ^= 1 << chance.randrange(8)
        for path in tmp_path.glob("record*"):
            path.unlink()
        records.path.write_bytes(flipped)
        records.salvaged = list(expected)
        record = records.opened()
        assert record.rows() == expected
        assert record.held_devices() == frozenset(preparing.NAMES[:5])
        found += bool(records.aside())
        records.close()
    assert found > 20, "many of them hit what matters"


def test_a_record_that_is_damaged_while_in_use_is_replaced_and_serving_goes_on(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("UPDATE claims SET name = 'other'")
        connection.commit()
    records.salvaged = [planned(1, 0).entry]
    with pytest.raises(RecordError) as caught:
        record.get(preparing.ref(1).uid)
    assert caught.value.retryable
    assert record.get(preparing.ref(1).uid) == planned(1, 0).entry
    assert len(records.reports.rebuilt) == 1


def test_a_record_that_was_taken_away_is_made_again(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)
    records.salvaged = [planned(1, 0).entry]
    records.path.unlink()
    assert record.look_after() is None
    assert record.rows() == tuple(records.salvaged)
    assert records.path.exists()


def test_files_that_contradict_each_other_give_each_device_once(records: Records) -> None:
    records.salvaged = [
        planned(1, 0, 1).entry,
        planned(2, 1, 2).entry,
        planned(1, 5).entry,
        planned(3, 1, admin=True).entry,
    ]
    record = records.opened()
    assert uids(record) == {preparing.ref(1).uid, preparing.ref(3).uid}
    assert record.held_devices() == frozenset(preparing.NAMES[:2])


def test_a_new_node_starts_with_an_empty_record_and_without_alarm(records: Records) -> None:
    assert records.opened().rows() == ()
    assert records.reports.rebuilt == []
    assert records.aside() == []


def set_versions(path: Path, *, version: int, min_reader: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("UPDATE meta SET value = ? WHERE key = 'min_reader'", (min_reader,))
        connection.execute("ALTER TABLE claims ADD COLUMN colour TEXT NOT NULL DEFAULT 'green'")
        connection.execute("CREATE TABLE shares (device TEXT)")
        connection.commit()


def test_a_newer_record_that_we_may_read_is_used(records: Records) -> None:
    records.filled()
    set_versions(records.path, version=9, min_reader=1)
    record = records.opened()
    assert len(record.rows()) == 5
    record.put(planned(7, 7), previous=None, timeout_s=30)
    assert record.count() == 6
    assert records.reports.rebuilt == []


def test_a_record_that_is_too_new_is_refused_and_never_touched(records: Records) -> None:
    records.filled()
    set_versions(records.path, version=9, min_reader=9)
    before = records.path.read_bytes()
    record = records.make()
    problem = record.open()
    assert problem is not None
    assert "written by a newer version (schema 9, readable since 9" in problem
    assert record.problem() == problem
    with pytest.raises(RecordError) as caught:
        record.get("x")
    assert not caught.value.retryable
    with pytest.raises(RecordError):
        record.put(planned(7, 7), previous=None, timeout_s=30)
    assert records.reports.record_errors == 3
    record.close()
    assert records.path.read_bytes() == before
    assert records.aside() == []


def test_a_damaged_record_is_not_replaced_while_another_instance_uses_it(records: Records) -> None:
    first = records.opened()
    first.put(planned(1, 0), previous=None, timeout_s=30)
    second = records.make()
    data = records.path.read_bytes()
    records.path.write_bytes(b"garbage" * 1000)
    problem = second.open()
    assert problem is not None
    assert "while another instance of the agent is at work with it" in problem
    assert records.aside() == []
    with pytest.raises(RecordError) as caught:
        second.get("x")
    assert caught.value.retryable
    first.close()
    records.salvaged = [planned(1, 0).entry]
    assert second.look_after() is None
    assert second.problem() is None
    assert second.rows() == tuple(records.salvaged)
    assert data


def test_two_instances_use_one_record(records: Records) -> None:
    first, second = records.opened(), records.opened()
    first.put(planned(1, 0), previous=None, timeout_s=30)
    assert second.get(preparing.ref(1).uid) is not None
    with pytest.raises(RecordError):
        second.put(planned(2, 0), previous=None, timeout_s=30)
    second.put(planned(3, 3), previous=None, timeout_s=30)
    assert first.count() == 2


def test_a_row_is_adopted_only_where_nothing_speaks_against_it(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)
    assert record.adopt(planned(2, 1).entry)
    assert not record.adopt(planned(2, 5).entry)
    assert not record.adopt(planned(3, 0).entry)
    assert uids(record) == {preparing.ref(1).uid, preparing.ref(2).uid}


def test_every_epoch_is_higher_than_all_before(records: Records) -> None:
    record = records.opened()
    assert [record.next_epoch(0), record.next_epoch(0), record.next_epoch(41), record.next_epoch(0)] == [1, 2, 42, 43]
    records.close()
    assert records.opened().next_epoch(7) == 44


def test_what_was_published_is_remembered(records: Records) -> None:
    record = records.opened()
    assert record.load_published() == {}
    record.save_published({"gpu-b": {"uuid": "B"}, "gpu-a": {"uuid": "A"}})
    record.save_published({"gpu-a": {"uuid": "A", "list": [1]}})
    records.close()
    assert records.opened().load_published() == {"gpu-a": {"uuid": "A", "list": [1]}}


def test_a_published_device_that_cannot_be_read_costs_that_one_only(records: Records) -> None:
    record = records.opened()
    record.save_published({"gpu-a": {"uuid": "A"}, "gpu-b": {"uuid": "B"}, "gpu-c": {}})
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("UPDATE published SET body = '{' WHERE device = 'gpu-a'")
        connection.execute("UPDATE published SET body = '[]' WHERE device = 'gpu-c'")
        connection.commit()
    assert record.load_published() == {"gpu-b": {"uuid": "B"}}


def test_the_attributes_of_some_published_devices_are_read_alone(records: Records) -> None:
    record = records.opened()
    rail = {"rail": {"int": 3}}
    record.save_published({"gpu-a": {"attributes": rail}, "gpu-b": {"attributes": {}}, "gpu-c": {"attributes": [1]}})
    assert record.published_attributes({"gpu-a", "gpu-c", "gpu-d", "' OR 1=1 --"}) == {"gpu-a": rail, "gpu-c": {}}
    assert record.published_attributes(()) == {}


def test_attributes_are_read_anew_when_something_else_is_published(records: Records) -> None:
    record = records.opened()
    record.save_published({"gpu-a": {"attributes": {"rail": {"int": 3}}}})
    first = record.published_attributes(["gpu-a"])["gpu-a"]
    record.save_published({"gpu-a": {"attributes": {"rail": {"int": 3}}}, "gpu-b": {}})
    assert record.published_attributes(["gpu-a"])["gpu-a"] is first
    record.save_published({"gpu-a": {"attributes": {"rail": {"int": 4}}}})
    assert record.published_attributes(["gpu-a", "gpu-b"]) == {"gpu-a": {"rail": {"int": 4}}}
    record.save_published({"gpu-b": {}})
    assert record.published_attributes(["gpu-a", "gpu-b"]) == {"gpu-b": {}}


def test_a_closed_record_refuses(records: Records) -> None:
    record = records.opened()
    record.close()
    with pytest.raises(RecordError, match="closed"):
        record.rows()
    assert record.problem() == "The record is closed"


def test_a_record_in_a_folder_that_is_gone_is_refused_with_its_path(records: Records, tmp_path: Path) -> None:
    record = records.make()
    shutil.rmtree(tmp_path)
    assert str(records.path) in (record.open() or "")
    tmp_path.mkdir()


def test_a_reader_leaves_no_trace_in_a_record_that_nobody_uses(records: Records) -> None:
    records.filled()
    before = {path.name: path.read_bytes() for path in records.directory.glob("record*")}
    assert len(store.read_rows(records.path)) == 5
    assert len(store.read_rows(records.directory)) == 5
    assert {path.name: path.read_bytes() for path in records.directory.glob("record*")} == before


def test_a_reader_sees_what_a_running_agent_has_committed_and_does_not_disturb_it(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)
    assert [entry.claim for entry in store.read_rows(records.directory)] == [preparing.ref(1)]
    record.put(planned(2, 1), previous=None, timeout_s=30)
    assert len(store.read_rows(records.directory)) == 2


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 1000])
def test_a_reader_says_what_is_wrong_and_repairs_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / store.FILE_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        store.read_rows(tmp_path)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_record_that_was_not_finished_is_made_again(records: Records, tmp_path: Path) -> None:
    records.salvaged = [planned(1, 0).entry]
    new = tmp_path / f"{store.FILE_NAME}.new"
    new.write_bytes(b"half")
    Path(f"{new}-journal").write_bytes(b"half")
    assert records.opened().rows() == tuple(records.salvaged)
    assert not new.exists()


def test_the_file_says_whose_it_is_and_who_may_read_it(records: Records) -> None:
    records.filled()
    with closing(sqlite3.connect(records.path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (ledger.VERSION,)
        assert connection.execute("SELECT value FROM meta WHERE key = 'min_reader'").fetchone() == (
            ledger.READABLE_SINCE,
        )
        for row in connection.execute(f"SELECT {recordfile.COLUMNS} FROM claims"):
            for text in row[5:9]:
                json.loads(text)


def parted(number: int, gpu: int, profile: int, start: int, *, state: ledger.ClaimState) -> plan.PreparePlan:
    index = preparing.FixedIndex()
    index.divide()
    name = preparing.part_name(gpu, profile, start)
    made = plan.plan_prepare(
        claims.Allocation(
            claim=preparing.ref(number),
            results=(ledger.Result(request="gpu", pool=preparing.POOL, device=name),),
        ),
        devices=index.devices,
        holders=(),
        dialect=DIALECT,
        boot_id=preparing.BOOT_ID,
    )
    assert isinstance(made, plan.PreparePlan)
    entry = replace(made.entry, state=state)
    return plan.PreparePlan(entry=entry, columns=ledger.to_columns(entry))


def test_holders_of_a_gpu_are_those_of_its_parts_and_of_no_other_gpu(records: Records) -> None:
    record = records.opened()
    for number, (gpu, profile, start) in enumerate([(0, 19, 0), (0, 9, 4), (1, 19, 0)]):
        record.put(parted(number, gpu, profile, start, state=ledger.ClaimState.STARTED), previous=None, timeout_s=30)
    record.put(planned(7, 2), previous=None, timeout_s=30)
    parts = {preparing.part_name(0, 19, 0), preparing.part_name(0, 9, 4)}
    for asked in ([preparing.NAMES[0]], [preparing.part_name(0, 14, 2)], [*parts, preparing.NAMES[0]]):
        assert {holder.device.name for holder in record.holders(asked)} == parts
    found = [holder.device.name for holder in record.holders(preparing.NAMES)]
    assert sorted(found) == sorted({*parts, preparing.part_name(1, 19, 0), preparing.NAMES[2]})
    assert record.holders([preparing.NAMES[3], "gpu-9", ""]) == ()


def test_what_is_to_be_put_back_is_known(records: Records) -> None:
    record = records.opened()
    record.put(parted(1, 0, 19, 0, state=ledger.ClaimState.COMPLETED), previous=None, timeout_s=30)
    assert record.releasing() == ()
    left = parted(1, 0, 19, 0, state=ledger.ClaimState.RELEASING)
    record.put(left, previous=left.entry, timeout_s=30)
    assert record.releasing() == (preparing.ref(1).uid,)
    assert record.held_devices() == {preparing.part_name(0, 19, 0)}


def test_of_files_that_overlap_the_first_is_believed(records: Records) -> None:
    part = parted(1, 0, 19, 3, state=ledger.ClaimState.COMPLETED).entry
    beside = parted(2, 0, 9, 4, state=ledger.ClaimState.COMPLETED).entry
    above = parted(3, 0, 5, 0, state=ledger.ClaimState.COMPLETED).entry
    records.salvaged = [part, beside, above, planned(4, 0).entry, planned(5, 1).entry]
    record = records.opened()
    assert uids(record) == {preparing.ref(number).uid for number in (1, 2, 5)}
    assert record.adopt(above) is False


def test_a_record_with_parts_is_closed_to_versions_that_know_none(records: Records) -> None:
    record = records.opened()
    record.put(planned(1, 0), previous=None, timeout_s=30)

    def versions() -> tuple[int, int]:
        with closing(sqlite3.connect(records.path)) as connection:
            (least,) = connection.execute("SELECT value FROM meta WHERE key = 'min_reader'").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            return least, version

    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("PRAGMA user_version=1")
    assert versions() == (1, 1)
    record.put(parted(2, 1, 19, 0, state=ledger.ClaimState.STARTED), previous=None, timeout_s=30)
    assert versions() == (ledger.PARTITIONS_SINCE, ledger.PARTITIONS_SINCE)


ROOM = ledger.Room(memory=100, compute=100, sharers=3)
SHARED = preparing.NAMES[0]


def sharing(
    number: int,
    *amounts: tuple[int, int],
    device: str = SHARED,
    boot_id: str = preparing.BOOT_ID,
    place: mig.MigPlacement | None = None,
) -> plan.PreparePlan:
    """A claim with shares of a device, each of so much memory and compute."""
    claim = preparing.ref(number)
    held = ledger.HeldDevice(
        name=device, address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",), place=place, room=ROOM
    )
    levels = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.NONE)
    entry = ledger.Entry(
        claim=claim,
        state=ledger.ClaimState.COMPLETED,
        boot_id=boot_id,
        devices=(held,),
        results=tuple(
            ledger.Result(
                request="gpu",
                pool=preparing.POOL,
                device=device,
                share_id=f"s{number}-{position}",
                share=ledger.ShareUse(memory=memory, compute=compute, enforcement=levels),
            )
            for position, (memory, compute) in enumerate(amounts)
        ),
        cdi_ids=tuple((DIALECT.device_id(claim.uid, device, f"s{number}-{n}"),) for n, _ in enumerate(amounts)),
    )
    return plan.PreparePlan(entry=entry, columns=ledger.to_columns(entry))


def test_a_device_has_many_claims_in_shares_and_each_goes_alone(records: Records) -> None:
    record = records.opened()
    first, second = sharing(1, (10, 10), (20, 20)), sharing(2, (30, 30))
    for made in (first, second):
        record.put(made, previous=None, timeout_s=30)
    assert [holder.entry for holder in record.holders([SHARED])] == [first.entry, second.entry]
    assert record.held_devices() == {SHARED}
    record.put(first, previous=first.entry, timeout_s=30)
    record.remove(first.entry, timeout_s=30)
    assert [holder.entry for holder in record.holders([SHARED])] == [second.entry]
    assert record.held_devices() == {SHARED}
    records.close()
    assert records.opened().rows() == (second.entry,)
    assert records.reports.rebuilt == []


def test_those_who_share_are_read_apart_from_those_who_do_not(records: Records) -> None:
    record = records.opened()
    assert record.sharing() == ()
    record.put(planned(1, 1), previous=None, timeout_s=30)
    made = [sharing(number, (10, 10), (10, 10)) for number in (2, 3)]
    for each in made:
        record.put(each, previous=None, timeout_s=30)
    assert record.sharing() == tuple(each.entry for each in made)
    record.remove(made[0].entry, timeout_s=30)
    assert record.sharing() == (made[1].entry,)


def test_a_device_is_one_claims_alone_or_shared_whatever_is_asked(records: Records) -> None:
    record = records.opened()
    record.put(sharing(1, (10, 10)), previous=None, timeout_s=30)
    with pytest.raises(RecordError, match="given out in shares"):
        record.put(planned(2, 1, 0), previous=None, timeout_s=30)
    record.put(planned(3, 1), previous=None, timeout_s=30)
    with pytest.raises(RecordError, match="held by one claim alone"):
        record.put(sharing(4, (10, 10), device=preparing.NAMES[1]), previous=None, timeout_s=30)
    assert uids(record) == {preparing.ref(1).uid, preparing.ref(3).uid}
    # An older version that is still at work knows the one table only.
    with closing(sqlite3.connect(records.path)) as older, pytest.raises(sqlite3.IntegrityError, match="in shares"):
        older.execute("INSERT INTO holdings VALUES (?, 'a')", (SHARED,))


def test_a_claim_that_is_prepared_again_may_have_alone_what_it_shared(records: Records) -> None:
    record = records.opened()
    old, other = sharing(1, (10, 10), boot_id="before"), sharing(2, (10, 10), boot_id="before")
    record.put(old, previous=None, timeout_s=30)
    record.put(other, previous=None, timeout_s=30)
    new = planned(1, 0)
    displacing = plan.PreparePlan(entry=new.entry, columns=new.columns, displaced=((SHARED, other.entry.claim.uid),))
    record.put(displacing, previous=old.entry, timeout_s=30)
    assert [holder.claim for holder in record.holders([SHARED])] == [preparing.ref(1)]
    records.close()
    assert records.opened().count() == 2
    assert records.reports.rebuilt == []


def test_a_record_with_shares_is_closed_to_versions_that_know_none(records: Records) -> None:
    record = records.opened()
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("PRAGMA user_version=1")
        record.put(sharing(1, (10, 10)), previous=None, timeout_s=30)
        assert connection.execute("SELECT value FROM meta WHERE key = 'min_reader'").fetchone() == (
            ledger.SHARES_SINCE,
        )
        assert connection.execute("PRAGMA user_version").fetchone() == (ledger.SHARES_SINCE,)


def test_a_record_of_before_there_were_shares_gets_what_they_need(records: Records) -> None:
    records.filled()
    with closing(sqlite3.connect(records.path)) as connection:
        for thing in ("TRIGGER alone", "TRIGGER shared", "TABLE sharings"):
            connection.execute(f"DROP {thing}")
    record = records.opened()
    record.put(sharing(8, (10, 10), device=preparing.NAMES[7]), previous=None, timeout_s=30)
    with pytest.raises(RecordError, match="given out in shares"):
        record.put(planned(9, 7), previous=None, timeout_s=30)
    assert records.reports.rebuilt == []


def test_a_lost_record_has_several_claims_of_a_device_again_and_no_more_than_there_is(records: Records) -> None:
    fitting = [sharing(1, (50, 20)), sharing(2, (50, 20))]
    too_much = [sharing(3, (1, 0)), planned(4, 0), sharing(5, (60, 0), device=preparing.NAMES[1])]
    beside = [sharing(6, (41, 0), device=preparing.NAMES[1]), sharing(7, (40, 0), device=preparing.NAMES[1])]
    records.salvaged = [made.entry for made in (*fitting, *too_much, *beside)]
    record = records.opened()
    assert uids(record) == {preparing.ref(number).uid for number in (1, 2, 5, 7)}
    assert not record.adopt(sharing(8, (0, 61)).entry)
    assert record.adopt(sharing(8, (0, 60)).entry)
    assert not record.adopt(sharing(9, (0, 0)).entry)


def test_shares_of_a_part_leave_no_room_for_what_overlaps_it(records: Records) -> None:
    part = preparing.part_name(0, 9, 4)
    records.salvaged = [
        sharing(1, (50, 20), device=part, place=mig.MigPlacement(start=4, size=4)).entry,
        sharing(2, (50, 20), device=part, place=mig.MigPlacement(start=4, size=4)).entry,
        sharing(3, (1, 1)).entry,
        planned(4, 0).entry,
        parted(5, 0, 14, 4, state=ledger.ClaimState.COMPLETED).entry,
        parted(6, 0, 14, 2, state=ledger.ClaimState.COMPLETED).entry,
    ]
    assert uids(records.opened()) == {preparing.ref(number).uid for number in (1, 2, 6)}


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM sharings",
        "UPDATE sharings SET claim_uid = 'somebody'",
        "INSERT INTO sharings VALUES ('gpu-0000-77-00-0', 'somebody')",
        "DROP TABLE sharings",
    ],
)
def test_damage_among_shares_is_found(records: Records, damage: str) -> None:
    record = records.opened()
    made = sharing(1, (10, 10))
    record.put(made, previous=None, timeout_s=30)
    records.close()
    records.salvaged = [made.entry]
    with closing(sqlite3.connect(records.path)) as connection:
        connection.execute("DROP TRIGGER alone")
        connection.execute("DROP TRIGGER shared")
        connection.execute(damage)
        connection.commit()
    assert records.opened().rows() == (made.entry,)
    assert len(records.reports.rebuilt) == 1
