# SPDX-License-Identifier: Apache-2.0
"""Records and CDI files that earlier versions left on nodes load for ever. `record/record-N.db` and `record/claim-N-*.json`
were written by the version with schema N; they are never written again. A new schema adds a file and a list of its own.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discovery import mig
from discovery.address import PciAddress
from driver import values
from driver.errors import RecordError
from driver.prepare import cdi, ledger, plan, store
from driver.sharing import shares
from tests.fakes import preparing

FOLDER = Path(__file__).parent / "record"
BOOT_ID = "0b1f6a3e-5f0a-4a51-8f0e-6f3b6d1c9a10"
EPOCH = 7
PUBLISHED = {"gpu-0000-1b-00-0": {"uuid": "GPU-1", "productName": "NVIDIA H100 80GB HBM3"}}


def _ref(number: int, name: str) -> values.ClaimRef:
    uid = f"5ad1c7e{number}-7c1f-4d7c-9a39-0242ac120002"
    return values.ClaimRef(uid=values.ClaimUid(uid), namespace="team-a", name=name)


def _device(bus: str, minor: int) -> ledger.HeldDevice:
    return ledger.HeldDevice(
        name=f"gpu-0000-{bus}-00-0", address=f"0000:{bus}:00.0", uuid=f"GPU-{minor}", nodes=(f"/dev/nvidia{minor}",)
    )


def _ids(claim: values.ClaimRef, device: str, share: str = "") -> tuple[str, str]:
    return f"gpu.nearfield.dev/claim={claim.uid}-{device}{share}", "gpu.nearfield.dev/node=driver"


_PLAIN, _PAIR, _MIXED = _ref(1, "plain"), _ref(2, "pair"), _ref(3, "mixed")
_SHARE = "6b4d7f0a-5b2e-4d51-9c9f-0d3f3f6e8f11"

ENTRIES = (
    ledger.Entry(
        claim=_PLAIN,
        state=ledger.ClaimState.COMPLETED,
        boot_id=BOOT_ID,
        devices=(_device("1b", 0),),
        results=(ledger.Result(request="gpu", pool="node-1", device="gpu-0000-1b-00-0"),),
        cdi_ids=(_ids(_PLAIN, "gpu-0000-1b-00-0"),),
    ),
    ledger.Entry(
        claim=_PAIR,
        state=ledger.ClaimState.COMPLETED,
        boot_id="a boot before",
        devices=(_device("43", 1), _device("52", 2)),
        results=tuple(
            ledger.Result(request="pair/near", pool="node-1", device=device)
            for device in ("gpu-0000-43-00-0", "gpu-0000-52-00-0")
        ),
        cdi_ids=(_ids(_PAIR, "gpu-0000-43-00-0"), _ids(_PAIR, "gpu-0000-52-00-0")),
    ),
    ledger.Entry(
        claim=_MIXED,
        state=ledger.ClaimState.COMPLETED,
        boot_id=BOOT_ID,
        devices=(_device("61", 3),),
        results=(
            ledger.Result(
                request="part",
                pool="node-1",
                device="gpu-0000-61-00-0",
                share_id=_SHARE,
                consumed_capacity={"memory": "20Gi", "compute": "25"},
            ),
            ledger.Result(request="watch", pool="node-1", device="gpu-0000-61-00-0", admin=True),
        ),
        cdi_ids=(_ids(_MIXED, "gpu-0000-61-00-0", f"-{_SHARE}"), _ids(_MIXED, "gpu-0000-61-00-0")),
    ),
)


_GPU = PciAddress(0, 0x1B, 0, 0)
_BEGUN, _DIVIDED, _LEFT = _ref(4, "begun"), _ref(5, "divided"), _ref(6, "left")


def _part(start: int, size: int, profile: str, profile_id: int, *, made: bool) -> ledger.HeldDevice:
    caps = tuple(
        mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{66 + 9 * start + n}", major=237, minor=66 + 9 * start + n)
        for n in range(2)
    )
    return ledger.HeldDevice(
        name=values.partition_device_name(_GPU, profile=profile, profile_id=profile_id, start=start),
        address=str(_GPU),
        uuid=f"MIG-{start}" if made else "",
        nodes=("/dev/nvidia0",),
        caps=caps if made else (),
        place=mig.MigPlacement(start=start, size=size),
    )


def _parted(
    claim: values.ClaimRef, state: ledger.ClaimState, device: ledger.HeldDevice, profile_id: int, *, at: float | None
) -> ledger.Entry:
    assert device.place is not None
    part = mig.Partition(gpu=_GPU, profile_id=profile_id, start=device.place.start)
    return ledger.Entry(
        claim=claim,
        state=state,
        boot_id=BOOT_ID,
        devices=(device,),
        results=(ledger.Result(request="part", pool="node-1", device=device.name),),
        cdi_ids=(_ids(claim, device.name),),
        hardware=ledger.hardware_of((part,), made_at=at),
    )


ENTRIES_2 = (
    _parted(_BEGUN, ledger.ClaimState.STARTED, _part(0, 1, "1g.10gb", 19, made=False), 19, at=None),
    _parted(_DIVIDED, ledger.ClaimState.COMPLETED, _part(4, 4, "3g.40gb", 9, made=True), 9, at=1764460800.25),
    _parted(_LEFT, ledger.ClaimState.RELEASING, _part(2, 2, "2g.20gb", 14, made=True), 14, at=1764460801.5),
)


_LEVELS = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
_ROOM = ledger.Room(memory=85_520_809_984, compute=100, sharers=8)


def _share(number: int, memory: str, **limits: Any) -> ledger.Result:
    return ledger.Result(
        request="share",
        pool="node-1",
        device="gpu-0000-43-00-0",
        share_id=_share_id(number),
        consumed_capacity={"memory": memory, "compute": "25", "shares": "1"},
        share=ledger.ShareUse(memory=int(memory[:-2]) << 30, compute=25, enforcement=_LEVELS, **limits),
    )


def _share_id(number: int) -> str:
    return f"0000000{number}-5b2e-4d51-9c9f-0d3f3f6e8f11"


def _sharing(claim: values.ClaimRef, state: ledger.ClaimState, *results: ledger.Result, pod: str) -> ledger.Entry:
    return ledger.Entry(
        claim=claim,
        state=state,
        boot_id=BOOT_ID,
        devices=(replace(_device("43", 1), room=_ROOM),),
        results=results,
        cdi_ids=tuple(_ids(claim, result.device, f"-{result.share_id}") for result in results),
        hardware=ledger.with_pods({}, [pod]),
    )


_SHARER, _PAIR_OF_SHARES, _PUT_BACK = _ref(7, "sharer"), _ref(8, "two"), _ref(9, "going")
_LIMITED = {"memory_limit": 8 << 30, "soft_limit": 4 << 30, "compute_limit": 10, "below_normal": True}

ENTRIES_3 = (
    _sharing(
        _SHARER, ledger.ClaimState.COMPLETED, _share(1, "20Gi", memory_limit=20 << 30, compute_limit=25), pod="pod-1"
    ),
    _sharing(
        _PAIR_OF_SHARES,
        ledger.ClaimState.COMPLETED,
        _share(2, "10Gi", **_LIMITED),
        _share(3, "10Gi", time_slice=shares.TimeSlice.LONG),
        pod="pod-2",
    ),
    _sharing(_PUT_BACK, ledger.ClaimState.RELEASING, _share(4, "1Gi", memory_limit=1 << 30), pod="pod-3"),
)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    shutil.copy(FOLDER / "record-1.db", tmp_path / store.FILE_NAME)
    return tmp_path


def test_a_record_of_schema_1_loads_and_is_used_on(record: Path) -> None:
    reports = preparing.Reports()
    opened = store.Store(record, boot_id=BOOT_ID, salvage=lambda: (), reports=reports)
    assert opened.open() is None
    assert opened.rows() == ENTRIES
    assert opened.held_devices() == {device.name for entry in ENTRIES for device in entry.devices}
    assert opened.load_published() == PUBLISHED
    assert opened.next_epoch(0) == EPOCH + 1
    opened.remove(ENTRIES[0], timeout_s=30)
    again = plan.PreparePlan(entry=ENTRIES[0], columns=ledger.to_columns(ENTRIES[0]))
    opened.put(again, previous=None, timeout_s=30)
    assert opened.rows() == ENTRIES
    assert reports.rebuilt == []
    opened.close()


def test_a_record_of_schema_1_is_read_beside_the_agent(record: Path) -> None:
    assert store.read_rows(record) == ENTRIES


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_a_claim_file_of_schema_1_gives_its_record_back(number: int) -> None:
    dialect = cdi.Dialect(driver="gpu.nearfield.dev", mock=False)
    assert dialect.entry_of((FOLDER / f"claim-1-{number}.json").read_bytes()) == ENTRIES[number]


def test_answers_of_schema_1_stay_the_same() -> None:
    devices = ledger.answer(ENTRIES[2]).devices
    assert [(device.request_names, device.cdi_device_ids, device.share_id) for device in devices] == [
        (("part",), _ids(_MIXED, "gpu-0000-61-00-0", f"-{_SHARE}"), _SHARE),
        (("watch",), _ids(_MIXED, "gpu-0000-61-00-0"), None),
    ]


def test_a_record_of_schema_2_loads_and_is_used_on(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "record-2.db", tmp_path / store.FILE_NAME)
    reports = preparing.Reports()
    opened = store.Store(tmp_path, boot_id=BOOT_ID, salvage=lambda: (), reports=reports)
    assert opened.open() is None
    assert opened.rows() == ENTRIES_2
    assert opened.releasing() == (_LEFT.uid,)
    holders = opened.holders(["gpu-0000-1b-00-0"])
    assert {holder.device for holder in holders} == {entry.devices[0] for entry in ENTRIES_2}
    assert ENTRIES_2[1].partitions == (mig.Partition(gpu=_GPU, profile_id=9, start=4),)
    opened.remove(ENTRIES_2[0], timeout_s=30)
    again = plan.PreparePlan(entry=ENTRIES_2[0], columns=ledger.to_columns(ENTRIES_2[0]))
    opened.put(again, previous=None, timeout_s=30)
    assert opened.rows() == ENTRIES_2
    assert reports.rebuilt == []
    opened.close()


def test_a_claim_file_of_schema_2_gives_its_record_back_and_is_written_the_same() -> None:
    dialect = cdi.Dialect(driver="gpu.nearfield.dev", mock=False)
    kept = (FOLDER / "claim-2-1.json").read_bytes()
    assert dialect.entry_of(kept) == ENTRIES_2[1]
    assert dialect.claim_spec(ENTRIES_2[1]) == kept


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_what_schema_1_wrote_is_written_the_same(number: int) -> None:
    dialect = cdi.Dialect(driver="gpu.nearfield.dev", mock=False)
    assert dialect.claim_spec(ENTRIES[number]) == (FOLDER / f"claim-1-{number}.json").read_bytes()


def test_a_version_that_knows_no_parts_reads_a_record_until_there_is_one(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give the whole GPU to another claim."""
    opened = store.Store(record, boot_id=BOOT_ID, salvage=lambda: (), reports=preparing.Reports())
    opened.remove(ENTRIES[0], timeout_s=30)
    monkeypatch.setattr(ledger, "VERSION", 1)
    assert len(store.read_rows(record)) == len(ENTRIES) - 1
    part = plan.PreparePlan(entry=ENTRIES_2[1], columns=ledger.to_columns(ENTRIES_2[1]))
    opened.put(part, previous=None, timeout_s=30)
    with pytest.raises(RecordError, match="written by a newer version"):
        store.read_rows(record)
    opened.close()
    with pytest.raises(ledger.DamagedError, match="for readers of version 2"):
        ledger.from_document(*ledger.to_document(part.columns, since=ledger.readable_since(ENTRIES_2[1])))


def test_a_record_of_schema_3_loads_and_is_used_on(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "record-3.db", tmp_path / store.FILE_NAME)
    reports = preparing.Reports()
    opened = store.Store(tmp_path, boot_id=BOOT_ID, salvage=lambda: (), reports=reports)
    assert opened.open() is None
    assert opened.rows() == ENTRIES_3
    assert [holder.entry for holder in opened.holders(["gpu-0000-43-00-0"])] == list(ENTRIES_3)
    assert opened.releasing() == (_PUT_BACK.uid,)
    opened.remove(ENTRIES_3[0], timeout_s=30)
    opened.put(plan.joined(ENTRIES_3[0], ()), previous=None, timeout_s=30)
    assert opened.rows() == ENTRIES_3
    assert reports.rebuilt == []
    opened.close()


@pytest.mark.parametrize("number", range(2))
def test_a_claim_file_of_schema_3_gives_its_record_back_and_is_written_the_same(number: int) -> None:
    dialect = cdi.Dialect(driver="gpu.nearfield.dev", mock=False)
    kept = (FOLDER / f"claim-3-{number}.json").read_bytes()
    assert dialect.entry_of(kept) == ENTRIES_3[number]
    assert dialect.claim_spec(ENTRIES_3[number]) == kept


def test_a_version_that_knows_no_shares_reads_a_record_until_there_is_one(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give the GPU to one claim alone."""
    opened = store.Store(record, boot_id=BOOT_ID, salvage=lambda: (), reports=preparing.Reports())
    opened.remove(ENTRIES[1], timeout_s=30)
    monkeypatch.setattr(ledger, "VERSION", 2)
    assert len(store.read_rows(record)) == len(ENTRIES) - 1
    opened.put(plan.joined(ENTRIES_3[0], ()), previous=None, timeout_s=30)
    with pytest.raises(RecordError, match="written by a newer version"):
        store.read_rows(record)
    opened.close()
    dialect, kept = cdi.Dialect(driver="gpu.nearfield.dev", mock=False), (FOLDER / "claim-3-0.json").read_bytes()
    with pytest.raises(ledger.DamagedError, match="for readers of version 3"):
        dialect.entry_of(kept)
