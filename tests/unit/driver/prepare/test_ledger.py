# SPDX-License-Identifier: Apache-2.0
"""ledger: what is kept of a claim. Aspects: the answer, the way to text and back, damage, newer writers."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import mig
from driver import values
from driver.prepare import ledger
from tests.fakes import preparing

ENTRY = ledger.Entry(
    claim=preparing.ref(1),
    state=ledger.ClaimState.COMPLETED,
    boot_id=preparing.BOOT_ID,
    devices=(ledger.HeldDevice(name="gpu-0", address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",)),),
    results=(
        ledger.Result(request="pair/near", pool="node-1", device="gpu-0"),
        ledger.Result(
            request="share", pool="node-1", device="gpu-0", share_id="s-1", consumed_capacity={"memory": "20Gi"}
        ),
        ledger.Result(request="watch", pool="node-1", device="gpu-0", admin=True),
    ),
    cdi_ids=(("d/claim=a", "d/node=driver"), ("d/claim=b", "d/node=driver"), ("d/claim=a", "d/node=driver")),
    hardware={"mig": [{"gpu": "0000:10:00.0", "profileID": 19, "start": 0}]},
)


def rebuilt(document: dict[str, Any]) -> ledger.Entry:
    text = json.dumps(document)
    return ledger.from_document(text, f"{zlib.crc32(text.encode()):08x}")


def test_the_answer_has_base_request_names_and_one_device_for_each_result() -> None:
    ids = ("d/claim=a", "d/node=driver")
    assert ledger.answer(ENTRY) == values.Prepared(
        devices=(
            values.PreparedDevice(request_names=("pair",), pool="node-1", device="gpu-0", cdi_device_ids=ids),
            values.PreparedDevice(
                request_names=("share",),
                pool="node-1",
                device="gpu-0",
                cdi_device_ids=("d/claim=b", "d/node=driver"),
                share_id="s-1",
            ),
            values.PreparedDevice(request_names=("watch",), pool="node-1", device="gpu-0", cdi_device_ids=ids),
        )
    )


@pytest.mark.parametrize(
    ("state", "boot_id", "answers"),
    [
        (ledger.ClaimState.COMPLETED, preparing.BOOT_ID, True),
        (ledger.ClaimState.COMPLETED, "another", False),
        (ledger.ClaimState.STARTED, preparing.BOOT_ID, False),
        (ledger.ClaimState.RELEASING, preparing.BOOT_ID, False),
    ],
)
def test_only_what_was_completed_in_this_boot_is_answered(
    state: ledger.ClaimState, boot_id: str, answers: bool
) -> None:
    assert replace(ENTRY, state=state, boot_id=boot_id).answers(preparing.BOOT_ID) is answers


TEXT = st.text(max_size=12)
RESULT = st.builds(
    ledger.Result,
    request=TEXT,
    pool=TEXT,
    device=st.sampled_from(["gpu-0", "gpu-1"]),
    share_id=st.none() | TEXT,
    consumed_capacity=st.dictionaries(TEXT, TEXT, max_size=2),
    admin=st.booleans(),
)

NUMBER = st.integers(min_value=0, max_value=1 << 20)
CAPABILITY = st.builds(mig.CapabilityNode, path=TEXT, major=NUMBER, minor=NUMBER)
PLACE = st.builds(mig.MigPlacement, start=NUMBER, size=NUMBER)
PARTITION = st.builds(mig.Partition, gpu=st.sampled_from(preparing.ADDRESSES), profile_id=NUMBER, start=NUMBER)
TIME = st.floats(min_value=0, max_value=1e10)


@st.composite
def entries(draw: st.DrawFn) -> ledger.Entry:
    results = tuple(draw(st.lists(RESULT, max_size=3)))
    return ledger.Entry(
        claim=values.ClaimRef(uid=values.ClaimUid(draw(TEXT)), namespace=draw(TEXT), name=draw(TEXT)),
        state=draw(st.sampled_from(ledger.ClaimState)),
        boot_id=draw(TEXT),
        devices=tuple(
            ledger.HeldDevice(
                name=name,
                address=draw(TEXT),
                uuid=draw(TEXT),
                nodes=tuple(draw(st.lists(TEXT, max_size=2))),
                caps=tuple(draw(st.lists(CAPABILITY, max_size=2))),
                place=draw(st.none() | PLACE),
            )
            for name in ("gpu-0", "gpu-1")
        ),
        results=results,
        cdi_ids=tuple((draw(TEXT),) for _ in results),
        hardware={
            **ledger.hardware_of(draw(st.lists(PARTITION, max_size=2)), made_at=draw(st.none() | TIME)),
            **draw(st.dictionaries(st.just("later") | st.just("more"), st.integers() | TEXT, max_size=2)),
        },
    )


@settings(max_examples=80, deadline=None)
@given(entry=entries())
def test_an_entry_comes_back_from_its_row_and_from_its_document(entry: ledger.Entry) -> None:
    columns = ledger.to_columns(entry)
    assert ledger.from_columns(columns) == entry
    assert ledger.from_document(*ledger.to_document(columns, since=ledger.readable_since(entry))) == entry


@settings(max_examples=80, deadline=None)
@given(entry=entries(), place=st.integers(min_value=0), bit=st.integers(min_value=0, max_value=6))
def test_one_flipped_bit_is_found_wherever_it_is(entry: ledger.Entry, place: int, bit: int) -> None:
    columns = ledger.to_columns(entry)
    number = place % 9
    text = columns[number]
    assert isinstance(text, str)
    if text:
        spot = place % len(text)
        flipped = text[:spot] + chr(ord(text[spot]) ^ 1 << bit) + text[spot + 1 :]
        change: dict[str, Any] = {ledger.Columns._fields[number]: flipped}
        with pytest.raises(ledger.DamagedError):
            ledger.from_columns(columns._replace(**change))
    document, checksum = ledger.to_document(columns)
    spot = place % len(document)
    flipped = document[:spot] + chr(ord(document[spot]) ^ 1 << bit) + document[spot + 1 :]
    with pytest.raises(ledger.DamagedError):
        ledger.from_document(flipped, checksum)


DOCUMENT: dict[str, Any] = json.loads(ledger.to_document(ledger.to_columns(ENTRY))[0])
DEVICE: dict[str, Any] = DOCUMENT["devices"][0]


def test_what_a_newer_version_adds_is_ignored() -> None:
    newer = {**DOCUMENT, "version": 7, "colour": "green", "devices": [{**DOCUMENT["devices"][0], "smell": 1}]}
    assert rebuilt(newer) == ENTRY


@pytest.mark.parametrize(
    "change",
    [
        {"readableSince": ledger.VERSION + 1},
        {"readableSince": None},
        {"uid": 5},
        {"state": "asleep"},
        {"devices": None},
        {"devices": []},
        {"devices": [7]},
        {"devices": [{"name": "gpu-0", "address": "a", "uuid": "u", "nodes": [1]}]},
        {"results": {}},
        {"results": [{"request": "r", "pool": "p"}]},
        {"cdiIDs": []},
        {"cdiIDs": [[], [], []]},
        {"cdiIDs": [["a"], ["b"], [3]]},
        {"hardware": []},
        {"hardware": {"mig": {}}},
        {"hardware": {"mig": [19]}},
        {"hardware": {"mig": [{"gpu": "nowhere", "profileID": 19, "start": 0}]}},
        {"hardware": {"mig": [{"gpu": "0000:10:00.0", "profileID": "19", "start": 0}]}},
        {"hardware": {"mig": [{"gpu": "0000:10:00.0", "profileID": 19}]}},
        {"hardware": {"madeAt": "noon"}},
        {"hardware": {"madeAt": True}},
        {"hardware": {"pods": "one"}},
        {"hardware": {"pods": [1]}},
        {"devices": [{**DEVICE, "place": [1]}]},
        {"devices": [{**DEVICE, "place": [1, 2, 3]}]},
        {"devices": [{**DEVICE, "place": ["1", 2]}]},
        {"devices": [{**DEVICE, "place": None}]},
        {"devices": [{**DEVICE, "caps": {}}]},
        {"devices": [{**DEVICE, "caps": [{"path": "/dev/x", "major": 1}]}]},
        {"devices": [{**DEVICE, "caps": [{"path": "/dev/x", "major": 1, "minor": True}]}]},
        {"bootID": None},
    ],
)
def test_a_document_that_says_something_else_than_an_entry_is_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(ledger.DamagedError):
        rebuilt({**DOCUMENT, **change})


@pytest.mark.parametrize("text", ["", "[]", "null", "7", "{", "[" * 100_000])
def test_text_that_is_no_document_is_damaged(text: str) -> None:
    with pytest.raises(ledger.DamagedError):
        ledger.from_document(text, f"{zlib.crc32(text.encode()):08x}")


@pytest.mark.parametrize("value", [None, 7, b"bytes"])
def test_a_column_of_another_type_is_damaged(value: Any) -> None:
    columns = ledger.to_columns(ENTRY)
    with pytest.raises(ledger.DamagedError):
        ledger.from_columns(columns._replace(results=value))
    with pytest.raises(ledger.DamagedError):
        ledger.from_columns(columns._replace(checksum=value))


WHOLE = ledger.HeldDevice(name=preparing.NAMES[0], address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",))


def part(number: int, start: int, size: int) -> ledger.HeldDevice:
    return ledger.HeldDevice(
        name=f"{preparing.NAMES[number]}-mig-x-{size}-{start}",
        address=str(preparing.ADDRESSES[number]),
        uuid="MIG-1",
        nodes=("/dev/nvidia0",),
        place=mig.MigPlacement(start=start, size=size),
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (WHOLE, WHOLE, True),
        (WHOLE, part(0, 6, 1), True),
        (WHOLE, part(1, 6, 1), False),
        (part(0, 0, 4), part(0, 3, 1), True),
        (part(0, 0, 4), part(0, 4, 4), False),
        (part(0, 0, 8), part(0, 0, 1), True),
        (part(0, 2, 2), part(1, 2, 2), False),
    ],
)
def test_devices_overlap_where_they_need_one_slice(
    one: ledger.HeldDevice, other: ledger.HeldDevice, expected: bool
) -> None:
    assert ledger.overlap(one, other) is ledger.overlap(other, one) is expected


def test_the_instance_of_a_device_is_the_one_at_its_place() -> None:
    first, second = part(0, 0, 4), part(1, 0, 4)
    made = mig.Partition(gpu=preparing.ADDRESSES[0], profile_id=9, start=0)
    entry = replace(ENTRY, devices=(first, second, WHOLE), hardware=ledger.hardware_of([made], made_at=5.0))
    assert [entry.partition_of(device) for device in entry.devices] == [made, None, None]
    assert (entry.partitions, entry.made_at) == ((made,), 5.0)
    assert ledger.hardware_of([]) == ledger.hardware_of([], made_at=5.0) == {}


def test_only_entries_with_parts_shut_older_readers_out() -> None:
    assert ledger.readable_since(replace(ENTRY, devices=(WHOLE,))) == ledger.READABLE_SINCE
    assert ledger.readable_since(replace(ENTRY, devices=(WHOLE, part(0, 0, 4)))) == ledger.PARTITIONS_SINCE
