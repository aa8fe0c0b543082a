# SPDX-License-Identifier: Apache-2.0
"""A small machine for tests of the mock: two GPUs with four NVLinks between them and a NIC below one PCIe switch, an NVMe
on the other socket. `parsed` takes changes of single lines; `rendered` puts a machine on disk, `probed` looks at one.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from discovery import document, model, options, probe, sysfs
from discovery.address import PciAddress, parse
from discovery.mock import library, recording, render, zoo
from driver import inventory
from driver.prepare.index import InventoryIndex
from driver.sharing import rules

GPU0 = parse("0000:18:00.0")
GPU1 = parse("0000:19:00.0")
NIC = parse("0000:1a:00.0")
NVME = parse("0000:81:00.0")

TEXT = """\
apiVersion: mock.nearfield.dev/v1alpha1
kind: Machine
name: small
description: Two GPUs and a NIC below one switch
host: {vendor: Example, product: Small, cpu: Example CPU, threads: 2, rootPort: intel-sapphire-rapids-root-port}
driver: {version: 580.95.05, cuda: "13.0"}
numa:
  nodes:
    - {node: 0, socket: 0, cpus: "0-1,4-5", memory: 64GiB}
    - {node: 1, socket: 1, cpus: "2-3,6-7", memory: 64GiB}
  distances: [[10, 21], [21, 10]]
pci:
  - root: "0000:15"
    numa: 0
    ports:
      - switch: broadcom-pex890xx
        ports: [{gpu: nvidia-h100-sxm5-80gb}, {gpu: nvidia-h100-sxm5-80gb}, {nic: connectx-7-400g-ib}]
  - root: "0000:80"
    numa: 1
    ports: [{nvme: samsung-pm9a3}]
nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}
"""


@functools.cache
def parsed(*changes: tuple[str, str], text: str = TEXT) -> recording.Recording:
    """The Recording of the machine, with parts of its text replaced."""
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return zoo.parse_machine(document.parse(text.encode(), name="small.yaml"))


def rendered(directory: Path, *changes: tuple[str, str]) -> render.MockTree:
    """The machine on disk."""
    return render.render(parsed(*changes), directory)


def rendered_without_files(directory: Path) -> render.MockTree:
    """The machine on disk, with little more than the state behind NVML."""
    machine = parsed()
    links = {path: entry for path, entry in machine.files.items() if path.startswith("sys/bus/pci/devices/")}
    return render.render(dataclasses.replace(machine, files=links), directory)


def probed(tree: render.MockTree) -> model.Snapshot:
    """What the prober sees of a machine on disk."""
    return probe.probe(
        sysfs=sysfs.Sysfs(sys=tree.sys, proc=tree.proc),
        dev=tree.dev,
        library=library.Library(tree.directory),
        origin=model.Origin.RECORDING,
        options=options.ProbeOptions(),
        clock=lambda: 0.0,
    )


def source(directory: Path) -> options.Source:
    """Where its probe and its workers look."""
    return options.Source.rendered(directory)


def index(directory: Path) -> InventoryIndex:
    """Its devices, all GPUs being divided at need, as they are now."""
    snapshot = probe.probe(
        sysfs=sysfs.Sysfs(sys=directory / "sys", proc=directory / "proc"),
        dev=directory / "dev",
        library=library.Library(directory),
        origin=model.Origin.RECORDING,
        options=options.ProbeOptions(),
        clock=lambda: 0.0,
    )
    known = inventory.InventoryState(snapshot=snapshot)
    policies = {gpu.address: rules.Policy(mode=rules.Mode.MIG_DYNAMIC) for gpu in snapshot.gpus}
    return InventoryIndex(lambda: known, look_again=lambda: None, policies=lambda _: policies)


def directory_of(tree: render.MockTree, pci: PciAddress) -> Path:
    """The directory of a PCI function in a rendered machine."""
    return (tree.sys / "bus/pci/devices" / str(pci)).resolve()


def snapshot_of_files(directory: Path) -> dict[str, bytes | str]:
    """Every file and link of a rendered machine's trees with its content, but for what the driver shows of MIG, which is not in
    the Recording.
    """
    found: dict[str, bytes | str] = {}
    for root in ("sys", "proc", "dev"):
        for path in sorted((directory / root).rglob("*")):
            name = str(path.relative_to(directory))
            if name == "proc/driver/nvidia-caps/mig-minors":
                continue
            if path.is_symlink():
                found[name] = str(path.readlink())
            elif path.is_file():
                found[name] = path.read_bytes()
    return found
