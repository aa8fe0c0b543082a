# SPDX-License-Identifier: Apache-2.0
"""Any PCI tree, with functions, domains and switches as it likes, attributes missing and bytes wrong, gives a Snapshot that
passes `check`, survives the codec, and is the same when read again; never an exception, never a value nobody told.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import check, codec, model, peering, probe, topology
from discovery.address import parse
from discovery.mock import vital
from discovery.options import ProbeOptions
from tests.fakes import pcitree
from tests.fakes.nvmllib import FakeGpu, FakeLibrary, FakeLink

DATA_DIRECT = {**pcitree.NIC, "device": "0x2100", "class": "0x080100"}
KINDS = (
    pcitree.GPU, pcitree.NIC, pcitree.NIC, pcitree.NVME, DATA_DIRECT,
    {**pcitree.GPU, "class": "0x068000"}, {**pcitree.NIC, "vendor": "0x8086"}, {**pcitree.GPU, "vendor": "0x1002"},
)  # fmt: skip
CARDS = [vital.build("card", fields) for fields in ({"V3": "a"}, {"V3": "b", "SN": "1"}, {"SN": "1"}, {"SN": "2"}, {})]
RUBBISH = st.sampled_from(
    (None, b"", b"\xff\xfe", b"0x", b"-1", b"-7", b"99999999999", b"0x0", b"0-99999999", b"Unknown", b"x" * 5000)
)
ATTRIBUTES = (
    "vendor", "device", "class", "subsystem_vendor", "subsystem_device", "numa_node", "local_cpulist", "max_link_width",
    "current_link_width", "max_link_speed", "current_link_speed", "config", "vpd",
)  # fmt: skip
SPOILED: st.SearchStrategy[dict[str, bytes | None]] = st.one_of(
    st.just({}), st.just({}), st.dictionaries(st.sampled_from(ATTRIBUTES), RUBBISH, max_size=3)
)
PARTS = ((0xC030, None), (0xC010, (0x1000, 0xA001)), (0xC030, (0x1000, 0x0001)), (0xC030, (0x1000, 0x1001)))
"""Device and subsystem of switches, of which two may be one part."""

FITS = -1
"""The port type that fits the place of a bridge."""

WIDTHS = ("0", "1", "4", "8", "16", "255")
SPEEDS = ("2.5 GT/s PCIe", "16.0 GT/s PCIe", "64.0 GT/s PCIe", "Unknown", "5 GT/s")


@dataclass(frozen=True)
class Spoil:
    """A bridge, and what is wrong with it."""

    port: int | None
    part: tuple[int, tuple[int, int] | None]
    access: int | None
    extended: bool
    flips: list[tuple[int, int]]
    cut: int | None
    attributes: Mapping[str, str | bytes | None]

    def config(self, fitting: int) -> bytes:
        """Its configuration space, where a port of type `fitting` would be in its place."""
        port = fitting if self.port == FITS else self.port
        device, subsystem = self.part
        whole = pcitree.config(port, device=device, subsystem=subsystem, extended=self.extended, access=self.access)
        space = bytearray(whole)
        for at, byte in self.flips:
            space[at % len(space)] = byte
        return bytes(space[: self.cut])


@st.composite
def links(draw: st.DrawFn) -> dict[str, str]:
    """What the kernel says of a link, or a part of it."""
    names = (
        st.sampled_from(("max_link_width", "current_link_width")),
        st.sampled_from(("max_link_speed", "current_link_speed")),
    )
    widths = draw(st.dictionaries(names[0], st.sampled_from(WIDTHS)))
    return widths | draw(st.dictionaries(names[1], st.sampled_from(SPEEDS)))


@st.composite
def bridges(draw: st.DrawFn) -> Spoil:
    """What is odd about a bridge: its port type (mostly the one that fits its place), access control, subsystem (those of a
    part of two levels, too), link, single bytes, the length of what may be read, other attributes.
    """
    wrong = draw(st.sampled_from((0, 0, 0, 0, 0, 3)))
    return Spoil(
        port=draw(st.sampled_from((*[FITS] * 9, None, 0, 7, 9))),
        part=draw(st.sampled_from(PARTS)),
        access=draw(st.sampled_from((None, 0x00, 0x00, 0x1D, 0x20, 0xFFFF))),
        extended=draw(st.sampled_from((True, True, True, False))),
        flips=draw(st.lists(st.tuples(st.integers(0, 0x160), st.integers(0, 255)), max_size=wrong)),
        cut=draw(st.sampled_from((*[None] * 12, 0, 63, 64, 256))),
        attributes={**draw(links()), **draw(SPOILED)},
    )


@st.composite
def endpoints(draw: st.DrawFn) -> object:
    """Kind, function number, NUMA node, other attributes, some of them wrong, driver, whether it is a virtual function."""
    told: dict[str, str | bytes | None] = {**draw(links()), "vpd": draw(st.sampled_from((None, *CARDS)))}
    return (
        draw(st.integers(0, len(KINDS) - 1)),
        draw(st.sampled_from((0, 0, 0, 1, 7))),
        draw(st.integers(-1, 1)),
        {**told, **draw(SPOILED)},
        draw(st.sampled_from(("nvidia", "nvidia", "vfio-pci", "nouveau", "mlx5_core", None))),
        draw(st.sampled_from((False, False, False, True))),
    )


BRANCH: st.SearchStrategy[object] = st.recursive(
    endpoints(), lambda below: st.tuples(bridges(), st.lists(below, min_size=1, max_size=3)), max_leaves=6
)


def behind(*levels: st.SearchStrategy[list[object]]) -> st.SearchStrategy[object]:
    """A root port, and below it a switch for each of `levels`, one below the other: what is behind its ports."""
    switch: st.SearchStrategy[list[object]] = st.just([])
    for level in reversed(levels):
        things = st.tuples(switch, level).map(lambda both: [*both[0], *both[1]])
        ports = things.flatmap(lambda each: st.tuples(*(st.tuples(bridges(), st.just([thing])) for thing in each)))
        switch = st.tuples(bridges(), ports).map(lambda whole: [whole])
    return st.tuples(bridges(), switch)


FEW: st.SearchStrategy[list[object]] = st.lists(endpoints(), min_size=1, max_size=2)
BRANCHES = st.one_of(BRANCH, behind(FEW), behind(FEW, FEW))
ROOTS = st.sampled_from(
    ("pci{d}:00", "pci{d}:00", "pci{d}:00/{d}:00:0e.0/pci1{d}:e0", "platform/pci{d}:00", "VMBUS:00/pci{d}:80")
)
MACHINES = st.lists(st.tuples(ROOTS, st.lists(BRANCHES, max_size=2)), max_size=2)


class Planter:
    """Puts a generated machine into a tree; buses are numbered as they come."""

    def __init__(self, tree: pcitree.Tree) -> None:
        self.tree = tree
        self.bus = 0
        self.gpus: list[str] = []

    def plant(self, path: str, domain: str, device: int, node: object, fitting: int = pcitree.ROOT) -> None:
        self.bus += 1
        assert isinstance(node, tuple)
        if len(node) == 2:
            spoil, below = node
            place = f"{path}/{domain}:{self.bus:02x}:{device:02x}.0"
            told = {**pcitree.BRIDGE, "config": spoil.config(fitting), **spoil.attributes}
            self.tree.function(place, driver=None, **told)
            following = pcitree.DOWNSTREAM if fitting == pcitree.UPSTREAM else pcitree.UPSTREAM
            for index, child in enumerate(below):
                self.plant(place, domain, index, child, following)
            return
        kind, function, numa, told, driver, virtual = node
        name = f"{domain}:{self.bus:02x}:{device:02x}.{function}"
        self.tree.function(f"{path}/{name}", driver=driver, **{**KINDS[kind], "numa_node": str(numa), **told})
        if virtual:
            self.tree.link(
                f"sys/devices/{path}/{name}/physfn", f"devices/{path}/{domain}:{self.bus:02x}:{device:02x}.0"
            )
        if KINDS[kind] is pcitree.GPU:
            self.gpus.append(name)


@given(MACHINES)
@settings(max_examples=30, deadline=None)
def test_any_tree_is_a_sound_snapshot(machines: list[tuple[str, list[object]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = pcitree.Tree(Path(directory))
        tree.cpus("0-1", "2-3")
        tree.write("proc/meminfo", "MemTotal: 4 kB\nMemFree: 1 kB")
        planter = Planter(tree)
        for number, (root, branches) in enumerate(machines):
            host_bridge = root.format(d=f"000{number}")
            domain = f"1000{number}" if "pci1" in root else f"000{number}"
            for device, branch in enumerate(branches):
                planter.plant(host_bridge, domain, device, branch)
        fakes = [
            FakeGpu(
                bus_id=f"{where.domain:08X}:{where.bus:02X}:{where.device:02X}.{where.function:X}",
                uuid=f"GPU-{index}".encode(),
                minor=index,
                links=(FakeLink(active=index % 2), FakeLink()),
            )
            for index, where in enumerate(map(parse, planter.gpus))
        ]
        machine = probe.Machine(
            files=tree.files(),
            dev=tree.dev,
            library=FakeLibrary(*fakes),
            origin=model.Origin.RECORDING,
            options=ProbeOptions(),
            clock=lambda: 0.0,
        )
        snapshot = machine.probe()
        assert check.violations(snapshot) == ()
        assert codec.from_json(json.loads(json.dumps(codec.to_json(snapshot)))) == snapshot
        assert machine.probe() == snapshot
        scanned = machine.rescan()
        assert [(reading.address, reading.state) for reading in scanned.gpus if snapshot.gpu(reading.address)] == [
            (gpu.address, gpu.state) for gpu in snapshot.gpus
        ]
        assert list(invented(snapshot, tree)) == []
        assert list(lopsided(snapshot)) == []


def invented(snapshot: model.Snapshot, tree: pcitree.Tree) -> Iterator[str]:
    """Facts of a Snapshot that its tree does not hold."""
    bridges = {bridge.pci.address: bridge for bridge in snapshot.bridges}
    for pci in (*check.functions(snapshot), *(bridge.pci for bridge in snapshot.bridges)):
        place = tree.sys / "bus/pci/devices" / str(pci.address)

        def text(name: str, place: Path = place) -> str:
            file = place / name
            return file.read_bytes().decode(errors="replace").strip() if file.is_file() else ""

        if pci.numa_node is not None and str(pci.numa_node) != text("numa_node"):
            yield f"{pci.address}: NUMA node {pci.numa_node}"
        if pci.driver is not None and (place / "driver").readlink().name != pci.driver:
            yield f"{pci.address}: driver {pci.driver}"
        if pci.host_bridge is not None and f"/{pci.host_bridge}/" not in str(place.resolve()):
            yield f"{pci.address}: host bridge {pci.host_bridge}"
        link = pci.link or model.PcieLink()
        for name, told in (("max_link_width", link.max_width), ("current_link_width", link.current_width)):
            if told is not None and str(told) != text(name):
                yield f"{pci.address}: {name} {told}"
        for name, speed in (("max_link_speed", link.max_speed_gts), ("current_link_speed", link.current_speed_gts)):
            if speed is not None and speed != float(text(name).partition(" ")[0]):
                yield f"{pci.address}: {name} {speed}"
        for upstream in pci.switches:
            if upstream not in pci.bridges or bridges[upstream].port_type is not model.PortType.UPSTREAM:
                yield f"{pci.address}: switch {upstream}"
        if pci.narrowest is not None:
            ends = [bridges[pci.narrowest.at].pci if pci.narrowest.at in bridges else pci]
            ends += [bridges[above].pci for above in ends[0].bridges[-1:]]
            if pci.narrowest.width not in {end.link.current_width for end in ends if end.link is not None}:
                yield f"{pci.address}: narrowest {pci.narrowest}"
    for bridge in snapshot.bridges:
        config = tree.sys / "bus/pci/devices" / str(bridge.pci.address) / "config"
        content = config.read_bytes() if config.is_file() else b""
        if bridge.redirects and b"\x0d\x00" not in content[0x100:]:
            yield f"{bridge.pci.address}: redirects without access control"
        if (
            bridge.redirects is not None
            and len(content) < 0x104
            and content[6:7] != b"\0"
            and bridge.port_type is not None
        ):
            yield f"{bridge.pci.address}: access control that is not to be seen"
    for nic in snapshot.nics:
        if nic.data_direct is not None:
            seen = [
                (tree.sys / "bus/pci/devices" / str(where) / "vpd").read_bytes()
                for where in (nic.address, nic.data_direct.address)
            ]
            if (
                not all(one in CARDS for one in seen)
                or CARDS[-1] in seen
                or len({one in CARDS[1:3] for one in seen}) > 1
            ):
                yield f"{nic.address}: Data Direct function {nic.data_direct.address}"


def lopsided(snapshot: model.Snapshot) -> Iterator[str]:
    """Pairs of devices whose path depends on who asks."""
    bridges = {bridge.pci.address: bridge for bridge in snapshot.bridges}
    ports = topology.port_types(snapshot.bridges)
    for a, b in itertools.combinations(check.functions(snapshot), 2):
        if topology.path_class(a, b, ports) is not topology.path_class(b, a, ports):
            yield f"{a.address} - {b.address}: path class"
        if peering.direct(a, b, bridges) is not peering.direct(b, a, bridges):
            yield f"{a.address} - {b.address}: direct"
