# SPDX-License-Identifier: Apache-2.0
"""The policy that each GPU has now. What the rules say is put into effect when nobody has a device that it would take away.

Whatever a device was published under stays in force while somebody holds it, so a change waits for the last claim on its GPU.
What was published is known from the record, so this is the same after a restart of the agent, and after one that changed the
configuration. So it is with what keeps shares apart: what this node can do may become more or less, and what is in use stays.

A GPU that is mig-dynamic no more may have its MIG mode left on by the agent, which turns it off only when somebody wants the
whole. Until then it is mig-dynamic without parts: the whole is offered, and who prepares it may turn MIG off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from discovery import mig, model
from discovery.address import PciAddress
from driver import quantity
from driver.sharing import abilities, policy, sharable
from driver.sharing.rules import Mode, Policy, Rule
from driver.sharing.shares import Enforcement, Shares, TimeSlice

logger = logging.getLogger(__name__)

_SHOWN = 5
"""How many devices a Finding names."""

_NO_PARTS = ("",)
"""Patterns of profiles that match none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A published device, as the record has it. `mode`: of its GPU when it was published. `profile`: of a partition, None of
    a whole GPU. `uuid` and `product` are those of the GPU. `shares`, `enforcement`: of the policy under which it was published,
    there together.
    """

    name: str
    address: PciAddress
    mode: Mode = Mode.EXCLUSIVE
    profile: str | None = None
    uuid: str | None = None
    product: str | None = None
    shares: Shares | None = None
    enforcement: Enforcement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """A GPU whose policy has to wait, and the devices that hold it up."""

    address: PciAddress
    kept: Policy
    wanted: Policy
    devices: tuple[str, ...]


Held = Callable[[frozenset[str]], Collection[str]]
"""Which of some published devices somebody has: by the record, or by the allocation of a claim. Who cannot tell says all."""


class Effective:
    """The one place that knows. Every method from any thread, but `look` from one."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        standing: Callable[[], Iterable[Standing]],
        holders: Callable[[Collection[str]], Mapping[str, str]] = lambda _names: {},
        can: Callable[[model.Snapshot], abilities.Can] = lambda _snapshot: abilities.unknown,
    ) -> None:
        """`standing`: what is published; may raise RecordError, which leaves `look` and `policies`. `holders`: the claims that
        have some devices, for a person. `can`: what of shares can be enforced; answers at once.
        """
        self._standing = standing
        self._holders = holders
        self._can = can
        self._lock = threading.Lock()
        self._rules = tuple(rules)
        self._version = 0
        self._cached: tuple[model.Snapshot, int, Mapping[PciAddress, Policy]] | None = None
        self._known_standing: tuple[Standing, ...] | None = None
        """What is published, as long as nobody says that it has changed: thousands of devices may be, and a claim waits."""
        self._last: Mapping[PciAddress, Policy] = {}
        self._waiting: frozenset[PciAddress] = frozenset()
        self._known: dict[PciAddress, tuple[str | None, str | None]] = {}
        """UUID and product of GPUs as they could last be read: one that fails changes nobody's policy."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What the configuration says."""
        return self._rules

    @property
    def waiting(self) -> frozenset[PciAddress]:
        """The GPUs whose change waited at the last look."""
        return self._waiting

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """From now on these rules count."""
        with self._lock:
            self._rules = tuple(rules)
            self._version += 1

    def abilities_changed(self) -> None:
        """`can` gives other answers than before."""
        with self._lock:
            self._version += 1

    def published_anew(self) -> None:
        """The record has other published devices than before."""
        with self._lock:
            self._version += 1
            self._known_standing = None

    def look(self, snapshot: model.Snapshot, *, held: Held) -> policy.Resolved:
        """The policies that hold now, for who publishes. `held` is asked only where a device would be taken away, once and
        about all of them. May raise RecordError.
        """
        standing = tuple(self._standing())
        resolved, waits = self._resolve(snapshot, standing, held)
        if waits:
            resolved = replace(resolved, findings=(*resolved.findings, *map(self._finding, waits)))
        with self._lock:
            if standing != self._known_standing:
                self._known_standing = standing
                self._version += 1
            last, self._last = self._last, resolved.policies
            self._waiting = frozenset(resolved.waiting)
        for address, now in resolved.policies.items():
            before = last.get(address)
            if before != now and (before is not None or now.mode is not Mode.EXCLUSIVE):
                logger.info("GPU %s is shared by policy %s", address, _spelt(now))
        return resolved

    def policies(self, snapshot: model.Snapshot) -> Mapping[PciAddress, Policy]:
        """The policies for who prepares: what is published stays as it is, since a claim may name it. Asks nobody but the record.
        May raise RecordError.
        """
        with self._lock:
            cached, version = self._cached, self._version
        if cached is not None and cached[0] is snapshot and cached[1] == version:
            return cached[2]
        standing = self._known_standing
        if standing is None:
            standing = tuple(self._standing())
        resolved, _ = self._resolve(snapshot, standing, lambda names: names)
        found = resolved.policies
        with self._lock:
            if version == self._version:
                self._known_standing = standing
                self._cached = (snapshot, version, found)
        return found

    def _resolve(
        self, snapshot: model.Snapshot, devices: Iterable[Standing], held: Held
    ) -> tuple[policy.Resolved, tuple[_Wait, ...]]:
        standing: dict[PciAddress, list[Standing]] = {}
        for device in devices:
            standing.setdefault(device.address, []).append(device)
        gpus = [self._identified(gpu, standing) for gpu in snapshot.gpus]
        desired = policy.resolve(self._rules, gpus, can=self._can(snapshot), published=_published(standing))
        leaving = {
            address: gone
            for address, wanted in desired.policies.items()
            if (gone := [device for device in standing.get(address, ()) if not _stays(device, wanted)])
        }
        left_on = {
            gpu.address: Policy(mode=Mode.MIG_DYNAMIC, profiles=_NO_PARTS)
            for gpu in snapshot.gpus
            if gpu.address in leaving and _is_left_on(gpu, desired.policies[gpu.address], leaving[gpu.address])
        }
        desired = replace(
            desired,
            policies={**desired.policies, **left_on},
            findings=(*desired.findings, *map(_left_on, left_on)),
        )
        leaving = {
            address: gone
            for address, devices in leaving.items()
            if (gone := [device for device in devices if not _stays(device, desired.policies[address])])
        }
        if not leaving:
            return desired, ()
        names = frozenset(device.name for gone in leaving.values() for device in gone)
        taken = names & frozenset(held(names))
        waits = tuple(
            _Wait(
                address=address,
                kept=self._kept(holding[0], standing[address]),
                wanted=desired.policies[address],
                devices=tuple(device.name for device in holding),
            )
            for address, gone in leaving.items()
            if (holding := [device for device in gone if device.name in taken])
        )
        resolved = replace(
            desired,
            policies={**desired.policies, **{wait.address: wait.kept for wait in waits}},
            waiting={wait.address: frozenset(wait.devices) for wait in waits},
        )
        return resolved, waits

    def _identified(self, gpu: model.Gpu, standing: Mapping[PciAddress, Sequence[Standing]]) -> model.Gpu:
        """A GPU with the UUID and product that it had when it could be read."""
        if gpu.uuid is not None and gpu.product is not None:
            self._known[gpu.address] = (gpu.uuid, gpu.product)
            return gpu
        known = self._known.get(gpu.address)
        if known is None and (devices := standing.get(gpu.address)):
            known = (devices[0].uuid, devices[0].product)
        if known is None:
            return gpu
        return replace(gpu, uuid=gpu.uuid or known[0], product=gpu.product or known[1])

    def _kept(self, held: Standing, standing: Sequence[Standing]) -> Policy:
        """The policy by which the devices of a GPU were published: as it was, or, after a restart, as it can be told from them."""
        last = self._last.get(held.address)
        if last is not None and (last.mode, last.shares, last.enforcement) == (
            held.mode,
            held.shares,
            held.enforcement,
        ):
            return last
        if held.mode is not Mode.MIG_DYNAMIC:
            return Policy(mode=held.mode, shares=held.shares, enforcement=held.enforcement)
        profiles = {device.profile for device in standing if device.mode is held.mode and device.profile is not None}
        return Policy(mode=held.mode, profiles=tuple(sorted(profiles)) or _NO_PARTS)

    def _finding(self, wait: _Wait) -> model.Finding:
        claims = self._holders(wait.devices)
        shown = [f"{name} ({claims.get(name, 'allocated to a claim')})" for name in wait.devices[:_SHOWN]]
        more = f" and {len(wait.devices) - _SHOWN} more" if len(wait.devices) > _SHOWN else ""
        shares = wait.kept.shares is not None or wait.wanted.shares is not None
        who = "the configuration says and this node can do" if shares else "the configuration says"
        return model.Finding(
            code="sharing-waits",
            severity=model.Severity.INFO,
            subject=str(wait.address),
            message=f"Shared by policy {_spelt(wait.kept)} until nobody has {', '.join(shown)}{more}; then by"
            f" {_spelt(wait.wanted)}, as {who}",
        )


def _published(standing: Mapping[PciAddress, Iterable[Standing]]) -> dict[PciAddress, sharable.Published]:
    """Under what the shares of each GPU are published."""
    return {
        address: sharable.Published(shares=device.shares, enforcement=device.enforcement)
        for address, devices in standing.items()
        for device in devices
        if device.shares is not None and device.enforcement is not None
    }


def _stays(device: Standing, wanted: Policy) -> bool:
    """Whether a policy offers a device as it was published."""
    if (device.mode, device.shares, device.enforcement) != (wanted.mode, wanted.shares, wanted.enforcement):
        return False
    return (
        device.mode is not Mode.MIG_DYNAMIC or device.profile is None or policy.offers_profile(wanted, device.profile)
    )


def _is_left_on(gpu: model.Gpu, wanted: Policy, standing: Iterable[Standing]) -> bool:
    """Whether MIG is on that the agent may have turned on and that a whole GPU cannot have."""
    return (
        wanted.mode is Mode.EXCLUSIVE
        and gpu.mig_mode is not None
        and gpu.mig_mode.current
        and mig.toggle_of(gpu.architecture) is mig.Toggle.AT_NEED
        and any(device.mode is Mode.MIG_DYNAMIC for device in standing)
    )


def _left_on(address: PciAddress) -> model.Finding:
    return model.Finding(
        code="mig-mode-left-on",
        severity=model.Severity.INFO,
        subject=str(address),
        message="MIG is still on, as this GPU was mig-dynamic. It is offered whole, and MIG is turned off when a claim for it is"
        f" prepared; nvidia-smi -i {address} -mig 0 does it now",
    )


def _spelt(of_gpu: Policy) -> str:
    if of_gpu.profiles == _NO_PARTS:
        return f"{of_gpu.mode} without parts"
    if of_gpu.shares is not None and of_gpu.enforcement is not None:
        return f"{of_gpu.mode} ({_spelt_shares(of_gpu.shares, of_gpu.enforcement)})"
    return f"{of_gpu.mode} of {', '.join(of_gpu.profiles)}" if of_gpu.profiles else str(of_gpu.mode)


def _spelt_shares(shares: Shares, enforcement: Enforcement) -> str:
    parts = [
        f"steps of {quantity.format_bytes(shares.memory_step)} and {shares.compute_step} percent",
        f"{shares.max_sharers} sharers",
        f"memory by {enforcement.memory}",
        f"compute by {enforcement.compute}",
    ]
    if shares.default_compute is not None:
        parts.insert(1, f"{shares.default_compute} percent unasked")
    if shares.time_slice is not TimeSlice.DEFAULT:
        parts.append(f"{shares.time_slice} turns")
    return ", ".join(parts)
