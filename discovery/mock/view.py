# SPDX-License-Identifier: Apache-2.0
"""The state of a machine with its faults laid over it: what NVML shows at one moment. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from discovery import address
from discovery.address import PciAddress
from discovery.mock import abi, fault, live, state
from discovery.mock.fault import Kind

_HOT_C = 95

_NOT_ON_THE_BUS = (Kind.FALLEN_OFF, Kind.VFIO_BOUND, Kind.NO_DRIVER)
_CALL_FAULTS = (Kind.NVML_HANG, Kind.NVML_CRASH, Kind.NVML_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the driver sees. `system` is None while no driver is loaded. `lost` are among `gpus`: a lost GPU keeps its index."""

    system: state.System | None = None
    gpus: tuple[state.Gpu, ...] = ()
    lost: frozenset[PciAddress] = frozenset()
    call_faults: tuple[fault.Fault, ...] = ()
    by_address: Mapping[PciAddress, state.Gpu] = field(default_factory=dict)
    """`gpus` again: every call looks one up."""

    def gpu(self, pci: PciAddress) -> state.Gpu | None:
        """The GPU at an address, or None when it is not there (any more)."""
        return self.by_address.get(pci)

    def of(self, known: frozenset[PciAddress]) -> View:
        """The same without the GPUs that are not among these."""
        if known >= self.by_address.keys():
            return self
        gpus = tuple(gpu for gpu in self.gpus if gpu.pci in known)
        return dataclasses.replace(self, gpus=gpus, by_address={gpu.pci: gpu for gpu in gpus})

    def faults_of(self, function: str, pci: PciAddress | None, *, after: bool = False) -> tuple[fault.Fault, ...]:
        """The faults that hit one call, before it did anything or after."""
        return tuple(
            hit
            for hit in self.call_faults
            if hit.target in (None, pci) and hit.function in (None, function) and bool(hit.after) == after
        )


def view(now_live: live.Live, *, now: float) -> View:
    """What NVML shows at a time."""
    active = tuple(placed.fault for placed in now_live.faults if placed.on(now))
    nvml = now_live.nvml
    call_faults = tuple(item for item in active if item.kind in _CALL_FAULTS)
    if nvml is None or any(item.kind is Kind.NO_DRIVER and item.target is None for item in active):
        return View(call_faults=call_faults)
    gone = {item.target for item in active if item.kind in _NOT_ON_THE_BUS}
    down = _links_down(nvml.gpus, active)
    gpus = tuple(_under(gpu, active, down.get(gpu.pci, frozenset())) for gpu in nvml.gpus if gpu.pci not in gone)
    return View(
        system=nvml.system,
        gpus=gpus,
        by_address={gpu.pci: gpu for gpu in gpus},
        lost=frozenset(item.target for item in active if item.kind is Kind.GPU_LOST and item.target is not None),
        call_faults=call_faults,
    )


def _links_down(gpus: Sequence[state.Gpu], active: Iterable[fault.Fault]) -> dict[PciAddress, set[int]]:
    """The numbers of the NVLinks that are down. A link between two GPUs is down at both ends: the first link of the one to the
    other is the first of the other to the one, and so on.
    """
    by_address = {gpu.pci: gpu for gpu in gpus}
    down: dict[PciAddress, set[int]] = {}
    for item in active:
        gpu = by_address.get(item.target) if item.kind is Kind.LINK_DOWN and item.target is not None else None
        if gpu is None:
            continue
        for number in range(len(gpu.nvlinks)) if item.link is None else (item.link,):
            down.setdefault(gpu.pci, set()).add(number)
            remote = _remote(gpu, number)
            far = by_address.get(remote) if remote is not None else None
            if far is not None:
                order = [_remote(gpu, earlier) for earlier in range(number)].count(far.pci)
                back = [each for each in range(len(far.nvlinks)) if _remote(far, each) == gpu.pci]
                down.setdefault(far.pci, set()).update(back[order : order + 1])
    return down


def _remote(gpu: state.Gpu, number: int) -> PciAddress | None:
    text = gpu.nvlinks[number].remote_bus_id if number < len(gpu.nvlinks) else None
    return None if text is None else address.parse(text)


def _under(gpu: state.Gpu, active: Iterable[fault.Fault], down: Collection[int]) -> state.Gpu:
    if down:
        links = (dataclasses.replace(link, active=link.active and n not in down) for n, link in enumerate(gpu.nvlinks))
        gpu = dataclasses.replace(gpu, nvlinks=tuple(links))
    for item in active:
        if item.target == gpu.pci:
            gpu = _apply(gpu, item)
    return gpu


def _apply(gpu: state.Gpu, item: fault.Fault) -> state.Gpu:
    match item.kind:
        case Kind.NARROW_LINK if gpu.pcie is not None and item.width is not None:
            return dataclasses.replace(gpu, pcie=dataclasses.replace(gpu.pcie, width=min(item.width, gpu.pcie.width)))
        case Kind.ECC:
            return _with_memory_errors(gpu, item.count or 1)
        case Kind.THERMAL:
            reasons = (gpu.clocks_event_reasons or 0) & ~abi.CLOCKS_GPU_IDLE
            return dataclasses.replace(
                gpu,
                temperature_c=_HOT_C if item.temperature_c is None else item.temperature_c,
                clocks_event_reasons=reasons | abi.CLOCKS_SW_THERMAL_SLOWDOWN | abi.CLOCKS_HW_THERMAL_SLOWDOWN,
            )
        case _:
            return gpu


def _with_memory_errors(gpu: state.Gpu, count: int) -> state.Gpu:
    if gpu.ecc is not None:
        ecc = dataclasses.replace(
            gpu.ecc,
            volatile_uncorrected=gpu.ecc.volatile_uncorrected + count,
            aggregate_uncorrected=gpu.ecc.aggregate_uncorrected + count,
        )
        gpu = dataclasses.replace(gpu, ecc=ecc)
    if gpu.remapped_rows is not None:
        rows = dataclasses.replace(gpu.remapped_rows, uncorrected=gpu.remapped_rows.uncorrected + 1, pending=True)
        gpu = dataclasses.replace(gpu, remapped_rows=rows)
    return gpu
