# SPDX-License-Identifier: Apache-2.0
"""shareuse: shares in the record. Aspects: what fits, the way to text and back, damage, who may read it, what must be put back."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.prepare import ledger, shareuse
from driver.sharing import shares
from tests.fakes import preparing

GIB = 1 << 30
ROOM = ledger.Room(memory=80 * GIB, compute=100, sharers=4)
LEVELS = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)
DEVICE = ledger.HeldDevice(name="gpu-0", address="0000:10:00.0", uuid="GPU-0", nodes=("/dev/nvidia0",), room=ROOM)


def use(memory: int = 20, compute: int | None = 25, *, levels: shares.Enforcement = LEVELS) -> ledger.ShareUse:
    return ledger.ShareUse(memory=memory * GIB, compute=compute, enforcement=levels)


def entry(*uses: ledger.ShareUse, device: ledger.HeldDevice = DEVICE, **more: Any) -> ledger.Entry:
    return ledger.Entry(
        claim=preparing.ref(1),
        state=ledger.ClaimState.COMPLETED,
        boot_id=preparing.BOOT_ID,
        devices=(device,),
        results=tuple(
            ledger.Result(request="gpu", pool="node-1", device=device.name, share_id=f"s-{number}", share=share)
            for number, share in enumerate(uses)
        ),
        cdi_ids=tuple((f"d/claim={number}",) for number, _ in enumerate(uses)),
        **more,
    )


def test_what_fits_fits_in_every_measure() -> None:
    assert shareuse.fits(ROOM, [])
    assert shareuse.fits(ROOM, [use()] * 4)
    assert not shareuse.fits(ROOM, [use()] * 5)
    assert not shareuse.fits(ROOM, [use(80), use(0, 0), use(1, 0)])
    assert not shareuse.fits(ROOM, [use(1, 100), use(1, 1)])
    assert shareuse.left(ROOM, [use(), use(5, 10)]) == shareuse.Total(memory=55 * GIB, compute=65, sharers=2)


def test_where_shares_take_turns_compute_is_not_counted() -> None:
    turns = replace(ROOM, compute=None)
    assert shareuse.fits(turns, [use(compute=None)] * 4)
    assert shareuse.left(turns, [use(compute=None)]).compute == 0


AMOUNT = st.integers(min_value=0, max_value=(1 << 63) - 1)
USE = st.builds(
    ledger.ShareUse,
    memory=AMOUNT,
    compute=st.none() | AMOUNT,
    enforcement=st.builds(
        shares.Enforcement, memory=st.sampled_from(shares.Memory), compute=st.sampled_from(shares.Compute)
    ),
    memory_limit=st.none() | AMOUNT,
    soft_limit=st.none() | AMOUNT,
    compute_limit=st.none() | AMOUNT,
    below_normal=st.booleans(),
    time_slice=st.sampled_from(shares.TimeSlice),
)
ROOMS = st.builds(ledger.Room, memory=AMOUNT, compute=st.none() | AMOUNT, sharers=AMOUNT)


@settings(max_examples=80, deadline=None)
@given(uses=st.lists(USE, min_size=1, max_size=3), room=ROOMS, pods=st.lists(st.text(max_size=5), max_size=2))
def test_shares_come_back_from_their_row_and_from_their_document(
    uses: list[ledger.ShareUse], room: ledger.Room, pods: list[str]
) -> None:
    kept = entry(*uses, device=replace(DEVICE, room=room), hardware={"pods": pods})
    columns = ledger.to_columns(kept)
    assert ledger.from_columns(columns) == kept
    since = ledger.readable_since(kept)
    assert since == ledger.SHARES_SINCE
    text, checksum = ledger.to_document(columns, since=since)
    assert ledger.from_document(text, checksum) == kept
    assert json.loads(text)["readableSince"] == since
    assert ledger.held_devices(columns) == (frozenset(), frozenset({"gpu-0"}))
    assert kept.pods == tuple(pods)
    assert [result.share for _, result in kept.shared] == uses


PLAIN = shareuse.to_object(use())


@pytest.mark.parametrize(
    ("room", "share"),
    [
        ({"memory": -1}, {}),
        ({"memory": None}, {}),
        ({"memory": 1 << 63}, {}),
        ({"sharers": True}, {}),
        ({"compute": "all"}, {}),
        ({}, {"memory": -1}),
        ({}, {"memory": "1Gi"}),
        ({}, {"compute": -5}),
        ({}, {"compute": 1.5}),
        ({}, {"memoryLimit": -1}),
        ({}, {"softLimit": "none"}),
        ({}, {"computeLimit": []}),
        ({}, {"memoryEnforcement": "hope"}),
        ({}, {"computeEnforcement": None}),
        ({}, {"timeSlice": 5}),
        ({}, {"timeSlice": "eternal"}),
    ],
)
def test_a_share_that_is_none_is_damage(room: dict[str, Any], share: dict[str, Any]) -> None:
    document = json.loads(ledger.to_document(ledger.to_columns(entry(use())))[0])
    document["devices"][0]["room"] |= room
    document["results"][0]["share"] |= share
    damaged(document)


def damaged(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    with pytest.raises(ledger.DamagedError):
        ledger.from_document(text, f"{zlib.crc32(text.encode()):08x}")


@pytest.mark.parametrize("missing", ["room", "share", "both but admin"])
def test_a_device_and_its_results_agree_about_sharing(missing: str) -> None:
    document = json.loads(ledger.to_document(ledger.to_columns(entry(use())))[0])
    if missing == "room":
        del document["devices"][0]["room"]
    elif missing == "share":
        del document["results"][0]["share"]
    else:
        document["results"][0]["adminAccess"] = True
    damaged(document)


@pytest.mark.parametrize(
    ("memory", "compute", "limit", "enforced"),
    [
        ("cgroup", "none", GIB, True),
        ("cgroup", "none", None, False),
        ("none", "none", GIB, False),
        ("mps", "none", None, True),
        ("cooperative", "none", None, True),
        ("none", "cooperative", None, True),
        ("cgroup", "mps", None, True),
        ("none", "timeslice", None, True),
    ],
)
def test_what_was_set_has_to_be_put_back(memory: str, compute: str, limit: int | None, *, enforced: bool) -> None:
    levels = shares.Enforcement(memory=shares.Memory(memory), compute=shares.Compute(compute))
    assert entry(replace(use(levels=levels), memory_limit=limit)).enforced is enforced
