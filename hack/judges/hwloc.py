# SPDX-License-Identifier: Apache-2.0
"""hwloc as the judge of the probe: both look at the same tree and must see the same machine.

`lstopo` reads the PCI tree, the NUMA nodes and the CPUs by itself: its discovery through sysfs alone (the components `linux`
and `linuxio`; others would ask this machine's buses and libraries), below another root where it is told one. Its PCI tree
comes from the bus numbers in configuration spaces, the probe's from paths, so the two do not fail alike. Compared is what
both know:

- every function of the Snapshot, bridges included: there, and below the same bridges
- where the NUMA node of a function is known: the CPUs of the place where hwloc hangs its host bridge
- NUMA nodes: which there are, CPUs, memory, distances; which of them are the memory of which GPU
- sockets and online CPUs
- what the PCIe link of a function carries

Differences that are hwloc's own, and left out: it knows no PCI domain above ffff (Debian builds it without), and gives a NUMA
node without CPUs, and the functions of such a node, the CPUs of others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from discovery import model, options, probe, sysfs
from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import library, render, zoo
from hack.judges import hwloc_xml, made_up
from hack.tools import hwloc as tool
from hack.tools.errors import ToolError

DEADLINE_S = 120.0
MADE_UP = 24
SHOWN = 20
"""Differences of one machine that are printed."""

_ENVIRONMENT = {
    "HWLOC_COMPONENTS": "linux,linuxio,stop",
    "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
    "LC_ALL": "C",
}
_LAST_DOMAIN = 0xFFFF
_THIS_MACHINE = "this machine"
_MADE_UP = "made-up-"


class JudgeError(Exception):
    """hwloc gave no verdict."""


def main(argv: Sequence[str]) -> int:
    """Judges this machine, every machine of the zoo and some that are made up, or those that are named. 0: hwloc agrees, 1: it
    does not.
    """
    parser = argparse.ArgumentParser(prog="hack/oracle hwloc", description="Compare the probe with hwloc.")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help="a machine of the zoo, or a file with one")
    parser.add_argument("--made-up", type=int, default=MADE_UP, metavar="N", help=f"machines to make up ({MADE_UP})")
    asked = parser.parse_args(argv)
    names = asked.machines or [_THIS_MACHINE, *zoo.names(), *(f"{_MADE_UP}{seed}" for seed in range(asked.made_up))]
    try:
        lstopo = tool.lstopo()
        found = 0
        for name in names:
            snapshot, seen = _look(name, lstopo)
            different = list(differences(snapshot, seen))
            found += len(different)
            count = sum(1 for _ in _functions_of(snapshot))
            print(f"{name}: {count} PCI functions, {len(snapshot.numa_nodes)} NUMA nodes: {_verdict(different)}")
            for sentence in different[:SHOWN]:
                print(f"  {sentence}")
    except (JudgeError, ToolError, DocumentError) as err:
        print(err, file=sys.stderr)
        return 1
    return 1 if found else 0


def _verdict(different: Sequence[str]) -> str:
    return f"{len(different)} differences" if different else "hwloc agrees"


def _look(name: str, lstopo: tool.Lstopo) -> tuple[model.Snapshot, hwloc_xml.Topology]:
    """One machine, seen by both."""
    if name == _THIS_MACHINE:
        return _probe(None), ask(lstopo, None)
    with tempfile.TemporaryDirectory(prefix="nearfield-judge-") as directory:
        machine = name
        if name.startswith(_MADE_UP):
            machine = f"{directory}/{name}.yaml"
            Path(machine).write_text(made_up.document(int(name.removeprefix(_MADE_UP))), encoding="utf-8")
        tree = render.render(zoo.load(machine), Path(directory) / "machine")
        return _probe(tree.directory), ask(lstopo, tree.directory)


def _probe(root: Path | None) -> model.Snapshot:
    machine = probe.Machine(
        files=sysfs.Sysfs() if root is None else sysfs.Sysfs(sys=root / "sys", proc=root / "proc"),
        dev=Path("/dev") if root is None else root / "dev",
        library=None if root is None else library.load_library(root),
        origin=model.Origin.THIS_NODE if root is None else model.Origin.RECORDING,
        options=options.ProbeOptions(),
        clock=lambda: 0.0,
    )
    try:
        return machine.probe()
    finally:
        machine.close()


def ask(lstopo: tool.Lstopo, root: Path | None) -> hwloc_xml.Topology:
    """What hwloc sees below a root, or on this machine. Raises JudgeError."""
    environment = {**os.environ, **lstopo.environment, **_ENVIRONMENT}
    if root is not None:
        environment["HWLOC_FSROOT"] = str(root)
    command = (lstopo.command, "--of", "xml", "--whole-io", "--disallowed")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise JudgeError(f"{lstopo.command}: {err}") from err
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise JudgeError(f"{' '.join(command)} ended with {done.returncode}: {said[-400:]}")
    try:
        return hwloc_xml.parse(done.stdout)
    except hwloc_xml.FormatError as err:
        raise JudgeError(f"{lstopo.command}: {err}") from err


def differences(snapshot: model.Snapshot, seen: hwloc_xml.Topology) -> Iterator[str]:
    """What the Snapshot says otherwise than hwloc, one sentence each."""
    yield from _host_differences(snapshot, seen)
    known = set()
    for pci in _functions_of(snapshot):
        if pci.address.domain > _LAST_DOMAIN:
            continue
        known.add(pci.address)
        place = seen.functions.get(pci.address)
        if place is None:
            yield f"{pci.address}: hwloc does not see it"
            continue
        if place.bridges != pci.bridges:
            yield f"{pci.address}: below {_spelt(pci.bridges)}, by hwloc below {_spelt(place.bridges)}"
        if pci.cpus and frozenset(pci.cpus) != place.cpus:
            yield f"{pci.address}: near CPUs {sorted(pci.cpus)}, by hwloc {sorted(place.cpus)}"
        yield from _link_differences(pci, place.link_gbytes)
    for where in sorted(_bridges_above(known, seen) - known):
        yield f"{where}: hwloc sees a bridge there"


def _bridges_above(known: Iterable[PciAddress], seen: hwloc_xml.Topology) -> set[PciAddress]:
    return {bridge for where in known if where in seen.functions for bridge in seen.functions[where].bridges}


def _host_differences(snapshot: model.Snapshot, seen: hwloc_xml.Topology) -> Iterator[str]:
    online = frozenset(snapshot.host.online_cpus)
    if online != seen.cpus:
        yield f"CPUs {sorted(online)}, by hwloc {sorted(seen.cpus)}"
    sockets = {package: frozenset(cpus) for package, cpus in snapshot.host.sockets.items()}
    if sockets != seen.sockets:
        yield f"sockets {_summary(sockets)}, by hwloc {_summary(seen.sockets)}"
    nodes = {node.node: node for node in snapshot.numa_nodes}
    if nodes.keys() != seen.nodes.keys():
        yield f"NUMA nodes {sorted(nodes)}, by hwloc {sorted(seen.nodes)}"
    memory_of = {gpu.memory_numa_node: gpu.address for gpu in snapshot.gpus if gpu.memory_numa_node is not None}
    for number in sorted(nodes.keys() & seen.nodes.keys()):
        node, other = nodes[number], seen.nodes[number]
        if node.cpus and frozenset(node.cpus) != other.cpus:  # hwloc gives a node without CPUs those that are near
            yield f"NUMA node {number}: CPUs {list(node.cpus)}, by hwloc {sorted(other.cpus)}"
        if (node.memory_bytes or 0) != other.memory_bytes:
            yield f"NUMA node {number}: {node.memory_bytes} bytes, by hwloc {other.memory_bytes}"
        if memory_of.get(number) != other.gpu:
            yield f"NUMA node {number}: memory of GPU {memory_of.get(number)}, by hwloc of {other.gpu}"
    told = {(node.node, other): distance for node in nodes.values() for other, distance in node.distances.items()}
    for pair in sorted(seen.distances.keys() | (told.keys() if seen.distances else set())):
        if told.get(pair) != seen.distances.get(pair):
            yield f"NUMA distance {pair}: {told.get(pair)}, by hwloc {seen.distances.get(pair)}"


def _link_differences(pci: model.PciFunction, gbytes: float | None) -> Iterator[str]:
    """Of a function whose link both know; hwloc computes gigabytes a second from width and speed."""
    link = pci.link
    if not gbytes or link is None or link.current_width is None or link.current_speed_gts is None:
        return
    speed = link.current_speed_gts
    carried = link.current_width * speed * _share_of_data(speed) / 8
    if abs(carried - gbytes) > carried * 0.02:
        yield f"{pci.address}: its link carries {carried:.2f} GB/s, by hwloc {gbytes:.2f}"


def _share_of_data(speed_gts: float) -> float:
    """The line codes of PCIe: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, flits above."""
    if speed_gts <= 5.0:
        return 8 / 10
    return 128 / 130 if speed_gts <= 32.0 else 242 / 256


def _functions_of(snapshot: model.Snapshot) -> Iterator[model.PciFunction]:
    yield from (bridge.pci for bridge in snapshot.bridges)
    yield from (gpu.pci for gpu in snapshot.gpus)
    yield from snapshot.nvswitches
    yield from (nic.pci for nic in snapshot.nics)
    yield from (nic.data_direct for nic in snapshot.nics if nic.data_direct is not None)
    yield from (nvme.pci for nvme in snapshot.nvmes)


def _spelt(bridges: Iterable[PciAddress]) -> str:
    return " ".join(map(str, bridges)) or "the host bridge"


def _summary(sockets: Mapping[int, frozenset[int]]) -> str:
    return str({package: len(cpus) for package, cpus in sockets.items()})
