# SPDX-License-Identifier: Apache-2.0
"""Key `shares` of a sharing rule.

- what is left out has its default; the two levels have none
- what is misspelt, out of bounds, contradictory or in another mode is an error that names the line
- every configuration comes back from its JSON as it was
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import document
from driver import config, configfile, configshares
from driver.errors import ConfigError
from driver.sharing.rules import Mode, Rule
from driver.sharing.shares import Compute, Memory, Shares, TimeSlice

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\nsharing:\n"
GIB = 1 << 30


def parse(text: str) -> tuple[Rule, ...]:
    return configfile.parse(document.parse(text.encode(), name="c.yaml"), folder=Path()).sharing


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(HEAD + text)
    return str(raised.value).splitlines()


def shares(values: str, mode: str = "shares") -> str:
    return f"- mode: {mode}\n  shares: {{{values}}}\n"


def test_only_the_levels_must_be_given() -> None:
    (rule,) = parse(HEAD + shares("memory: none, compute: timeslice"))
    assert rule.shares == Shares(
        memory_step=GIB,
        compute_step=5,
        max_sharers=8,
        memory=Memory.NONE,
        compute=Compute.TIMESLICE,
        default_compute=None,
        time_slice=TimeSlice.DEFAULT,
    )


def test_every_value_is_read() -> None:
    text = (
        "memory: cooperative, compute: none, memoryStep: 512Mi, computeStep: 20, defaultCompute: 40, maxSharers: 128,"
        " timeSlice: long"
    )
    (rule,) = parse(HEAD + shares(text))
    assert rule.shares == Shares(
        memory_step=GIB // 2,
        compute_step=20,
        max_sharers=128,
        memory=Memory.COOPERATIVE,
        compute=Compute.NONE,
        default_compute=40,
        time_slice=TimeSlice.LONG,
    )


@pytest.mark.parametrize(
    ("step", "size"), [("1073741824", GIB), ("1024Mi", GIB), ("1.5Gi", 3 * GIB // 2), ("1Ti", GIB << 10)]
)
def test_a_step_is_any_quantity_of_whole_mebibytes(step: str, size: int) -> None:
    (rule,) = parse(HEAD + shares(f"memory: none, compute: none, memoryStep: {step}"))
    assert rule.shares is not None
    assert rule.shares.memory_step == size


def test_instances_may_be_shared() -> None:
    (rule,) = parse(HEAD + shares("memory: cooperative, compute: cooperative", "mig-static"))
    assert rule.mode is Mode.MIG_STATIC
    assert rule.shares is not None


LEVELS = "memory: none, compute: none"
STEP = "is not a multiple of 1Mi between 1Mi and 1Ti"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "- mode: shares\n",
            [
                "c.yaml:4: sharing[0]: mode shares needs shares: with memory and compute, the weakest that may keep shares apart"
            ],
        ),
        (
            "- mode: shares\n  shares:\n",
            ["c.yaml:5: sharing[0].shares: must not be null: give a value, or leave it out"],
        ),
        (
            shares("computeStep: 10"),
            ["c.yaml:5: sharing[0].shares.memory: missing", "c.yaml:5: sharing[0].shares.compute: missing"],
        ),
        (
            shares("memory: mig, compute: cgroup"),
            [
                "c.yaml:5: sharing[0].shares.memory: must be 'cgroup', 'mps', 'cooperative' or 'none', not 'mig'",
                "c.yaml:5: sharing[0].shares.compute: must be 'mps', 'cooperative', 'timeslice' or 'none', not 'cgroup'",
            ],
        ),
        (
            shares(LEVELS + ", memorystep: 1Gi"),
            ["c.yaml:5: sharing[0].shares.memorystep: unknown key; did you mean memoryStep?"],
        ),
        *(
            (
                shares(LEVELS, mode),
                [
                    (
                        "c.yaml:5: sharing[0].shares: only mode shares gives out shares, and mig-static those of its instances, not"
                        f" {mode}"
                    )
                ],
            )
            for mode in ("exclusive", "mig-dynamic")
        ),
        *(
            (shares(f"{LEVELS}, memoryStep: {step}"), [f"c.yaml:5: sharing[0].shares.memoryStep: '{step}' {STEP}"])
            for step in ("1Ki", "1536Ki", "1G", "0", "-1Gi", "2Ti", "1e999", "1500m")
        ),
        *(
            (
                shares(f"{LEVELS}, memoryStep: {step}"),
                [f"c.yaml:5: sharing[0].shares.memoryStep: '{step}' is not a quantity such as 80Gi, 100 or 1500m"],
            )
            for step in ("1GiB", "1gi", "1 Gi", "1e9999", ".inf")
        ),
        *(
            (
                shares(f"{LEVELS}, memoryStep: {step}"),
                ["c.yaml:5: sharing[0].shares.memoryStep: must be a quantity of bytes such as 1Gi"],
            )
            for step in ("true", "[1Gi]", "1.5e9")
        ),
        *(
            (
                shares(f"{LEVELS}, computeStep: {step}"),
                [
                    (
                        f"c.yaml:5: sharing[0].shares.computeStep: {step} percent do not divide the whole into equal parts, two at"
                        " least: one of 1, 2, 4, 5, 10, 20, 25, 50"
                    )
                ],
            )
            for step in (0, -5, 3, 100)
        ),
        *(
            (
                shares(f"{LEVELS}, defaultCompute: {charge}"),
                ["c.yaml:5: sharing[0].shares.defaultCompute: must be whole, or a number of percent between 1 and 100"],
            )
            for charge in ("all", "0", "101", "true", "50.0", "[50]", "''")
        ),
        (
            shares(f"{LEVELS}, defaultCompute: 7"),
            ["c.yaml:5: sharing[0].shares.defaultCompute: 7 is no multiple of computeStep (5)"],
        ),
        (
            shares(f"{LEVELS}, maxSharers: 129"),
            ["c.yaml:5: sharing[0].shares.maxSharers: must be less than or equal to 128, not 129"],
        ),
        (
            shares("memory: none, compute: mps, timeSlice: short"),
            [
                (
                    "c.yaml:5: sharing[0].shares.timeSlice: shares take turns only where compute may be timeslice, not with mps at"
                    " least: leave it out"
                )
            ],
        ),
        (
            shares(f"{LEVELS}, timeSlice: short", "mig-static"),
            ["c.yaml:5: sharing[0].shares.timeSlice: the turns at a MIG instance cannot be set: leave it out"],
        ),
        (
            "- mode: shares\n  profiles: [1g.*]\n  shares: {memory: none, compute: none}\n",
            ["c.yaml:5: sharing[0].profiles: only mode mig-dynamic makes instances of profiles, not shares"],
        ),
    ],
)
def test_errors_name_line_and_key(text: str, lines: list[str]) -> None:
    assert refusal(text) == lines


def test_a_rule_with_shares_is_hidden_as_any_other() -> None:
    (line,) = refusal(
        "- mode: exclusive\n- match: {numaNode: 0}\n  mode: shares\n  shares: {memory: none, compute: none}\n"
    )
    assert "sharing[1]: has no effect" in line


STEPS = st.sampled_from(configshares.COMPUTE_STEPS)
GIVEN = STEPS.flatmap(
    lambda step: st.builds(
        Shares,
        memory_step=st.integers(1, 1 << 20).map(lambda mebibytes: mebibytes << 20),
        compute_step=st.just(step),
        max_sharers=st.integers(1, configshares.SHARERS_MAX),
        memory=st.sampled_from(Memory),
        compute=st.sampled_from((Compute.TIMESLICE, Compute.NONE)),
        default_compute=st.none() | st.integers(1, 100 // step).map(lambda steps: steps * step),
        time_slice=st.sampled_from(TimeSlice),
    )
)


@given(given=GIVEN)
def test_every_configuration_comes_back_from_its_json(given: Shares) -> None:
    before = config.AgentConfig(sharing=(Rule(mode=Mode.SHARES, shares=given),))
    text = json.dumps(configfile.to_json(before))
    assert configfile.parse(document.parse(text.encode(), name="c.json"), folder=Path()) == before


def test_the_schema_knows_the_bounds() -> None:
    section = configfile.json_schema()["$defs"]["Shares"]
    assert section["required"] == ["memory", "compute"]
    assert section["properties"]["computeStep"]["enum"] == list(configshares.COMPUTE_STEPS)
    assert section["properties"]["defaultCompute"]["oneOf"][0] == {"const": "whole"}
    assert section["properties"]["memory"]["enum"] == list(Memory)
    assert section["properties"]["compute"]["enum"] == list(Compute)
