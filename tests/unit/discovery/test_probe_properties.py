# SPDX-License-Identifier: Apache-2.0
"""Any PCI tree, with functions, domains and switches as it likes, attributes missing and bytes wrong, gives a Snapshot that
passes `check`, survives the codec, and is the same when read again; never an exception, never a value nobody told.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import check, codec, model, probe
from discovery.address import parse
from discovery.options import ProbeOptions
from tests.fakes import pcitree
from tests.fakes.nvmllib import FakeGpu, FakeLibrary, FakeLink

KINDS = (pcitree.GPU, pcitree.NIC, pcitree.NVME, {**pcitree.GPU, "class": "0x068000"})
RUBBISH = st.sampled_from(
    (None, b"", b"\xff\xfe", b"0x", b"-1", b"-7", b"99999999999", b"0x0", b"0-99999999", b"Unknown", b"x" * 5000)
)
ATTRIBUTES = (
    "vendor", "device", "class", "subsystem_vendor", "subsystem_device", "numa_node", "local_cpulist", "max_link_width",
    "current_link_width", "max_link_speed", "current_link_speed", "config",
)  # fmt: skip
SPOILED = st.dictionaries(st.sampled_from(ATTRIBUTES), RUBBISH, max_size=3)
PORTS = st.sampled_from((None, 0, 4, 5, 6, 7, 9))


@st.composite
def endpoints(draw: st.DrawFn) -> tuple[int, int, int, dict[str, bytes | None], str | None]:
    """Kind, function number, NUMA node, attributes that are wrong, driver."""
    return (
        draw(st.integers(0, len(KINDS) - 1)),
        draw(st.sampled_from((0, 0, 0, 1, 7))),
        draw(st.integers(-1, 1)),
        draw(SPOILED),
        draw(st.sampled_from(("nvidia", "nvidia", "vfio-pci", "mlx5_core", None))),
    )


BRANCH: st.SearchStrategy[object] = st.recursive(
    endpoints(), lambda below: st.tuples(PORTS, SPOILED, st.lists(below, max_size=3)), max_leaves=6
)
MACHINES = st.lists(
    st.tuples(st.sampled_from(("pci{d}:00", "pci{d}:00/{d}:00:0e.0/pci1{d}:e0", "platform/pci{d}:00", "VMBUS:00/pci{d}:80")), st.lists(BRANCH, max_size=3)),
    max_size=3,
)  # fmt: skip


class Planter:
    """Puts a generated machine into a tree; buses are numbered as they come."""

    def __init__(self, tree: pcitree.Tree) -> None:
        self.tree = tree
        self.bus = 0
        self.gpus: list[str] = []

    def plant(self, path: str, domain: str, device: int, node: object) -> None:
        self.bus += 1
        assert isinstance(node, tuple)
        if len(node) == 3:
            port, spoiled, below = node
            place = f"{path}/{domain}:{self.bus:02x}:{device:02x}.0"
            told: dict[str, str | bytes | None] = {**pcitree.BRIDGE, "config": pcitree.config(port), **spoiled}
            self.tree.function(place, driver=None, **told)
            for index, child in enumerate(below):
                self.plant(place, domain, index, child)
            return
        kind, function, numa, spoiled, driver = node
        name = f"{domain}:{self.bus:02x}:{device:02x}.{function}"
        told = {**KINDS[kind], "numa_node": str(numa), **spoiled}
        self.tree.function(f"{path}/{name}", driver=driver, **told)
        if KINDS[kind] is pcitree.GPU:
            self.gpus.append(name)


@given(MACHINES)
@settings(max_examples=35, deadline=None)
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
        for function in check.functions(snapshot):
            told = tree.sys / "bus/pci/devices" / str(function.address) / "numa_node"
            assert function.numa_node is None or str(function.numa_node) == told.read_text().strip()
