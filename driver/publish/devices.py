# SPDX-License-Identifier: Apache-2.0
"""From a Snapshot to the devices that are offered: names, attributes, capacities, order. Pure.

A GPU is offered when NVML gave its UUID, memory and product (state READY), and everything that a device must say of itself is
known: the whole, or parts of it, or both, by its policy (`partitions`). That is strict on purpose: a missing description would end the allocation of every pod that asks
for it, and an invented one would place pods wrongly. Only a description in words can be unknown: it is then `UNKNOWN`, as
an architecture newer than our NVML binding is no reason to keep a GPU from everybody. Whatever keeps a GPU back is a Finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from discovery import mig, model
from discovery.address import PciAddress
from driver import quantity, values
from driver.publish import attributes, counters, keys, ordering, partitions, portions, syntax
from driver.sharing import measures, rules
from driver.sharing.shares import Enforcement, Shares, Terms

_VERSION = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Version:
    """A strict semantic version, an attribute type of its own: CEL compares it by its numbers."""

    text: str


AttributeValue = bool | int | str | Version | tuple[int, ...] | tuple[str, ...]
"""A tuple is the list form, which servers refuse unless DRAListTypeAttributes is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as it is offered. `absent`: it was offered before and cannot be used now; nobody new may get it.
    `nic_is_rdma`: the name of its NIC is that of an RDMA device, and not of an interface. `consumes`: what it takes of what
    it shares with other devices of its GPU. `uncounted`: it may also be offered where the server keeps no counters.
    `terms`: in which shares it is given out, None where one claim has all of it; `capacity` then has the values of the terms.
    `mode`, `shares`, `enforcement`: the policy under which it is offered, for the record; the last two are there together.
    """

    name: str
    address: PciAddress
    attributes: Mapping[str, AttributeValue]
    capacity: Mapping[str, int]
    absent: bool = False
    nic_is_rdma: bool = False
    consumes: counters.Consumption | None = None
    uncounted: bool = False
    mode: rules.Mode = rules.Mode.EXCLUSIVE
    shares: Shares | None = None
    enforcement: Enforcement | None = None
    terms: Terms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """What an admin decides about publishing. `numa_list` and `pcie_switches` need DRAListTypeAttributes on the server."""

    driver_name: str
    numa_list: bool = False
    pcie_switches: bool = False


Policies = Mapping[PciAddress, rules.Policy]
"""How each GPU is shared; a GPU without an entry is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The devices in the order in which they are offered, and what was odd about making them. `full`: counter sets of which
    somebody takes a part, without what is taken. `unshared`: the devices that are offered instead where the server keeps no shares;
    None where nothing is shared.
    """

    devices: tuple[Device, ...]
    findings: tuple[model.Finding, ...] = ()
    full: Mapping[str, counters.Counters] = field(default_factory=dict)
    unshared: tuple[Device, ...] | None = None


def build_devices(
    snapshot: model.Snapshot,
    *,
    options: PublishOptions,
    policies: Policies | None = None,
    ours: Collection[str] = (),
    counters: bool = True,
) -> tuple[Device, ...]:
    """The devices of `build_offer`."""
    return build_offer(snapshot, options=options, policies=policies, ours=ours, counters=counters).devices


def build_offer(
    snapshot: model.Snapshot,
    *,
    options: PublishOptions,
    policies: Policies | None = None,
    ours: Collection[str] = (),
    counters: bool = True,
) -> Offer:
    """All that can be offered of the GPUs. What one claim has alone comes first: the whole GPUs, of these first those whose use
    breaks the least (`ordering`); then the parts, GPU by GPU in reverse order, so that wholes and parts fill the node from
    opposite ends. Then what is given out in shares, so that nobody who wants a device alone takes one that is shared while there
    is another: parts before whole GPUs, as a share that fits into a part should break no GPU, each device filled before the next.

    `ours`: the names of the parts that the agent has made, or is about to make or to remove. `counters`: whether the server
    keeps them.
    """
    listing, alone = _Listing(), _Listing()
    findings: list[model.Finding] = []
    full: dict[str, Mapping[str, int]] = {}
    for gpu in ordering.order(snapshot.gpus):
        if gpu.state is not model.GpuState.READY:
            continue
        how = (policies or {}).get(gpu.address, rules.EXCLUSIVE)
        division = partitions.divide(gpu, how, ours=ours)
        made = _Making(snapshot, gpu, options, how)
        if division.full is not None:
            full[values.gpu_device_name(gpu.address)] = division.full
        findings += division.findings
        whole = made.whole(division) if division.whole else None
        parts = made.parts(division) if division.parts else []
        listing.add(made.shared_whole(whole), made.shared_parts(division, parts))
        if how.shares is None or how.fallback is rules.Fallback.WHOLE:
            alone.add(whole, parts)
        findings += dict.fromkeys(made.findings)
    kept: Callable[[Iterable[Device]], tuple[Device, ...]] = tuple if counters else without_counters
    offered = listing.devices
    return Offer(
        devices=kept(offered),
        findings=tuple(findings),
        full=full,
        unshared=kept(alone.devices) if any(device.terms is not None for device in offered) else None,
    )


class _Listing:
    """Devices in the order in which they are offered."""

    def __init__(self) -> None:
        self._wholes: list[Device] = []
        self._parts: list[Sequence[Device]] = []

    def add(self, whole: Device | None, parts: Sequence[Device]) -> None:
        """What is offered of the next GPU."""
        self._wholes += [whole] if whole is not None else []
        self._parts.append(parts)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All of them."""
        parts = [device for of_gpu in reversed(self._parts) for device in of_gpu]
        alone = [device for device in (*self._wholes, *parts) if device.terms is None]
        return (*alone, *(device for device in (*parts, *self._wholes) if device.terms is not None))


def semver(text: str) -> Version | None:
    """A driver's version as a strict semantic version: `580.65.06` is 580.65.6, what follows the third number becomes build
    metadata. None when it begins with no number.
    """
    match = _VERSION.match(text.strip()[: 2 * syntax.MAX_VALUE_BYTES])
    if match is None:
        return None
    parts = [str(int(part or "0")) for part in match.groups()[:3]]
    build = re.sub(r"[^0-9A-Za-z-]+", ".", match.group(4)).strip(".-")
    version = ".".join(parts) + (f"+{build}" if build else "")
    return Version(version) if syntax.is_semver(version) else None


def cut(text: str) -> str:
    """The text, cut between characters to the length that the API allows."""
    return text.encode("utf-8", "replace")[: syntax.MAX_VALUE_BYTES].decode("utf-8", "ignore")


def without_lists(device: Device) -> Device:
    """The device as a server without DRAListTypeAttributes can store it: numaNode is the node itself, which a list begins
    with, and what has no other form than a list is left out.
    """
    return replace(
        device,
        attributes={
            name: value[0] if isinstance(value, tuple) else value
            for name, value in device.attributes.items()
            if not isinstance(value, tuple) or name == attributes.NUMA_NODE
        },
    )


def without_counters(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices that a server without DRAPartitionableDevices can store: it gives away what shares nothing, and a whole GPU where
    the policy says so, but never parts, of which it would give away too many.
    """
    return tuple(replace(device, consumes=None) for device in devices if device.consumes is None or device.uncounted)


def _finding(code: str, severity: model.Severity, gpu: model.Gpu, message: str) -> model.Finding:
    return model.Finding(code=code, severity=severity, subject=str(gpu.address), message=message)


class _Making:
    """One GPU on its way to a device."""

    def __init__(self, snapshot: model.Snapshot, gpu: model.Gpu, options: PublishOptions, how: rules.Policy) -> None:
        self.findings: list[model.Finding] = []
        self._snapshot = snapshot
        self._gpu = gpu
        self._options = options
        self._how = how
        # A GPU whose shares a server does not keep is offered as one without a rule.
        self._mode = rules.Mode.EXCLUSIVE if how.mode is rules.Mode.SHARES else how.mode

    def whole(self, division: partitions.Division) -> Device | None:
        """The whole GPU, None when a description that must be there is not known."""
        found = self._described((attributes.TYPE, attributes.TYPE_GPU), *self._enforced(attributes.ENFORCED_WHOLE))
        if found is None or self._gpu.memory_bytes is None:
            return None
        capacity = {attributes.MEMORY: self._gpu.memory_bytes, attributes.COMPUTE: attributes.COMPUTE_WHOLE}
        if self._gpu.multiprocessors is not None:
            capacity[attributes.MULTIPROCESSORS] = self._gpu.multiprocessors
        return Device(
            name=values.gpu_device_name(self._gpu.address),
            address=self._gpu.address,
            attributes=self._settled({**found, **self._keys(), **dict(keys.of_whole(self._gpu))}),
            capacity=capacity,
            nic_is_rdma=self._nic_is_rdma(),
            consumes=division.consumes,
            uncounted=division.uncounted,
            mode=self._mode,
        )

    def parts(self, division: partitions.Division) -> list[Device]:
        """The MIG instances, none when a description that must be there is not known."""
        found = self._described((attributes.TYPE, attributes.TYPE_MIG), *self._enforced(attributes.ENFORCED_MIG))
        if found is None or not self._gpu.multiprocessors:
            return []
        found |= {**self._keys(), attributes.PARENT_UUID: found[attributes.UUID], attributes.UUID: None}
        common, is_rdma = self._settled(found), self._nic_is_rdma()
        return [
            Device(
                name=part.name,
                address=self._gpu.address,
                attributes=common | self._settled({attributes.UUID: part.uuid, attributes.PROFILE: part.profile.name}),
                capacity=_capacity(part.profile, self._gpu.multiprocessors),
                nic_is_rdma=is_rdma,
                consumes=part.consumes,
                mode=self._mode,
            )
            for part in division.parts
        ]

    def shared_whole(self, device: Device | None) -> Device | None:
        """The whole GPU in shares, where its policy wants that."""
        return device and self._shared(device, measures.whole(self._gpu, self._how))

    def shared_parts(self, division: partitions.Division, parts: Sequence[Device]) -> list[Device]:
        """The MIG instances in shares, where the policy wants that."""
        return [
            self._shared(device, measures.part(self._gpu, part.profile, self._how))
            for device, part in zip(parts, division.parts, strict=False)
        ]

    def _shared(self, device: Device, terms: Terms | None) -> Device:
        how = self._how
        if how.shares is None or how.enforcement is None:
            return device
        device = replace(device, mode=how.mode, shares=how.shares, enforcement=how.enforcement)
        if terms is None:
            self.findings.append(
                _finding(
                    "share-too-large",
                    model.Severity.WARNING,
                    self._gpu,
                    f"{device.name} is offered to one claim at a time: two steps of its shares are more than the"
                    f" {quantity.format_bytes(device.capacity[attributes.MEMORY])} and"
                    f" {device.capacity[attributes.COMPUTE]} percent that it has; give it a smaller memoryStep or computeStep",
                )
            )
            return device
        enforced = {
            attributes.MEMORY_ENFORCEMENT: how.enforcement.memory.value,
            attributes.COMPUTE_ENFORCEMENT: how.enforcement.compute.value,
        }
        return replace(
            device, attributes={**device.attributes, **enforced}, capacity=portions.amounts(terms), terms=terms
        )

    def _enforced(self, by: str) -> tuple[tuple[str, str], ...]:
        return (attributes.MEMORY_ENFORCEMENT, by), (attributes.COMPUTE_ENFORCEMENT, by)

    def _settled(self, found: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
        return {name: self._fitting(name, value) for name, value in sorted(found.items()) if value is not None}

    def _described(self, *own: tuple[str, str]) -> dict[str, AttributeValue | None] | None:
        """The descriptions, None when one is not known."""
        found: dict[str, AttributeValue | None] = dict(own)
        missing: list[str] = []
        for name, value in self._descriptions():
            if value is None:
                missing.append(name)
            else:
                found[name] = value
        if missing or self._gpu.memory_bytes is None:
            missing += ["memory"] if self._gpu.memory_bytes is None else []
            self.findings.append(
                _finding(
                    "gpu-not-described",
                    model.Severity.ERROR,
                    self._gpu,
                    f"Not offered: {', '.join(missing)} could not be read; look at the driver and nvidia-smi -q",
                )
            )
            return None
        return found

    def _nic_is_rdma(self) -> bool:
        where = None if self._gpu.nic is None else self._gpu.nic.address
        return any(nic.address == where and nic.rdma_devices for nic in self._snapshot.nics)

    def _descriptions(self) -> Iterator[tuple[str, AttributeValue | None]]:
        gpu, driver = self._gpu, self._snapshot.nvidia_driver
        yield attributes.UUID, gpu.uuid or None
        yield attributes.PRODUCT_NAME, gpu.product or None
        yield attributes.ARCHITECTURE, gpu.architecture or attributes.UNKNOWN
        yield attributes.CUDA_COMPUTE_CAPABILITY, _version_of(gpu.compute_capability)
        yield attributes.DRIVER_VERSION, semver(driver.version) if driver is not None else None
        yield attributes.CUDA_DRIVER_VERSION, _version_of(driver.cuda_version if driver is not None else None)
        yield attributes.NIC_DISTANCE, self._nic_distance()

    def _nic_distance(self) -> str:
        if self._gpu.nic is not None:
            return self._gpu.nic.distance.value
        return attributes.UNKNOWN if self._snapshot.nics else attributes.DISTANCE_NONE

    def _keys(self) -> dict[str, AttributeValue | None]:
        how = self._options
        return dict(keys.of_place(self._snapshot, self._gpu, numa_list=how.numa_list, pcie_switches=how.pcie_switches))

    def _fitting(self, name: str, value: AttributeValue) -> AttributeValue:
        if not isinstance(value, str) or (short := cut(value)) == value:
            return value
        self.findings.append(
            _finding(
                "attribute-cut",
                model.Severity.WARNING,
                self._gpu,
                f"{name} has more than {syntax.MAX_VALUE_BYTES} bytes and is published as {short!r}",
            )
        )
        return short


def _capacity(profile: mig.MigProfile, multiprocessors: int) -> dict[str, int]:
    """Of an instance, on a GPU with so many multiprocessors."""
    return {
        attributes.MEMORY: profile.memory_bytes,
        attributes.COMPUTE: measures.percent(profile, multiprocessors),
        attributes.MULTIPROCESSORS: profile.multiprocessors,
        attributes.COPY_ENGINES: profile.copy_engines,
        attributes.DECODERS: profile.decoders,
        attributes.ENCODERS: profile.encoders,
        attributes.JPEG_ENGINES: profile.jpeg_engines,
        attributes.OFA_ENGINES: profile.ofa_engines,
    }


def _version_of(numbers: tuple[int, int] | None) -> Version | None:
    return Version(f"{numbers[0]}.{numbers[1]}.0") if numbers is not None else None
