# SPDX-License-Identifier: Apache-2.0
"""Reading an overlay file: the document TopologyOverlay (YAML), or a NCCL topology (XML), told apart by its first character.

    apiVersion: config.nearfield.dev/v1alpha1
    kind: TopologyOverlay
    machines:
    - match: {vendor: Amazon EC2, product: p4d.24xlarge}
      numaNodes:
      - {node: 0, devices: [0000:10:1c.0, 0000:10:1d.0, 0000:10:1b.0]}
      switches:
      - {name: left, devices: [0000:10:1c.0, 0000:10:1d.0, 0000:10:1b.0]}
      rails:
      - {nic: 0000:10:1b.0, rail: 0}
    - match: {gpu: "10de:2330"}
      ncclTopology: ndv5-topo.xml

Everything unknown is an error that names the line. Whether a document fits the machine is for `overlaid` to say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from discovery import address, document, overlay, strict
from discovery.errors import DocumentError

KIND = "TopologyOverlay"
NUMA_MAX = 1023
"""The kernel has no higher node (CONFIG_NODES_SHIFT is at most 10)."""

MAX_MACHINES = 256
GPU_PATTERN = r"^[0-9a-f]{4}:[0-9a-f]{4}$"

_KIND_LINE = re.compile(rb"^kind:[ \t]*[\"']?TopologyOverlay\b", re.MULTILINE)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _is_no_empty_list(value: object) -> object:
    if value == []:
        raise ValueError("must not be empty")
    return value


def _is_something(value: object) -> object:
    if value is None:
        raise ValueError("must not be null: give a value, or leave it out")
    return value


_NOT_NULL = pydantic.BeforeValidator(_is_something)
"""A `match:` whose lines were put in the wrong column must not mean every machine."""

_NOT_EMPTY = (
    pydantic.BeforeValidator(_is_no_empty_list),
    pydantic.Field(json_schema_extra={"minItems": 1}, strict=False),
)
"""pydantic's own minimum would count the entries that have problems of their own as missing."""

Name = Annotated[str, pydantic.Field(min_length=1, max_length=63)]
FileName = Annotated[str, pydantic.Field(min_length=1, max_length=1024)]


class Match(strict.Section):
    """Which machines are meant; all that is given must be so."""

    vendor: Annotated[Name | None, _NOT_NULL] = None
    """As /sys/class/dmi/id/sys_vendor has it: `Amazon EC2`."""

    product: Annotated[Name | None, _NOT_NULL] = None
    """As /sys/class/dmi/id/product_name has it: `p4d.24xlarge`."""

    gpu: Annotated[Annotated[str, pydantic.Field(pattern=GPU_PATTERN)] | None, _NOT_NULL] = None
    """PCI vendor and device of one of the machine's GPUs, such as 10de:2330."""

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Match:
        if not self.model_fields_set:
            raise ValueError("give vendor, product or gpu; leave match out where any machine is meant")
        return self


class NumaNode(strict.Section):
    """The devices near one NUMA node."""

    node: Annotated[int, pydantic.Field(ge=0, le=NUMA_MAX)]
    """Number of the node, as /sys/devices/system/node has it."""

    devices: Annotated[tuple[strict.Address, ...], *_NOT_EMPTY]
    """PCI addresses."""


class Switch(strict.Section):
    """The devices below one PCIe switch, or below something that acts as one."""

    name: Name
    """A name for `parent` to refer to; it is published nowhere."""

    parent: Annotated[Name | None, _NOT_NULL] = None
    """The switch above this one."""

    devices: tuple[strict.Address, ...] = pydantic.Field(default=(), strict=False)
    """PCI addresses of those that are directly below it."""


class Machine(strict.Section):
    """One kind of machine."""

    match: Annotated[Match | None, _NOT_NULL] = None
    """Which machines are meant; without it every machine is, so it has to be the last."""

    numa_nodes: tuple[NumaNode, ...] = pydantic.Field(default=(), strict=False)
    """NUMA nodes of devices. Of a device that is not named the firmware's word stays."""

    switches: tuple[Switch, ...] = pydantic.Field(default=(), strict=False)
    """Groups of devices. They are published as pcieSwitch, never as pcieRoot."""

    rails: tuple[strict.Rail, ...] = pydantic.Field(default=(), strict=False)
    """Rails of NICs. With any entry, a NIC that is not named has no rail."""

    nccl_topology: Annotated[FileName | None, _NOT_NULL] = None
    """Instead of the three: a NCCL topology (XML), by its path from the folder of this file."""

    @pydantic.model_validator(mode="after")
    def _says_one_thing(self) -> Machine:
        own = self.numa_nodes or self.switches or self.rails
        if self.nccl_topology is not None and own:
            raise ValueError("ncclTopology stands instead of numaNodes, switches and rails, not beside them")
        if self.nccl_topology is None and not own:
            raise ValueError("says nothing: give numaNodes, switches, rails or ncclTopology")
        return self


class TopologyOverlay(strict.Section):
    """What the machines of a fleet do not tell of their wiring."""

    api_version: strict.ApiVersion
    kind: Literal["TopologyOverlay"]
    machines: Annotated[tuple[Machine, ...], *_NOT_EMPTY, pydantic.Field(max_length=MAX_MACHINES)]
    """The first machine that matches counts."""


def read(path: Path) -> overlay.Overlay:
    """The overlay in a file, with what it refers to. DocumentError with one line for every problem."""
    return parse_bytes(document.read_bytes(path), path)


def parse_bytes(data: bytes, path: Path) -> overlay.Overlay:
    """The overlay in the bytes of a file. DocumentError with one line for every problem."""
    if is_xml(data):
        return overlay.Overlay(file=str(path), machines=(_nccl(data, path),))
    return parse(document.parse(data, name=str(path)), folder=path.parent)


def is_overlay(data: bytes) -> bool:
    """Whether some bytes are meant as an overlay, and not as another document of ours; sound or not."""
    return is_xml(data) or _KIND_LINE.search(data) is not None


def is_xml(data: bytes) -> bool:
    """Whether some bytes are meant as XML: no YAML mapping begins with `<`, and no XML without it."""
    # UTF-16 begins with a mark, then `<`; the XML reader refuses it in words that help.
    return data.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"<" or data[:4] in (b"\xff\xfe<\0", b"\xfe\xff\0<")


def parse(source: document.Document, *, folder: Path) -> overlay.Overlay:
    """The overlay in a document that was read. DocumentError with one line for every problem."""
    told = strict.validate(TopologyOverlay, source)
    reader = _Reader(source, folder)
    machines = tuple(reader.machine(entry, index) for index, entry in enumerate(told.machines))
    trouble = [f"{machine.place(line)}: {what}" for machine in machines for line, what in overlay.problems(machine)]
    lines = [source.line(("machines", index)) for index in range(len(machines))]
    for index, machine in enumerate(machines):
        earlier = next((i for i in range(index) if overlay.covers(machines[i].match, machine.match)), None)
        if earlier is not None:
            trouble.append(
                f"{source.name}:{lines[index]}: never reached, as each machine that matches here matches on line {lines[earlier]} already"
            )
    if (
        sum(len(machine.groups) + sum(1 for _ in overlay.devices(machine)) for machine in machines)
        > overlay.MAX_DEVICES
    ):
        trouble.append(f"{source.name}: more than {overlay.MAX_DEVICES} devices and groups are named; split the file")
    if trouble:
        raise DocumentError(document.listed(source.name, trouble))
    return overlay.Overlay(file=source.name, machines=machines)


def to_json(read: overlay.Overlay) -> dict[str, object]:
    """An overlay as a document, which `parse` reads back: what a NCCL topology says, in the words of a TopologyOverlay."""
    return {
        "apiVersion": strict.API_VERSION,
        "kind": KIND,
        "machines": [_machine_to_json(machine) for machine in read.machines],
    }


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return strict.json_schema(TopologyOverlay)


def _machine_to_json(machine: overlay.Machine) -> dict[str, object]:
    match = machine.match or overlay.Match()
    gpu = None if match.gpu is None else f"{match.gpu[0]:04x}:{match.gpu[1]:04x}"
    meant = {"vendor": match.vendor, "product": match.product, "gpu": gpu}
    told: dict[str, object] = {
        "match": {key: value for key, value in meant.items() if value is not None},
        "numaNodes": [
            {"node": node.node, "devices": _spelled(node.devices)} for node in machine.numa_nodes if node.devices
        ],
        "switches": [
            {
                "name": group.name,
                **({} if group.parent is None else {"parent": group.parent}),
                **({"devices": _spelled(group.devices)} if group.devices else {}),
            }
            for group in machine.groups
        ],
        "rails": [{"nic": str(rail.nic), "rail": rail.rail} for rail in machine.rails],
    }
    return {key: value for key, value in told.items() if value}


def _spelled(devices: tuple[overlay.Device, ...]) -> list[str]:
    return [str(device.address) for device in devices]


class _Reader:
    """From the models of a document to values with their lines."""

    def __init__(self, source: document.Document, folder: Path) -> None:
        self._source = source
        self._folder = folder

    def machine(self, told: Machine, index: int) -> overlay.Machine:
        at: document.Place = ("machines", index)
        match = None if told.match is None else _match(told.match)
        line = self._source.line(at)
        if told.nccl_topology is not None:
            return self._other_file(told.nccl_topology, match, (*at, "ncclTopology"))
        return overlay.Machine(
            file=self._source.name,
            line=line,
            match=match,
            numa_nodes=tuple(
                overlay.NumaNode(
                    node=node.node,
                    line=self._source.line((*at, "numaNodes", i)),
                    devices=self._devices(node.devices, (*at, "numaNodes", i, "devices")),
                )
                for i, node in enumerate(told.numa_nodes)
            ),
            groups=tuple(
                overlay.Group(
                    name=switch.name,
                    line=self._source.line((*at, "switches", i)),
                    parent=switch.parent,
                    devices=self._devices(switch.devices, (*at, "switches", i, "devices")),
                )
                for i, switch in enumerate(told.switches)
            ),
            rails=tuple(
                overlay.Rail(
                    nic=address.parse(rail.nic), rail=rail.rail, line=self._source.line((*at, "rails", i, "nic"))
                )
                for i, rail in enumerate(told.rails)
            ),
        )

    def _devices(self, told: tuple[str, ...], at: document.Place) -> tuple[overlay.Device, ...]:
        return tuple(
            overlay.Device(address=address.parse(device), line=self._source.line((*at, i)))
            for i, device in enumerate(told)
        )

    def _other_file(self, name: str, match: overlay.Match | None, at: document.Place) -> overlay.Machine:
        path = self._folder / name
        try:
            return _nccl(document.read_bytes(path), path, match)
        except DocumentError as err:
            raise DocumentError(f"{self._source.where(at)}: {err}") from err


def _match(told: Match) -> overlay.Match:
    gpu = None
    if told.gpu is not None:
        vendor, device = told.gpu.split(":")
        gpu = (int(vendor, 16), int(device, 16))
    return overlay.Match(vendor=told.vendor, product=told.product, gpu=gpu)


def _nccl(data: bytes, path: Path, match: overlay.Match | None = None) -> overlay.Machine:
    if not is_xml(data):
        raise DocumentError(f'{path}:1: not XML: a NCCL topology begins with <system version="1">')
    try:
        from discovery import ncclxml  # noqa: PLC0415 - its parser is an extra, and only files of this kind need it
    except ImportError as err:
        raise DocumentError(
            f"{path}: a NCCL topology is XML, and what reads it is not installed: install nearfield with its extra `nccl`, which "
            "is the package lxml, or write a TopologyOverlay (YAML)"
        ) from err
    return ncclxml.parse(data, name=str(path), match=match)
