# SPDX-License-Identifier: Apache-2.0
"""Who has how much of a shared GPU, and what is left of it.

- given, free and stranded are all there is, whatever was given out
- stranded: less than a step; the rest where compute is gone, where memory is gone, where there are enough sharers
- a device whose sharers take turns has no compute
- MIG instances that are shared; what is not shared, and what cannot be read, is not there
- more given out than there is (a record that somebody changed) is shown, and nothing is left
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver import values
from driver.observe import partitions, sharers
from driver.prepare import ledger, shareuse
from driver.sharing import rules, shares
from tests.fakes import divided, portions, publishing
from tests.fakes.portions import GIB

ONE = publishing.at(1)
GPU = values.gpu_device_name(ONE)
MEMORY = 81559 << 20
REST = MEMORY - 79 * GIB


def one(*uses: sharers.Use, gpu: model.Gpu | None = None, policy: rules.Policy | None = None) -> sharers.Shared:
    found = shared(*uses, gpu=gpu, policy=policy)
    assert len(found) == 1
    return found[0]


def shared(
    *uses: sharers.Use, gpu: model.Gpu | None = None, policy: rules.Policy | None = None
) -> tuple[sharers.Shared, ...]:
    return sharers.shared(
        publishing.snapshot(gpu or publishing.gpu(1)),
        policies={ONE: policy or portions.policy()},
        used=uses,
    )


def test_a_gpu_that_nobody_has() -> None:
    found = one()
    assert (found.device, found.uuid, found.mode) == (GPU, publishing.gpu(1).uuid, rules.Mode.SHARES)
    assert found.memory == sharers.Portion(given=0, free=79 * GIB, stranded=REST)
    assert found.compute == sharers.Portion(given=0, free=100, stranded=0)
    assert found.sharers == 0


def test_shares_of_several_claims() -> None:
    found = one(portions.use(GPU, 2, gib=20, compute=25), portions.use(GPU, 1, gib=30, compute=50))
    assert found.memory == sharers.Portion(given=50 * GIB, free=29 * GIB, stranded=REST)
    assert found.compute == sharers.Portion(given=75, free=25, stranded=0)
    assert [use.claim.name for use in found.uses] == ["claim-1", "claim-2"]


def test_what_no_share_can_have() -> None:
    without_compute = one(portions.use(GPU, 1, gib=20, compute=100))
    assert without_compute.memory == sharers.Portion(given=20 * GIB, free=0, stranded=MEMORY - 20 * GIB)
    assert without_compute.compute == sharers.Portion(given=100, free=0, stranded=0)
    without_memory = one(portions.use(GPU, 1, gib=79, compute=40))
    assert without_memory.memory == sharers.Portion(given=79 * GIB, free=0, stranded=REST)
    assert without_memory.compute == sharers.Portion(given=40, free=0, stranded=60)
    full = one(*(portions.use(GPU, number, gib=1, compute=5) for number in range(8)))
    assert (full.memory.free, full.compute and full.compute.free, full.sharers) == (0, 0, 8)
    odd = one(policy=portions.policy(compute_step=50, memory_step=30 * GIB))
    assert odd.memory == sharers.Portion(given=0, free=60 * GIB, stranded=MEMORY - 60 * GIB)


def test_sharers_that_take_turns() -> None:
    found = one(portions.use(GPU, 1, gib=79), policy=portions.policy(enforcement=portions.TURNS))
    assert found.compute is None
    assert found.memory.free == 0


def test_more_than_there_is() -> None:
    found = one(portions.use(GPU, 1, gib=79, compute=100), portions.use(GPU, 2, gib=79, compute=100))
    assert found.memory == sharers.Portion(given=158 * GIB, free=0, stranded=0)
    assert found.compute == sharers.Portion(given=200, free=0, stranded=0)


def test_mig_instances_that_are_shared() -> None:
    gpu = divided.gpu(1, divided.instance(9, 4), divided.instance(19, 0))
    policy = portions.policy(mode=rules.Mode.MIG_STATIC)
    small, half = f"{GPU}-mig-1g-10gb-19-0", f"{GPU}-mig-3g-40gb-9-4"
    found = shared(portions.use(half, 1, gib=10, compute=20), gpu=gpu, policy=policy)
    assert [(device.device, device.terms.compute and device.terms.compute.value) for device in found] == [
        (small, 100 * 16 // 132),
        (half, 100 * 60 // 132),
    ]
    assert [device.sharers for device in found] == [0, 1]
    assert found[1].uuid == divided.instance(9, 4).uuid
    names = {entry.device for entry in partitions.instances(gpu, sharing=partitions.Sharing(), held=())}
    assert {device.device for device in found} == names
    assert not shared(gpu=divided.gpu(1, replace(divided.instance(9, 4), compute_instance=None)), policy=policy)
    assert not shared(gpu=divided.gpu(1, divided.instance(77, 2, size=2)), policy=policy)
    assert not shared(gpu=divided.gpu(1, enabled=False), policy=policy)


def test_the_shares_in_the_record() -> None:
    """Every share of every claim, two of one device by one claim as well; what is no share is none."""
    use = shareuse.ShareUse(
        memory=20 * GIB, compute=25, enforcement=portions.ENFORCEMENT, memory_limit=10 * GIB, compute_limit=20
    )
    results = (
        ledger.Result(request="a", pool="n1", device=GPU, share_id="s-1", share=use),
        ledger.Result(request="b", pool="n1", device=GPU, share_id="s-2", share=replace(use, memory=GIB)),
        ledger.Result(request="c", pool="n1", device="gpu-0000-02-00-0"),
    )
    claim = values.ClaimRef(uid=values.ClaimUid("u-1"), namespace="team", name="one")
    entry = ledger.Entry(
        claim=claim,
        state=ledger.ClaimState.RELEASING,
        boot_id="b",
        devices=(),
        results=results,
        cdi_ids=(("x",), ("y",), ("z",)),
    )
    found = one(*sharers.uses([entry]))
    assert [(told.share_id, told.memory, told.memory_limit, told.compute_limit) for told in found.uses] == [
        ("s-1", 20 * GIB, 10 * GIB, 20),
        ("s-2", GIB, 10 * GIB, 20),
    ]
    assert (found.memory.given, found.compute and found.compute.given) == (21 * GIB, 50)


def test_what_is_not_shared() -> None:
    assert not shared(policy=rules.Policy(mode=rules.Mode.MIG_STATIC))
    assert not shared(policy=rules.EXCLUSIVE)
    assert not sharers.shared(publishing.snapshot(publishing.gpu(1)), policies={})
    assert not shared(gpu=publishing.gpu(1, state=model.GpuState.LOST))
    assert not shared(gpu=publishing.gpu(1, memory_bytes=None))
    assert not shared(policy=portions.policy(memory_step=60 * GIB))


@given(
    memory_step=st.integers(1, 30),
    compute_step=st.sampled_from([1, 2, 5, 10, 20, 25, 50]),
    turns=st.booleans(),
    wanted=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 100)), max_size=12),
)
def test_given_free_and_stranded_are_all_there_is(
    *, memory_step: int, compute_step: int, turns: bool, wanted: list[tuple[int, int]]
) -> None:
    """Whatever claims the scheduler placed: a share that is rounded up and fits; what is free is what another can have."""
    enforcement = portions.TURNS if turns else portions.ENFORCEMENT
    policy = portions.policy(memory_step=memory_step * GIB, compute_step=compute_step, enforcement=enforcement)
    uses: list[sharers.Use] = []
    for number, (gib, percent) in enumerate(wanted):
        found = one(*uses, policy=policy)
        memory = -(-gib // memory_step) * memory_step
        compute = None if turns else -(-percent // compute_step) * compute_step
        fits = memory * GIB <= found.memory.free and (compute is None or compute <= _free(found))
        if fits and found.sharers < found.terms.sharers:
            uses.append(portions.use(GPU, number, gib=memory, compute=compute))
    found = one(*uses, policy=policy)
    assert found.memory.value == MEMORY
    assert found.memory.given == sum(use.memory for use in uses)
    if found.compute is not None:
        assert found.compute.value == 100
        assert (found.compute.free == 0) == (found.memory.free == 0)
    if found.memory.free:
        smallest = portions.use(GPU, 99, gib=memory_step, compute=None if turns else compute_step)
        assert one(*uses, smallest, policy=policy).memory.value == MEMORY


def _free(found: sharers.Shared) -> int:
    return found.compute.free if found.compute is not None else shares.COMPUTE_WHOLE
