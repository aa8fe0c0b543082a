# SPDX-License-Identifier: Apache-2.0
"""claimconfig: what a claim's own configuration may say, and what follows for a share. Aspects: fields, hostile input, several
configurations, shares, what is not shared.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.errors import ClaimError
from driver.prepare import claimconfig
from driver.prepare.claimconfig import ClaimConfig, ComputeLevel, Limits, MemoryLevel
from driver.sharing import shares

WHERE = "ResourceClaim default/small (UID 1): status.allocation.devices.config[0].opaque.parameters"
HEADER = {"apiVersion": "gpu.nearfield.dev/v1alpha1", "kind": "ClaimConfig"}
GIB = 1 << 30
CGROUP_MPS = shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS)


def parse(**fields: Any) -> ClaimConfig:
    return claimconfig.parse(HEADER | fields, where=WHERE)


def held(
    config: ClaimConfig,
    *,
    memory: int = 20 * GIB,
    compute: int | None = 25,
    memory_limit: int | None = 20 * GIB,
    compute_limit: int | None = 25,
    enforcement: shares.Enforcement = CGROUP_MPS,
) -> Limits | claimconfig.Unmet:
    return claimconfig.held(
        config,
        memory=memory,
        compute=compute,
        memory_limit=memory_limit,
        compute_limit=compute_limit,
        enforcement=enforcement,
    )


def reason(found: object) -> str:
    assert isinstance(found, claimconfig.Unmet)
    return found.reason


def test_every_field_is_read() -> None:
    assert parse(
        memory={"limit": "16Gi", "softLimit": "512Mi"},
        compute={"limit": 20},
        require={"memory": "cgroup", "compute": "mps"},
        mps={"priority": "belowNormal"},
    ) == ClaimConfig(
        memory_limit=16 * GIB,
        soft_limit=GIB // 2,
        compute_limit=20,
        require_memory=MemoryLevel.CGROUP,
        require_compute=ComputeLevel.MPS,
        below_normal=True,
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"memory": {}, "compute": {}, "require": {}, "mps": {}}, {"mps": {"priority": "normal"}}],
)
def test_what_says_nothing_is_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == claimconfig.NOTHING


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1Mi", 1 << 20),
        ("0.5Gi", GIB // 2),
        ("1.5G", 1_500_000_000),
        ("17179869184", 16 * GIB),
        ("1Ei", 1 << 60),
        ("1152921504606846977", None),
        ("1048575", None),
        ("0", None),
        ("-1Gi", None),
        ("+1Gi", None),
        ("1e10", None),
        ("1500m", None),
        ("0.0000000001Gi", None),
        ("1.0005k", None),
        (" 1Gi", None),
        ("1Gi\n", None),
        ("\u0661Gi", None),
        ("9" * 4000, None),
        (17179869184, None),
        (1e10, None),
        (True, None),
        (None, None),
        ([], None),
        ({}, None),
    ],
)
def test_a_memory_limit_is_a_quantity_of_whole_bytes_that_mps_can_hold(text: Any, amount: int | None) -> None:
    if amount is not None:
        assert parse(memory={"limit": text}).memory_limit == amount
        return
    with pytest.raises(ClaimError, match=r"parameters\.memory\.limit is .*, not a quantity of bytes") as caught:
        parse(memory={"limit": text})
    assert len(str(caught.value)) < 400


def test_a_soft_limit_may_be_nothing_and_not_above_the_limit() -> None:
    assert parse(memory={"softLimit": "0"}).soft_limit == 0
    with pytest.raises(ClaimError, match=r"memory\.softLimit is 3Gi, more than memory\.limit, 2Gi"):
        parse(memory={"softLimit": "3Gi", "limit": "2Gi"})


@pytest.mark.parametrize("percent", [0, 101, -5, 2.5, 20.0, "20", True, None, 10**30, [20]])
def test_a_compute_limit_is_a_whole_percentage(percent: Any) -> None:
    with pytest.raises(ClaimError, match=r"parameters\.compute\.limit is .*, not a whole number of percent"):
        parse(compute={"limit": percent})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("text", 'is "text", not an object'),
        (None, "is null, not an object"),
        ([], "is a list, not an object"),
        ({}, "is of apiVersion null and kind null"),
        (HEADER | {"kind": "GpuConfig"}, 'kind "GpuConfig", and this driver knows gpu.nearfield.dev/v1alpha1'),
        ({**HEADER, "apiVersion": "resource.nvidia.com/v1beta1"}, 'apiVersion "resource.nvidia.com/v1beta1"'),
        (HEADER | {"sharing": {}}, 'has a field "sharing"; there may be apiVersion, kind, memory'),
        (HEADER | {"metadata": {"name": "x"}}, 'has a field "metadata"'),
        (HEADER | {"memory": {"Limit": "1Gi"}}, 'memory has a field "Limit"; there may be limit, softLimit'),
        (HEADER | {"memory": None}, "memory is null, not an object"),
        (HEADER | {"compute": 20}, "compute is 20, not an object"),
        (HEADER | {"require": {"memory": "best"}}, 'require.memory is "best", not one of whole, mig, cgroup'),
        (HEADER | {"require": {"memory": "timeslice"}}, "require.memory is"),
        (HEADER | {"require": {"compute": "cgroup"}}, "require.compute is"),
        (HEADER | {"require": {"compute": ["mps"]}}, "require.compute is a list, not one of"),
        (HEADER | {"mps": {"priority": "high"}}, 'mps.priority is "high", not one of normal, belowNormal'),
        (HEADER | {"x" * 5000: 1}, "has a field"),
        (HEADER | {"\x1b[2J": 1}, r'has a field "\u001b[2J"'),
        (HEADER | {"kind": "\ud800" * 200}, "kind"),
        (HEADER | {"kind": 10**5000}, "kind a huge number"),
    ],
)
def test_what_is_not_as_documented_is_refused_with_its_place(parameters: Any, message: str) -> None:
    with pytest.raises(ClaimError) as caught:
        claimconfig.parse(parameters, where=WHERE)
    said = str(caught.value)
    assert said.startswith(WHERE)
    assert message in said
    assert not caught.value.retryable
    assert said.isascii()
    assert said.isprintable()
    assert len(said) < 900


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["limit", "memory", "compute", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.sampled_from(["memory", "compute", "require", "mps", "other"]), JSON))
@settings(max_examples=100)
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ClaimError):
        assert isinstance(parse(**fields), ClaimConfig)


configs = st.builds(
    ClaimConfig,
    memory_limit=st.none() | st.integers(1 << 20, 40 * GIB),
    soft_limit=st.none() | st.integers(0, 40 * GIB),
    compute_limit=st.none() | st.integers(1, 100),
    require_memory=st.none() | st.sampled_from(MemoryLevel),
    require_compute=st.none() | st.sampled_from(ComputeLevel),
    below_normal=st.booleans(),
)


def test_of_several_configurations_the_strictest_of_each_field_holds() -> None:
    assert claimconfig.merge([]) is claimconfig.NOTHING
    assert claimconfig.merge(
        [
            ClaimConfig(memory_limit=4 * GIB, require_memory=MemoryLevel.NONE, require_compute=ComputeLevel.MPS),
            ClaimConfig(memory_limit=8 * GIB, soft_limit=6 * GIB, compute_limit=50, require_memory=MemoryLevel.MPS),
            ClaimConfig(compute_limit=20, below_normal=True),
        ]
    ) == ClaimConfig(
        memory_limit=4 * GIB,
        soft_limit=6 * GIB,
        compute_limit=20,
        require_memory=MemoryLevel.MPS,
        require_compute=ComputeLevel.MPS,
        below_normal=True,
    )


@given(found=st.lists(configs, max_size=4), order=st.randoms())
@settings(max_examples=50)
def test_the_order_of_configurations_does_not_matter(found: list[ClaimConfig], order: Any) -> None:
    merged = claimconfig.merge(found)
    order.shuffle(found)
    assert claimconfig.merge(found) == merged
    assert claimconfig.merge([merged, *found]) == merged


@st.composite
def allocated(draw: st.DrawFn) -> dict[str, Any]:
    """What the scheduler gave a share, and what it would be limited to."""
    memory, compute = draw(st.integers(1, 40)) * GIB, draw(st.none() | st.integers(1, 20).map(lambda steps: steps * 5))
    whole, asked = draw(st.booleans()), draw(st.booleans())
    levels = st.builds(
        shares.Enforcement, memory=st.sampled_from(shares.Memory), compute=st.sampled_from(shares.Compute)
    )
    return {
        "memory": memory,
        "compute": compute,
        "memory_limit": None if whole else memory,
        "compute_limit": compute if asked and not whole else None,
        "enforcement": draw(levels),
    }


@given(config=configs, share=allocated())
@settings(max_examples=200)
def test_configuration_never_gives_more_than_was_allocated(config: ClaimConfig, share: dict[str, Any]) -> None:
    found = claimconfig.held(config, **share)
    if isinstance(found, claimconfig.Unmet):
        assert found.reason
        return
    assert found.memory is None or found.memory <= share["memory"]
    assert (found.memory is None) == (share["memory_limit"] is None and config.memory_limit is None)
    assert (found.soft is None) == (found.memory is None)
    assert found.soft is None or found.memory is None or found.soft <= found.memory
    assert share["compute_limit"] is None or (found.compute is not None and found.compute <= share["compute_limit"])
    assert found.below_normal == config.below_normal


def test_a_share_without_configuration_has_what_it_was_allocated() -> None:
    assert held(claimconfig.NOTHING) == Limits(memory=20 * GIB, soft=20 * GIB, compute=25, below_normal=False)


def test_limits_are_lowered() -> None:
    assert held(ClaimConfig(memory_limit=16 * GIB, soft_limit=8 * GIB, compute_limit=20)) == Limits(
        memory=16 * GIB, soft=8 * GIB, compute=20, below_normal=False
    )
    assert held(ClaimConfig(memory_limit=4 * GIB, soft_limit=8 * GIB)) == Limits(
        memory=4 * GIB, soft=4 * GIB, compute=25, below_normal=False
    )


def test_a_share_with_all_the_memory_has_no_limits_but_those_of_its_configuration() -> None:
    nothing = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.NONE)
    strict = ClaimConfig(require_memory=MemoryLevel.WHOLE, require_compute=ComputeLevel.WHOLE)
    assert held(strict, memory_limit=None, compute_limit=None, enforcement=nothing) == Limits(
        memory=None, soft=None, compute=None, below_normal=False
    )
    limited = held(ClaimConfig(memory_limit=GIB, compute_limit=90), memory_limit=None, compute_limit=None)
    assert limited == Limits(memory=GIB, soft=GIB, compute=90, below_normal=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClaimConfig(memory_limit=21 * GIB), "memory.limit of its ClaimConfig is 21Gi, more than the 20Gi that it was"),
        (ClaimConfig(soft_limit=21 * GIB), "memory.softLimit of its ClaimConfig is 21Gi, more than the 20Gi"),
        (ClaimConfig(compute_limit=26), "compute.limit of its ClaimConfig is 26, more than the 25 percent"),
        (ClaimConfig(require_memory=MemoryLevel.MIG), "requires memory to be kept apart by mig or stronger"),
        (ClaimConfig(require_compute=ComputeLevel.WHOLE), "and this device has mps; select devices by their attribute"),
    ],
)
def test_what_would_loosen_or_is_not_there_is_refused(config: ClaimConfig, message: str) -> None:
    assert message in reason(held(config))


@pytest.mark.parametrize("level", shares.Memory)
@pytest.mark.parametrize("required", MemoryLevel)
def test_a_requirement_is_met_by_its_level_and_by_stronger_ones(level: shares.Memory, required: MemoryLevel) -> None:
    order = ["whole", "mig", "cgroup", "mps", "cooperative", "none"]
    enforcement = shares.Enforcement(memory=level, compute=shares.Compute.NONE)
    found = held(ClaimConfig(require_memory=required), enforcement=enforcement)
    assert isinstance(found, Limits) == (order.index(level) <= order.index(required))


def test_there_is_no_percentage_where_shares_take_turns() -> None:
    turns = shares.Enforcement(memory=shares.Memory.NONE, compute=shares.Compute.TIMESLICE)
    message = reason(held(ClaimConfig(compute_limit=20), compute=None, compute_limit=None, enforcement=turns))
    assert "take turns" in message


@pytest.mark.parametrize(("mig", "unmet"), [(False, None), (True, "requires memory to be kept apart by whole")])
def test_what_is_not_shared_meets_requirements_by_being_whole_or_an_instance(*, mig: bool, unmet: str | None) -> None:
    weak = ClaimConfig(require_memory=MemoryLevel.CGROUP, require_compute=ComputeLevel.MIG, below_normal=True)
    assert claimconfig.exclusive(weak, mig=mig) is None
    assert claimconfig.exclusive(claimconfig.NOTHING, mig=mig) is None
    found = claimconfig.exclusive(ClaimConfig(require_memory=MemoryLevel.WHOLE), mig=mig)
    assert (found is None) == (unmet is None)
    if unmet is not None:
        assert unmet in reason(found)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ClaimConfig(memory_limit=GIB), "memory.limit"),
        (ClaimConfig(soft_limit=0), "memory.softLimit"),
        (ClaimConfig(compute_limit=20), "compute.limit"),
    ],
)
def test_a_limit_of_what_is_not_shared_is_refused_with_the_way_out(config: ClaimConfig, field: str) -> None:
    message = reason(claimconfig.exclusive(config, mig=False))
    assert message.startswith(field)
    assert "REQUEST/SUBREQUEST" in message
