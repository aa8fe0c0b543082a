# SPDX-License-Identifier: Apache-2.0
"""From a Machine to its PCI functions: bus numbers, addresses, places in sysfs, names. Pure and deterministic.

Buses are numbered as firmware and kernel do, depth first: a port's secondary bus is the next free one (or `bus`), its
subordinate bus the last one used below it. Names are given per kind in order of PCI address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from typing import TypeVar

from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import machine, vital
from discovery.mock import products as parts

Place = tuple[str | int, ...]

_LAST_BUS = 0xFF
_BRIDGE_CLASS = 0x060400
_NVME_CLASS = 0x010802
_NIC_CLASSES = {"Ethernet": 0x020000, "InfiniBand": 0x020700, "Unspecified": 0x020000}

P = TypeVar("P", bound=parts.Part)


class MachineError(DocumentError):
    """The description contradicts itself. `place` is where, so that the reader of the document can name the line."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place


class PortType(IntEnum):
    """Device/port type of the PCI Express capability (PCIe base specification, 7.5.3.2)."""

    ENDPOINT = 0
    ROOT_PORT = 4
    UPSTREAM = 5
    DOWNSTREAM = 6
    INTEGRATED = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridging:
    """The bus numbers of a bridge."""

    primary: int
    secondary: int
    subordinate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A PCIe link: what the function can, and what it has trained to."""

    max_generation: int
    max_width: int
    generation: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One PCI function. `directory` is below `sys/devices`; `kind` is one of machine.KINDS, `port` or `companion`."""

    kind: str
    place: Place
    address: PciAddress
    directory: str
    part: parts.Part
    ids: parts.PciId
    class_code: int
    port_type: PortType
    numa: int | None
    driver: str | None
    link: Link | None
    bridging: Bridging | None = None
    hot_plug: str | None = None
    """Of a port with a hot-plug slot, the slot's name."""
    slot: machine.Slot | None = None
    name: str | None = None
    port: machine.Port | None = None
    """Of a NIC's function: what the document says of it."""
    redirects: bool | None = None
    """Whether a root port or downstream port redirects peer-to-peer requests; None for what has no such switch."""
    vpd: bytes | None = None
    physical: PciAddress | None = None
    """Of a virtual function: its physical one, of which it is the `ordinal`-th, from 0."""
    ordinal: int = 0


def build(described: machine.Machine, catalogue: parts.Products) -> tuple[Function, ...]:
    """All functions in order of address, named. MachineError names the place of a contradiction."""
    builder = _Builder(described, described.products.over(catalogue))
    for number, root in enumerate(described.pci):
        builder.root(root, ("pci", number))
    return _named(builder.finished())


def by_name(functions: Iterable[Function]) -> Mapping[str, Function]:
    """The named functions; of a multi-function device the first one."""
    named: dict[str, Function] = {}
    for function in functions:
        if function.name is not None:
            named.setdefault(function.name, function)
    return named


class _Builder:
    def __init__(self, described: machine.Machine, catalogue: parts.Products) -> None:
        self._machine = described
        self._catalogue = catalogue
        self._functions: dict[PciAddress, Function] = {}

    def finished(self) -> list[Function]:
        return sorted(self._functions.values(), key=lambda function: function.address)

    def root(self, root: machine.RootComplex, place: Place, *, inside: str = "") -> None:
        domain, first = root.root
        above = inside or root.under or ""
        directory = f"{above}/pci{domain:04x}:{first:02x}".removeprefix("/")
        bus = _Bus(domain=domain, number=first, directory=directory, numa=root.numa)
        for number, slot in enumerate(root.devices):
            at = slot.at or _free(bus, 0, (*place, "devices", number))
            self._device(slot, bus, at, (*place, "devices", number), above=None)
        self._ports(
            root.ports,
            bus,
            (*place, "ports"),
            default=self._machine.host.root_port,
            kind=PortType.ROOT_PORT,
            last=first,
        )

    def _ports(
        self, slots: Iterable[machine.Slot], bus: _Bus, place: Place, *, default: str | None, kind: PortType, last: int
    ) -> int:
        """Ports on one bus and all behind them; the last bus used. Root ports begin at device 1, as 0 is the host bridge."""
        for number, slot in enumerate(slots):
            here = (*place, number)
            if slot.port is None and default is None:
                raise MachineError(here, "no product for this root port: give `port` here, or `rootPort` of the host")
            product = self._part(
                self._catalogue.bridges, slot.port or default or "", (*here, "port") if slot.port else here
            )
            at = slot.at or _free(bus, 1 if kind is PortType.ROOT_PORT else 0, here)
            secondary = last + 1 if slot.bus is None else slot.bus
            if not last < secondary <= _LAST_BUS:
                raise MachineError((*here, "bus") if slot.bus else here, _no_bus(secondary, last))
            limit = self._narrower(product.pcie, slot, here)
            port = self._bridge(product, bus, at, kind=kind, place=here, slot=slot, secondary=secondary, limit=limit)
            behind = _Bus(domain=bus.domain, number=secondary, directory=port.directory, numa=port.numa)
            if slot.kind == "switch":
                last = self._switch(slot, behind, here, above=product.pcie)
            else:
                last = secondary
                if slot.kind is not None:
                    self._device(slot, behind, machine.DevFn(0, 0), here, above=product.pcie)
            assert port.bridging is not None
            bridging = dataclasses.replace(port.bridging, subordinate=last)
            self._functions[port.address] = dataclasses.replace(port, bridging=bridging)
        return last

    def _switch(self, slot: machine.Slot, bus: _Bus, place: Place, *, above: parts.Pcie) -> int:
        assert slot.switch is not None
        product = self._part(self._catalogue.bridges, slot.switch, (*place, "switch"))
        inner = bus.number + 1
        if inner > _LAST_BUS:
            raise MachineError(place, _no_bus(inner, bus.number))
        upstream = self._bridge(
            product,
            bus,
            machine.DevFn(0, 0),
            kind=PortType.UPSTREAM,
            place=place,
            slot=slot,
            secondary=inner,
            limit=_narrower(product.pcie, above),
        )
        below = _Bus(domain=bus.domain, number=inner, directory=upstream.directory, numa=bus.numa)
        last = self._ports(
            slot.ports, below, (*place, "ports"), default=slot.switch, kind=PortType.DOWNSTREAM, last=inner
        )
        assert upstream.bridging is not None
        bridging = dataclasses.replace(upstream.bridging, subordinate=last)
        named = dataclasses.replace(upstream, bridging=bridging, kind="switch", name=slot.name)
        self._functions[upstream.address] = named
        return last

    def _bridge(
        self,
        product: parts.Bridge,
        bus: _Bus,
        at: machine.DevFn,
        *,
        kind: PortType,
        place: Place,
        slot: machine.Slot,
        secondary: int,
        limit: parts.Pcie,
    ) -> Function:
        """A bridge, whose link carries what both its ends can: `limit`."""
        return self._add(
            bus,
            at,
            Function(
                kind="port",
                place=place,
                address=PciAddress(bus.domain, bus.number, at.device, at.function),
                directory="",
                part=product,
                ids=product.pci,
                class_code=_BRIDGE_CLASS,
                port_type=kind,
                numa=bus.numa if slot.numa is None else slot.numa,
                driver="pcieport",
                link=_link(product.pcie, limit, slot.link),
                bridging=Bridging(primary=bus.number, secondary=secondary, subordinate=secondary),
                hot_plug=None if kind is PortType.UPSTREAM else slot.slot,
                redirects=None if kind is PortType.UPSTREAM else self._redirects(slot),
            ),
        )

    def _redirects(self, slot: machine.Slot) -> bool:
        return self._machine.host.acs_redirect if slot.acs_redirect is None else slot.acs_redirect

    def _narrower(self, port: parts.Pcie, slot: machine.Slot, place: Place) -> parts.Pcie:
        """What a port and the thing behind it can both do; a port with nothing known behind it keeps its own."""
        if slot.kind is None:
            return port
        return _narrower(port, self._thing(slot, place).pcie)

    def _thing(self, slot: machine.Slot, place: Place) -> parts.Part:
        catalogue: Mapping[str, Mapping[str, parts.Part]] = {
            "gpu": self._catalogue.gpus,
            "nic": self._catalogue.nics,
            "nvme": self._catalogue.nvmes,
            "device": self._catalogue.devices,
            "switch": self._catalogue.bridges,
        }
        assert slot.kind is not None
        return self._part(catalogue[slot.kind], getattr(slot, slot.kind), (*place, slot.kind))

    def _device(
        self, slot: machine.Slot, bus: _Bus, at: machine.DevFn, place: Place, *, above: parts.Pcie | None
    ) -> None:
        if slot.kind in (None, "switch"):
            raise MachineError(place, "devices of a root bus are endpoints; a switch stands behind a port")
        part = self._thing(slot, place)
        link = None
        if part.pcie is not None and above is not None:
            link = _link(part.pcie, _narrower(part.pcie, above), slot.link)
        for offset, (ids, class_code, driver, port) in enumerate(
            _functions_of(slot, part, self._machine.driver, place)
        ):
            here = machine.DevFn(at.device, at.function + offset)
            if here.function > 7:
                raise MachineError(place, "more functions than a device has numbers for")
            function = self._add(
                bus,
                here,
                Function(
                    kind="companion" if offset and isinstance(part, parts.Gpu) else slot.kind or "",
                    place=place,
                    address=PciAddress(bus.domain, bus.number, here.device, here.function),
                    directory="",
                    part=part,
                    ids=ids,
                    class_code=class_code,
                    port_type=PortType.ENDPOINT if above else PortType.INTEGRATED,
                    numa=bus.numa if slot.numa is None else slot.numa,
                    driver=driver,
                    link=link,
                    slot=slot,
                    name=slot.name,
                    port=port,
                    vpd=None if slot.vpd is None else vital.data(self._machine.name, slot.vpd, part.name),
                ),
            )
        if slot.root is not None:
            self.root(slot.root, (*place, "root"), inside=function.directory)

    def _add(self, bus: _Bus, at: machine.DevFn, function: Function) -> Function:
        if function.address in self._functions:
            raise MachineError(function.place, f"there is already a function at {function.address}; give another `at`")
        bus.devices.add(at.device)
        numa = function.numa if function.numa is not None and function.numa >= 0 else None
        placed = dataclasses.replace(function, directory=f"{bus.directory}/{function.address}", numa=numa)
        self._check_node(placed)
        self._functions[function.address] = placed
        return placed

    def _check_node(self, function: Function) -> None:
        known = {node for entry in self._machine.numa.nodes for node in entry.ids}
        if function.numa is not None and function.numa not in known:
            raise MachineError(function.place, f"there is no NUMA node {function.numa}; numa.nodes has {sorted(known)}")

    def _part(self, section: Mapping[str, P], key: str, place: Place) -> P:
        part = section.get(key)
        if part is None:
            close = get_close_matches(key, section, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(section))}"
            raise MachineError(place, f"there is no product {key!r}; {hint}")
        return part


@dataclass(slots=True, kw_only=True)
class _Bus:
    domain: int
    number: int
    directory: str
    numa: int | None
    devices: set[int] = dataclasses.field(default_factory=set)


def _free(bus: _Bus, first: int, place: Place) -> machine.DevFn:
    device = max(bus.devices | {first - 1}) + 1
    if device > 0x1F:
        raise MachineError(place, f"no place is left on bus {bus.domain:04x}:{bus.number:02x}")
    return machine.DevFn(device, 0)


def _no_bus(wanted: int, last: int) -> str:
    return f"bus {wanted:02x} is not free: the last one used before is {last:02x}, and the highest is {_LAST_BUS:02x}"


def _narrower(a: parts.Pcie, b: parts.Pcie | None) -> parts.Pcie:
    if b is None:
        return a
    return parts.Pcie.model_construct(generation=min(a.generation, b.generation), width=min(a.width, b.width))


def _link(own: parts.Pcie, limit: parts.Pcie, now: machine.LinkNow | None) -> Link:
    return Link(
        max_generation=own.generation,
        max_width=own.width,
        generation=(now and now.generation) or limit.generation,
        width=(now and now.width) or limit.width,
    )


_FunctionFacts = tuple[parts.PciId, int, str | None, machine.Port | None]


def _functions_of(
    slot: machine.Slot, part: parts.Part, nvidia: machine.Driver | None, place: Place
) -> list[_FunctionFacts]:
    """Identifiers, class, driver and port of each function of a device."""

    def bound(usual: str | None) -> str | None:
        return usual if slot.driver is None else None if slot.driver == "none" else slot.driver

    match part:
        case parts.Gpu():
            first: _FunctionFacts = (part.pci, part.class_, bound("nvidia" if nvidia else None), None)
            return [first, *((extra.pci, extra.class_, extra.driver, None) for extra in part.companions)]
        case parts.Nic():
            ports = slot.functions or (machine.Port.model_construct(),) * len(part.functions)
            if len(ports) > len(part.functions):
                raise MachineError(
                    (*place, "functions"), f"{part.name} has {len(part.functions)} functions, not {len(ports)}"
                )
            return [
                (part.pci, _NIC_CLASSES[port.link or usual.link], bound(part.driver), port)
                for port, usual in zip(ports, part.functions, strict=False)
            ]
        case parts.Nvme():
            return [(part.pci, _NVME_CLASS, bound("nvme"), None)]
        case parts.Device():
            usual = part.driver if nvidia or not (part.driver or "").startswith("nvidia") else None
            return [(part.pci, part.class_, bound(usual), None)]
        case _:
            raise AssertionError(part)


_NAMED = {"gpu": "gpu", "nic": "nic", "nvme": "nvme"}


def _named(functions: list[Function]) -> tuple[Function, ...]:
    """Names for what has none; a device's further functions share its name."""
    taken: dict[str, Function] = {}
    for function in functions:
        first = taken.setdefault(function.name, function) if function.name else function
        if first.place != function.place:
            raise MachineError(function.place, f"the name {function.name} is taken by {first.address}")
    counters = dict.fromkeys(_NAMED, 0)
    given: dict[Place, str] = {}
    named: list[Function] = []
    for function in functions:
        name = function.name or given.get(function.place)
        if name is None and function.kind in _NAMED:
            while (fresh := f"{_NAMED[function.kind]}{counters[function.kind]}") in taken:
                counters[function.kind] += 1
            counters[function.kind] += 1
            name = given[function.place] = fresh
        named.append(dataclasses.replace(function, name=name))
    return tuple(named)
