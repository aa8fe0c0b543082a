# SPDX-License-Identifier: Apache-2.0
"""The judge that compares the probe with hwloc: reading hwloc's XML, and noticing every kind of difference.

Whether the two agree on a machine is what `hack/oracle hwloc` finds out with the real program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from discovery.address import HostBridge, parse
from hack.judges import hwloc, hwloc_xml
from hack.tools.hwloc import Lstopo

PORT, GPU = parse("0000:15:01.0"), parse("0000:1b:00.0")

XML = b"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" complete_cpuset="0x0000000f">
    <object type="Package" os_index="0" complete_cpuset="0x00000003">
      <object type="NUMANode" os_index="0" complete_cpuset="0x00000003" local_memory="1048576"/>
      <object type="NUMANode" os_index="2" complete_cpuset="0x00000003" subtype="GPUMemory" local_memory="4096">
        <info name="PCIBusID" value="0000:1b:00.0"/>
      </object>
      <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[15-1b]">
        <object type="Bridge" bridge_type="1-1" pci_busid="0000:15:01.0" pci_link_speed="0.000000">
          <object type="PCIDev" pci_busid="0000:1b:00.0" pci_link_speed="63.015385"/>
        </object>
      </object>
    </object>
    <object type="Package" os_index="1" complete_cpuset="0x0000000c">
      <object type="NUMANode" os_index="1" complete_cpuset="0x0000000c" local_memory="1048576"/>
    </object>
  </object>
  <distances2 type="NUMANode" nbobjs="3" name="NUMALatency" indexing="os">
    <indexes length="6">0 1 2 </indexes>
    <u64values length="9">10 21 80 21 10 </u64values>
    <u64values length="9">90 80 90 10 </u64values>
  </distances2>
</topology>
"""


def pci(text: str, **facts: object) -> model.PciFunction:
    known = {
        "vendor_id": 0x10DE,
        "device_id": 1,
        "class_code": 0x30200,
        "host_bridge": HostBridge("pci0000:15"),
        **facts,
    }
    return model.PciFunction(address=parse(text), **known)  # type: ignore[arg-type]


LINK = model.PcieLink(max_width=16, current_width=16, max_speed_gts=32.0, current_speed_gts=32.0)
SNAPSHOT = model.Snapshot(
    origin=model.Origin.RECORDING,
    taken_at=0.0,
    host=model.Host(online_cpus=(0, 1, 2, 3), sockets={0: (0, 1), 1: (2, 3)}),
    numa_nodes=(
        model.NumaNode(node=0, cpus=(0, 1), memory_bytes=1 << 20, distances={0: 10, 1: 21, 2: 80}),
        model.NumaNode(node=1, cpus=(2, 3), memory_bytes=1 << 20, distances={0: 21, 1: 10, 2: 90}),
        model.NumaNode(node=2, cpus=(), memory_bytes=4096, distances={0: 80, 1: 90, 2: 10}),
    ),
    bridges=(model.Bridge(pci=pci("0000:15:01.0")),),
    gpus=(
        model.Gpu(
            pci=pci("0000:1b:00.0", bridges=(PORT,), numa_node=0, cpus=(0, 1), link=LINK),
            state=model.GpuState.READY,
            memory_numa_node=2,
        ),
    ),
)


def gpu(**facts: object) -> model.Snapshot:
    """The machine with other facts of its GPU's function."""
    (own,) = SNAPSHOT.gpus
    return replace(SNAPSHOT, gpus=(replace(own, pci=replace(own.pci, **facts)),))  # type: ignore[arg-type]


def test_what_hwloc_writes_is_read_whole() -> None:
    seen = hwloc_xml.parse(XML)
    assert seen == hwloc_xml.Topology(
        cpus=frozenset({0, 1, 2, 3}),
        functions={
            PORT: hwloc_xml.Place(bridges=(), cpus=frozenset({0, 1}), link_gbytes=0.0),
            GPU: hwloc_xml.Place(bridges=(PORT,), cpus=frozenset({0, 1}), link_gbytes=63.015385),
        },
        nodes={
            0: hwloc_xml.NumaNode(cpus=frozenset({0, 1}), memory_bytes=1 << 20),
            1: hwloc_xml.NumaNode(cpus=frozenset({2, 3}), memory_bytes=1 << 20),
            2: hwloc_xml.NumaNode(cpus=frozenset({0, 1}), memory_bytes=4096, gpu=GPU),
        },
        sockets={0: frozenset({0, 1}), 1: frozenset({2, 3})},
        distances={
            (0, 0): 10,
            (0, 1): 21,
            (0, 2): 80,
            (1, 0): 21,
            (1, 1): 10,
            (1, 2): 90,
            (2, 0): 80,
            (2, 1): 90,
            (2, 2): 10,
        },
    )


def test_the_same_machine_has_no_differences() -> None:
    assert list(hwloc.differences(SNAPSHOT, hwloc_xml.parse(XML))) == []


_CHANGES: dict[str, tuple[Callable[[], model.Snapshot], str]] = {
    "a function hwloc does not see": (lambda: gpu(address=parse("0000:1c:00.0")), "hwloc does not see it"),
    "another parent": (lambda: gpu(bridges=()), "below the host bridge, by hwloc below 0000:15:01.0"),
    "other CPUs": (lambda: gpu(cpus=(2, 3)), "near CPUs [2, 3], by hwloc [0, 1]"),
    "another width": (
        lambda: gpu(link=replace(LINK, current_width=8)),
        "its link carries 31.51 GB/s, by hwloc 63.02",
    ),
    "a bridge the probe has not": (lambda: replace(SNAPSHOT, bridges=()), "0000:15:01.0: hwloc sees a bridge there"),
    "online CPUs": (
        lambda: replace(SNAPSHOT, host=replace(SNAPSHOT.host, online_cpus=(0, 1))),
        "CPUs [0, 1], by hwloc [0, 1, 2, 3]",
    ),
    "sockets": (
        lambda: replace(SNAPSHOT, host=replace(SNAPSHOT.host, sockets={0: (0, 1, 2, 3)})),
        "sockets {0: 4}, by hwloc {0: 2, 1: 2}",
    ),
    "a node too few": (lambda: replace(SNAPSHOT, numa_nodes=SNAPSHOT.numa_nodes[:2]), "NUMA nodes [0, 1], by hwloc"),
    "CPUs of a node": (
        lambda: replace(SNAPSHOT, numa_nodes=(replace(SNAPSHOT.numa_nodes[0], cpus=(0,)), *SNAPSHOT.numa_nodes[1:])),
        "NUMA node 0: CPUs [0], by hwloc [0, 1]",
    ),
    "memory of a node": (
        lambda: replace(
            SNAPSHOT, numa_nodes=(replace(SNAPSHOT.numa_nodes[0], memory_bytes=1), *SNAPSHOT.numa_nodes[1:])
        ),
        "NUMA node 0: 1 bytes, by hwloc 1048576",
    ),
    "a distance": (
        lambda: replace(
            SNAPSHOT,
            numa_nodes=(replace(SNAPSHOT.numa_nodes[0], distances={0: 10, 1: 32, 2: 80}), *SNAPSHOT.numa_nodes[1:]),
        ),
        "NUMA distance (0, 1): 32, by hwloc 21",
    ),
    "whose memory a node is": (
        lambda: replace(SNAPSHOT, gpus=(replace(SNAPSHOT.gpus[0], memory_numa_node=None),)),
        "NUMA node 2: memory of GPU None, by hwloc of 0000:1b:00.0",
    ),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_every_difference_is_said(change: str) -> None:
    make, said = _CHANGES[change]
    different = list(hwloc.differences(make(), hwloc_xml.parse(XML)))
    assert any(said in sentence for sentence in different), different


def test_what_hwloc_cannot_see_is_no_difference() -> None:
    behind_vmd = model.Nvme(pci=pci("10000:01:00.0"))
    assert list(hwloc.differences(replace(SNAPSHOT, nvmes=(behind_vmd,)), hwloc_xml.parse(XML))) == []


@given(st.frozensets(st.integers(0, 300)))
def test_sets_are_read_as_hwloc_spells_them(members: frozenset[int]) -> None:
    value = sum(1 << member for member in members)
    words: list[str] = []
    while value or not words:
        words.append(f"0x{value & 0xFFFFFFFF:08x}" if value & 0xFFFFFFFF else "")
        value >>= 32
    text = ",".join(reversed(words)).encode()
    xml = b'<topology><object type="Machine" complete_cpuset="' + (text or b"0x0") + b'"/></topology>'
    assert hwloc_xml.parse(xml).cpus == members


@pytest.mark.parametrize("xml", [b"", b"<topology/>", b"Segmentation fault"])
def test_what_is_no_topology_is_refused(xml: bytes) -> None:
    with pytest.raises(hwloc_xml.FormatError, match="hwloc"):
        hwloc_xml.parse(xml)


def program(folder: Path, script: str) -> Lstopo:
    """A program in the place of lstopo."""
    file = folder / "lstopo"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return Lstopo(str(file), {"ADDED": "by the tool"})


def test_lstopo_is_asked_about_the_tree_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "answer.xml").write_bytes(XML)
    lstopo = program(tmp_path, f'env > {tmp_path}/env; echo "$@" > {tmp_path}/args; cat {tmp_path}/answer.xml')
    assert hwloc.ask(lstopo, tmp_path / "tree") == hwloc_xml.parse(XML)
    environment = (tmp_path / "env").read_text().splitlines()
    assert {f"HWLOC_FSROOT={tmp_path}/tree", "HWLOC_COMPONENTS=linux,linuxio,stop", "ADDED=by the tool"} <= set(
        environment
    )
    assert (tmp_path / "args").read_text() == "--of xml --whole-io --disallowed\n"


@pytest.mark.parametrize(
    ("script", "said"), [("echo broken >&2; exit 3", "ended with 3: broken"), ("echo '<x'", "cannot be read")]
)
def test_a_judge_that_gives_no_verdict_says_why(tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(hwloc.JudgeError, match=said):
        hwloc.ask(program(tmp_path, script), None)
    with pytest.raises(hwloc.JudgeError, match="No such file"):
        hwloc.ask(Lstopo(str(tmp_path / "none")), None)
