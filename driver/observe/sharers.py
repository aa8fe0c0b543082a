# SPDX-License-Identifier: Apache-2.0
"""The devices that are handed out in shares, for those who look at them: who has how much, and what is left. Pure.

A device has memory and, unless sharers take turns, compute (percent of the multiprocessors of the whole GPU). Each is given out
in multiples of a step. What is left is free as far as another share can have it, and stranded where none can: less than a step,
the rest of one where the other is gone, and all of it once as many sharers are there as there may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from discovery import model
from discovery.address import PciAddress
from driver import values
from driver.prepare import ledger
from driver.sharing import measures, rules, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A share that a claim has. `memory` in bytes and `compute` in percent of the GPU are what it is charged; `compute` is None where
    sharers take turns. The limits are what it may use; None: as much as there is. `compute_limit` is in percent of the device.
    """

    device: str
    claim: values.ClaimRef
    share_id: str | None
    memory: int
    compute: int | None
    memory_limit: int | None = None
    soft_limit: int | None = None
    compute_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a pod used of the memory of a device when it was last looked at, and the limit that the driver then held: one for all the
    shares of the device that its claims have. `used` in bytes, None where the driver does not tell; `limit` None: none.
    """

    device: str
    pod_uid: str
    claims: tuple[values.ClaimUid, ...]
    used: int | None
    limit: int | None


class PortionState(StrEnum):
    """What became of a part of a device."""

    GIVEN = "given"
    FREE = "free"
    """Another share can have it."""
    STRANDED = "stranded"
    """Left, and no further share can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Memory in bytes, or compute in percent: the three together are all there is."""

    given: int
    free: int
    stranded: int

    @property
    def value(self) -> int:
        """All there is."""
        return self.given + self.free + self.stranded

    def by_state(self) -> Mapping[PortionState, int]:
        """The same, for those who name the states."""
        return {
            PortionState.GIVEN: self.given,
            PortionState.FREE: self.free,
            PortionState.STRANDED: self.stranded,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A device that is offered in shares. `uuid` is that of the GPU or of its MIG instance."""

    device: str
    address: PciAddress
    uuid: str
    mode: rules.Mode
    time_slice: shares.TimeSlice
    enforcement: shares.Enforcement
    terms: shares.Terms
    uses: tuple[Use, ...]

    @property
    def memory(self) -> Portion:
        """Of its memory."""
        given, left = self._memory()
        return _portion(given, left, self.terms.memory.step, more=self._room())

    @property
    def compute(self) -> Portion | None:
        """Of its multiprocessors; None where sharers take turns."""
        if self.terms.compute is None:
            return None
        given, left = self._compute()
        return _portion(given, left, self.terms.compute.step, more=self._room())

    @property
    def sharers(self) -> int:
        """How many shares are given out; each is one of `terms.sharers`."""
        return len(self.uses)

    def _room(self) -> bool:
        """Whether the smallest share fits."""
        if self.sharers >= self.terms.sharers or self._memory()[1] < self.terms.memory.step:
            return False
        return self.terms.compute is None or self._compute()[1] >= self.terms.compute.step

    def _memory(self) -> tuple[int, int]:
        given = sum(use.memory for use in self.uses)
        return given, max(self.terms.memory.value - given, 0)

    def _compute(self) -> tuple[int, int]:
        given = sum(use.compute or 0 for use in self.uses)
        return given, max((self.terms.compute.value if self.terms.compute else 0) - given, 0)


def uses(entries: Iterable[ledger.Entry]) -> tuple[Use, ...]:
    """The shares of all claims in the record; those of claims that are being given back are shares still."""
    return tuple(
        Use(
            device=result.device,
            claim=entry.claim,
            share_id=result.share_id,
            memory=share.memory,
            compute=share.compute,
            memory_limit=share.memory_limit,
            soft_limit=share.soft_limit,
            compute_limit=share.compute_limit,
        )
        for entry in entries
        for result in entry.results
        if (share := result.share) is not None
    )


def shared(
    snapshot: model.Snapshot, *, policies: Mapping[PciAddress, rules.Policy], used: Iterable[Use] = ()
) -> tuple[Shared, ...]:
    """The devices of a node that are shared, by address and memory slices. `policies`: those in effect, in which a GPU keeps its own
    while somebody has a share of it.
    """
    by_device: dict[str, list[Use]] = {}
    for use in used:
        by_device.setdefault(use.device, []).append(use)
    return tuple(
        Shared(
            device=device,
            address=gpu.address,
            uuid=uuid,
            mode=policy.mode,
            time_slice=policy.shares.time_slice,
            enforcement=policy.enforcement,
            terms=terms,
            uses=tuple(
                sorted(
                    by_device.get(device, ()),
                    key=lambda use: (use.claim.namespace, use.claim.name, use.claim.uid, use.share_id or ""),
                )
            ),
        )
        for gpu in snapshot.gpus
        if (policy := policies.get(gpu.address)) is not None
        and policy.shares is not None
        and policy.enforcement is not None
        for device, uuid, terms in _devices(gpu, policy)
    )


def _devices(gpu: model.Gpu, policy: rules.Policy) -> Iterator[tuple[str, str, shares.Terms]]:
    """Those that shares are of, with their UUIDs. None of a GPU that cannot be read."""
    if gpu.state is not model.GpuState.READY or gpu.uuid is None:
        return
    if (terms := measures.whole(gpu, policy)) is not None:
        yield values.gpu_device_name(gpu.address), gpu.uuid, terms
    profiles = {profile.id: profile for profile in gpu.mig_profiles}
    for there in sorted(gpu.mig_instances or (), key=lambda instance: instance.placement):
        profile = profiles.get(there.profile_id)
        if profile is None or not there.whole or there.uuid is None:
            continue
        if (terms := measures.part(gpu, profile, policy)) is not None:
            start = there.placement.start
            name = values.partition_device_name(gpu.address, profile=profile.name, profile_id=profile.id, start=start)
            yield name, there.uuid, terms


def _portion(given: int, left: int, step: int, *, more: bool) -> Portion:
    free = left // step * step if more else 0
    return Portion(given=given, free=free, stranded=left - free)
