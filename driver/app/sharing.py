# SPDX-License-Identifier: Apache-2.0
"""The policies of the GPUs, between the record, which knows what was published, and those who ask for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from discovery import model
from discovery.address import PciAddress
from driver.prepare import plan
from driver.sharing import abilities, effective, rules
from driver.sharing.shares import Memory

if TYPE_CHECKING:
    from driver.prepare import keeping


class Record(Protocol):
    """Where it is kept what was published. Every call may raise RecordError."""

    def load_published(self) -> Mapping[str, Any]:
        """What was saved last."""

    def save_published(self, published: Mapping[str, Any], /) -> None:
        """Keep it durably."""

    def holders(self, names: Collection[str], /) -> Sequence[plan.Holder]:
        """Who has some devices."""


class Remembered:
    """The record, for who publishes: what it saves is told to who decides on policies."""

    def __init__(self, record: Record, *, saved: Callable[[], None]) -> None:
        self._record = record
        self._saved = saved

    def load_published(self) -> Mapping[str, Any]:
        """What was saved last. May raise RecordError."""
        return self._record.load_published()

    def save_published(self, published: Mapping[str, Any]) -> None:
        """Keep it durably. May raise RecordError."""
        self._record.save_published(published)
        self._saved()


def build(
    record: Record, given: Sequence[rules.Rule], *, can: Callable[[model.Snapshot], abilities.Can]
) -> effective.Effective:
    """The policies of the GPUs of this node. `can`: what of shares can be enforced here."""
    return effective.Effective(
        given,
        standing=lambda: _standing(record),
        holders=lambda names: _holders(record, names),
        can=can,
    )


def gpus(snapshot: model.Snapshot | None, policies: effective.Effective) -> Mapping[PciAddress, keeping.Gpu]:
    """The GPUs of this node, for who keeps their shares apart. May raise RecordError."""
    from driver.prepare import keeping  # noqa: PLC0415 - who calls this has it

    if snapshot is None:
        return {}
    hold = policies.policies(snapshot)
    return {
        gpu.address: keeping.Gpu(uuid=gpu.uuid, limits_pods=_by_cgroup(hold.get(gpu.address, rules.EXCLUSIVE)))
        for gpu in snapshot.gpus
    }


def _by_cgroup(policy: rules.Policy) -> bool:
    return policy.enforcement is not None and policy.enforcement.memory is Memory.CGROUP


def _holders(record: Record, names: Collection[str]) -> Mapping[str, str]:
    claims: dict[str, list[str]] = {}
    for holder in record.holders(names):
        claims.setdefault(holder.device.name, []).append(str(holder.claim))
    return {name: ", ".join(holding) for name, holding in claims.items()}


def _standing(record: Record) -> Iterable[effective.Standing]:
    from driver.app import standing  # noqa: PLC0415 - what it imports takes longer than kubelet should wait for a socket

    return standing.read(record.load_published())
