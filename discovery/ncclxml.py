# SPDX-License-Identifier: Apache-2.0
"""Reading a NCCL topology, the file that clouds ship for NCCL_TOPO_FILE, as an overlay. The only importer of lxml.

The form is the one that NCCL's own reader takes (src/graph/xml.cc and xml.h): `system` of version 1 holds `cpu` (a NUMA node by
its `numaid`), which holds `pci`: a device, or a bridge with more of them inside. What clouds make of it:
- a bridge has the address of nothing, such as ffff:ff:01.0, or that of something else: it is a name, and not looked up;
- `class`, links and everything about CPUs may be left out, a device need not say what it is;
- `numaid` is -1 or missing where the node is not known;
- `affinity` may be wrong, so it supplies nothing and is only compared (`overlaid`).
Elements that NCCL does not know it ignores, and so does this. `gpu`, `nvlink`, `nic` and links are measured, never believed; of
`net` the rail is taken.

The text may be anybody's: no DTD, hence no entities, nothing but UTF-8, and bounds on size, depth and number of elements that
are looked at while it is parsed.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from lxml import etree

from discovery import address, document, overlay
from discovery.address import PciAddress
from discovery.errors import DocumentError

MAX_ELEMENTS = 4096
"""NCCL itself takes 256 (NCCL_TOPO_XML_MAX_NODES)."""

MAX_DEPTH = 64
MAX_NUMA_NODE = 1023
MAX_MASK = 4608
"""Characters of a mask of 16,384 CPUs; the kernel has 8,192 (CONFIG_NR_CPUS)."""

VERSION = "1"
"""NCCL_TOPO_XML_VERSION: NCCL refuses any other."""

DERIVED_RAIL = 1 << 16
"""NCCL marks rails that it made up itself with this bit (NCCL_TOPO_UNDEF_BIT)."""

_AROUND: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(("system",)),
    "pci": frozenset(("cpu", "pci")),
    "gpu": frozenset(("pci",)),
    "nic": frozenset(("cpu", "pci")),
    "net": frozenset(("nic",)),
}
"""Where an element stands; what has no entry is ignored with all that is in it."""

_DEVICES = ("0x02", "0x03", "0x0108", "0x0680")
"""Classes that a Snapshot knows: network, GPU, NVMe, NVSwitch."""

_BRIDGES = ("0x0600", "0x0604", "0x0801")
"""Host bridge, PCI bridge, and what NCCL counts to them (ConnectX-8 Data Direct)."""

_MARKUP = re.compile(
    r"<!(?!--)(?:DOCTYPE|ENTITY|\[CDATA\[)?|&(?!(?:lt|gt|amp|quot|apos|#x?[0-9a-fA-F]{1,8});)[^;\s]{0,40};?"
)
_REMARK = re.compile(r"<!--|<\?")
_REMARK_ENDS = {"<!--": "-->", "<?": "?>"}
_ENCODING = re.compile(r"""<\?xml[^>]{0,200}?encoding\s*=\s*["']([^"']{0,40})""")
_WITHOUT_DOMAIN = re.compile(r":?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*")
_CLASS = re.compile(r"0x[0-9a-f]{2,6}")


@dataclass(slots=True)
class _Pci:
    """A `pci` element. `rails`: those of the networks directly in it."""

    address: PciAddress
    line: int
    class_code: str | None
    inside: list[_Pci] = field(default_factory=list)
    rails: set[int] = field(default_factory=set)
    holds_function: bool = False

    @property
    def is_bridge(self) -> bool:
        """Whether its class says that it is one."""
        return self.class_code is not None and self.class_code.startswith(_BRIDGES)

    @property
    def is_device(self) -> bool:
        """Whether it is a device that a Snapshot may know; one that does not say what it is may be."""
        return not self.inside and (
            self.holds_function or self.class_code is None or self.class_code.startswith(_DEVICES)
        )


@dataclass(slots=True)
class _Cpu:
    """A `cpu` element. `node`: None where it is not known."""

    line: int
    node: int | None
    cpus: tuple[int, ...] | None
    inside: list[_Pci] = field(default_factory=list)


_Open = tuple[str, _Cpu | _Pci | None]
"""An element that is being read: its name, and what it is."""


def parse(data: bytes, *, name: str, match: overlay.Match | None = None) -> overlay.Machine:
    """The overlay that a NCCL topology is. DocumentError that names the file, the line and what to change."""
    _refuse_text(data, name)
    reader = _Reader(name)
    try:
        for event, element in etree.iterparse(
            io.BytesIO(data),
            events=("start", "end"),
            resolve_entities=False,
            load_dtd=False,
            no_network=True,
            huge_tree=False,
            remove_comments=True,
            remove_pis=True,
        ):
            if event == "start":
                reader.begin(element)
            else:
                reader.end()
                element.clear()
    except etree.XMLSyntaxError as err:
        line = err.lineno or 1
        raise DocumentError(
            f"{name}:{line}: not XML: {_clean((err.msg or 'syntax error').split(', line')[0])}"
        ) from err
    machine = reader.machine(match)
    problems = overlay.problems(machine)
    if problems:
        raise DocumentError(document.listed(name, [f"{name}:{line}: {what}" for line, what in problems]))
    return machine


def _refuse_text(data: bytes, name: str) -> None:
    """Refuse what is no plain UTF-8 text of elements and comments."""
    if len(data) > document.MAX_BYTES:
        raise DocumentError(f"{name}: larger than {document.MAX_BYTES} bytes, which no topology is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise DocumentError(f"{name}:{line}: not UTF-8 (byte {err.start}); save it as UTF-8") from err
    if "\0" in text:
        raise DocumentError(f"{name}:{text.count(chr(10), 0, text.index(chr(0))) + 1}: not XML: a NUL byte")
    declared = _ENCODING.match(text)
    if declared is not None and declared[1].lower() not in ("utf-8", "us-ascii", "ascii"):
        raise DocumentError(f"{name}:1: encoding {_clean(declared[1])!r} is not accepted: save it as UTF-8")
    bare = _without_remarks(text)
    markup = _MARKUP.search(bare)
    if markup is not None:
        line = bare.count("\n", 0, markup.start()) + 1
        raise DocumentError(
            f"{name}:{line}: {_clean(markup[0])} is not accepted: a topology has no DTD, no entities and no CDATA"
        )


def _without_remarks(text: str) -> str:
    """The text with nothing but line ends in its comments and processing instructions, in each of which the other's beginning is
    plain text. One that does not end is left for the parser to refuse.
    """
    kept: list[str] = []
    at = 0
    while remark := _REMARK.search(text, at):
        begin, end_mark = remark.start(), _REMARK_ENDS[remark[0]]
        end = text.find(end_mark, remark.end())
        if end < 0:
            break
        kept += (text[at:begin], "\n" * text.count("\n", begin, end))
        at = end + len(end_mark)
    return "".join((*kept, text[at:]))


class _Reader:
    """Takes elements as they begin and end, and checks each where it stands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[_Open] = []
        self._elements = 0
        self._ignored = 0
        """How many of the open elements are in one that is ignored, itself included."""
        self._cpus: list[_Cpu] = []

    def begin(self, element: etree._Element) -> None:
        """An element begins; its attributes are known."""
        line = cast("int | None", element.sourceline) or 1
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise self._refused(line, f"more than {MAX_ELEMENTS} elements")
        if len(self._open) + self._ignored >= MAX_DEPTH:
            raise self._refused(line, f"nested deeper than {MAX_DEPTH} elements")
        tag = str(element.tag)
        if not self._open and not self._ignored:
            self._check_root(element, tag, line)
            self._open.append((tag, None))
        elif self._ignored or tag not in _AROUND:
            self._ignored += 1
        else:
            around, holder = self._open[-1]
            if around not in _AROUND[tag]:
                raise self._refused(line, f"{tag} stands in {around}, not in {' or '.join(sorted(_AROUND[tag]))}")
            self._open.append((tag, self._take(tag, element, holder, line)))

    def end(self) -> None:
        """The innermost element ends."""
        if self._ignored:
            self._ignored -= 1
        else:
            self._open.pop()

    def machine(self, match: overlay.Match | None) -> overlay.Machine:
        """What was read. The line is that of `system`."""
        bridges = [pci for cpu in self._cpus for pci in _all(cpu.inside) if pci.inside]
        counts = Counter(pci.address for pci in bridges)
        names = {id(pci): f"{pci.address}{f' (line {pci.line})' if counts[pci.address] > 1 else ''}" for pci in bridges}
        parents = {id(pci): names[id(bridge)] for bridge in bridges for pci in bridge.inside}
        devices = [(cpu, pci) for cpu in self._cpus for pci in _all(cpu.inside) if pci.is_device]
        return overlay.Machine(
            file=self._name,
            line=1,
            match=match,
            numa_nodes=tuple(
                overlay.NumaNode(
                    node=cpu.node,
                    line=cpu.line,
                    cpus=cpu.cpus,
                    devices=tuple(_device(pci) for holder, pci in devices if holder is cpu),
                )
                for cpu in self._cpus
                if cpu.node is not None
            ),
            groups=tuple(
                overlay.Group(
                    name=names[id(bridge)],
                    line=bridge.line,
                    parent=parents.get(id(bridge)),
                    devices=tuple(_device(pci) for pci in bridge.inside if pci.is_device),
                )
                for bridge in bridges
            ),
            rails=tuple(
                overlay.Rail(nic=pci.address, rail=min(pci.rails), line=pci.line)
                for _, pci in devices
                if len(pci.rails) == 1
            ),
        )

    def _check_root(self, element: etree._Element, tag: str, line: int) -> None:
        if tag != "system":
            raise self._refused(line, f'<{_clean(tag)}> is no NCCL topology: expected <system version="{VERSION}">')
        version = element.get("version")
        if version != VERSION:
            said = "no version" if version is None else f"version {_clean(version)!r}"
            raise self._refused(line, f"system has {said}, and NCCL takes version {VERSION} only")

    def _take(self, tag: str, element: etree._Element, holder: _Cpu | _Pci | None, line: int) -> _Cpu | _Pci | None:
        match tag, holder:
            case "cpu", _:
                cpu = _Cpu(line=line, node=self._node(element, line), cpus=self._affinity(element, line))
                self._cpus.append(cpu)
                return cpu
            case "pci", _Cpu() | _Pci():
                return self._pci(element, holder, line)
            case (("gpu" | "nic"), _Pci()):
                if holder.is_bridge or holder.inside:
                    raise self._refused(line, f"{tag} stands in {holder.address}, which is a bridge")
                holder.holds_function = True
                return holder
            case "net", _Pci():
                rail = element.get("rail")
                if rail is not None:
                    number = self._number(rail, "rail", line)
                    if 0 <= number < DERIVED_RAIL:
                        holder.rails.add(number)
            case _:
                pass
        return None

    def _pci(self, element: etree._Element, holder: _Cpu | _Pci, line: int) -> _Pci:
        busid = element.get("busid")
        if busid is None:
            raise self._refused(line, "pci has no busid")
        text = busid.strip()
        if _WITHOUT_DOMAIN.fullmatch(text):
            text = f"0000:{text.removeprefix(':')}"
        try:
            where = address.parse(text)
        except ValueError as err:
            raise self._refused(
                line, f"busid {_clean(busid)!r} is not a PCI address (domain:bus:device.function)"
            ) from err
        told = element.get("class")
        class_code = None if told is None else told.strip().lower()
        if class_code is not None and not _CLASS.fullmatch(class_code):
            raise self._refused(line, f"class {_clean(told or '')!r} of {where} is not a PCI class such as 0x030200")
        if isinstance(holder, _Pci) and (holder.holds_function or not (holder.is_bridge or holder.class_code is None)):
            what = "a device" if holder.holds_function else f"of class {holder.class_code}"
            raise self._refused(line, f"{where} stands in {holder.address}, which is {what} and no bridge")
        pci = _Pci(address=where, line=line, class_code=class_code)
        holder.inside.append(pci)
        return pci

    def _node(self, element: etree._Element, line: int) -> int | None:
        text = element.get("numaid")
        number = -1 if text is None else self._number(text, "numaid", line)
        if not -1 <= number <= MAX_NUMA_NODE:
            raise self._refused(
                line, f"numaid {number} cannot be: nodes are numbered 0 to {MAX_NUMA_NODE}, -1 is unknown"
            )
        return None if number < 0 else number

    def _affinity(self, element: etree._Element, line: int) -> tuple[int, ...] | None:
        text = element.get("affinity", "")
        if not text.strip():
            return None
        if len(text) > MAX_MASK or not _MASK.fullmatch(text.strip()):
            raise self._refused(line, f"affinity {_clean(text)!r} is no CPU mask such as 00000000,0000ffff")
        bits = int("".join(word.rjust(8, "0") for word in text.strip().split(",")), 16)
        return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)

    def _number(self, text: str, what: str, line: int) -> int:
        if not _NUMBER.fullmatch(text.strip()):
            raise self._refused(line, f"{what} {_clean(text)!r} is no number")
        return int(text)

    def _refused(self, line: int, what: str) -> DocumentError:
        return DocumentError(f"{self._name}:{line}: {what}")


def _all(inside: list[_Pci]) -> Iterator[_Pci]:
    """Every element of some, outer ones first, in the order of the document."""
    for pci in inside:
        yield pci
        yield from _all(pci.inside)


def _device(pci: _Pci) -> overlay.Device:
    base_class = None if pci.class_code is None else int(pci.class_code[:4], 16)
    return overlay.Device(address=pci.address, line=pci.line, base_class=base_class)


def _clean(text: str) -> str:
    """A text of anybody's, short and printable."""
    short = text if len(text) <= 80 else f"{text[:80]}..."
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in short)
