# SPDX-License-Identifier: Apache-2.0
"""The messages of the MPS supervisor: round trips, versions, and what is no message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.mps import shares, values, wire

TEXT = st.text(min_size=1, max_size=40)
COUNT = st.integers(min_value=0, max_value=(1 << 63) - 1)
SHARES = st.builds(
    shares.Share,
    device=TEXT,
    uuid=TEXT,
    share_id=TEXT,
    protocol=st.sampled_from(shares.Protocol),
    memory=st.none() | COUNT,
    compute=st.none() | COUNT,
    below_normal=st.booleans(),
)
DAEMONS = st.builds(
    values.Daemon,
    device=TEXT,
    uuid=TEXT,
    protocol=st.sampled_from(shares.Protocol),
    state=st.sampled_from(values.DaemonState),
    restarts=COUNT,
    since_s=st.integers(min_value=0, max_value=10**9).map(float),
    shares=st.lists(TEXT, max_size=3).map(tuple),
    clients=st.none() | COUNT,
    error=st.none() | TEXT,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("device", "uuid", "ok", "daemons")), inner)
    ),
    max_leaves=6,
)


@given(SHARES)
def test_a_share_arrives_as_it_was_sent(share: shares.Share) -> None:
    assert wire.read_share(wire.share_json(share)) == share


@given(st.lists(DAEMONS, max_size=4, unique_by=lambda daemon: daemon.device), COUNT)
def test_a_status_arrives_as_it_was_sent(daemons: list[values.Daemon], change: int) -> None:
    status = values.Status(instance="i", change=change, daemons={daemon.device: daemon for daemon in daemons})
    assert wire.read_status(wire.status_json(status)) == status


def test_an_ability_arrives_as_it_was_sent() -> None:
    ability = values.Ability(
        instance="i",
        program="/usr/bin/nvidia-cuda-mps-control",
        version="615.71.09",
        protocols=frozenset({shares.Protocol.LEGACY}),
        reasons={shares.Protocol.V3: "needs driver 615"},
    )
    assert wire.read_ability(wire.ability_json(ability)) == ability


def test_a_protocol_of_a_later_supervisor_is_left_out() -> None:
    document = wire.ability_json(values.Ability(instance="i", protocols=frozenset(shares.Protocol)))
    document["protocols"].append("v4")
    document["reasons"]["v5"] = "not yet"
    document["more"] = {"fields": 1}
    assert wire.read_ability(document) == values.Ability(instance="i", protocols=frozenset(shares.Protocol))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([1], 1), ([9, 1], 1), ([2], None), ([], None), ("1", None), ([True], None), (None, None)],
)
def test_the_newest_version_that_both_speak_is_taken(versions: Any, expected: int | None) -> None:
    assert wire.agreed(versions) == expected


@given(ANYTHING)
def test_anything_else_is_said_to_be_wrong(document: Any) -> None:
    for read in (wire.read_share, wire.read_ability, wire.read_status):
        with pytest.raises(wire.WireError):
            read(document)


@pytest.mark.parametrize(
    "change",
    [
        {"memory": -1},
        {"memory": 1.5},
        {"memory": True},
        {"compute": 1 << 63},
        {"protocol": "v4"},
        {"device": ""},
        {"device": "x" * 5000},
        {"shareID": None},
        {"belowNormal": 1},
    ],
)
def test_a_share_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    share = shares.Share(device="d", uuid="u", share_id="s", protocol=shares.Protocol.V3)
    with pytest.raises(wire.WireError):
        wire.read_share(wire.share_json(share) | change)


def test_what_is_no_text_among_protocols_is_left_out() -> None:
    document = wire.ability_json(values.Ability(instance="i", protocols=frozenset({shares.Protocol.V3})))
    document["protocols"] += [{}, [], None, 1]
    assert wire.read_ability(document).protocols == {shares.Protocol.V3}


@pytest.mark.parametrize("since", [None, "1", True, float("nan"), 10**400])
def test_a_state_without_an_age_is_refused(since: Any) -> None:
    daemon = {
        "device": "d",
        "uuid": "u",
        "protocol": "v3",
        "state": "running",
        "restarts": 0,
        "shares": [],
        "since": since,
    }
    with pytest.raises(wire.WireError, match="since"):
        wire.read_status({"instance": "i", "change": 1, "daemons": [daemon]})


@pytest.mark.parametrize("timeout", [None, True, "5", -1, float("nan"), float("inf"), 10**400])
def test_a_time_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(wire.WireError):
        wire.read_timeout({"timeout": timeout})


def test_a_refusal_has_its_message_and_whether_to_try_again() -> None:
    assert wire.read_error(wire.error_json("no", retryable=True)) == ("no", True)
    assert wire.read_error({"ok": None}) is None
    for answer in ({}, {"error": "no"}, {"error": {"message": "no"}}):
        with pytest.raises(wire.WireError):
            wire.read_error(answer)
