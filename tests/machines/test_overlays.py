# SPDX-License-Identifier: Apache-2.0
"""Overlays on the machines of the zoo, through the whole probe.

- every machine is written as a NCCL topology that keeps NCCL's rules; read back, it agrees with the machine
- with everything hidden as a virtual machine hides it, the file that was written brings back paths, switches and NUMA nodes
- a file in the shape of Azure's gives a cloud VM its numaNode, pcieSwitch, pairs, quads and NICs, and its order of devices
- a file in the shape of AWS's agrees with a VM that shows its switches; one for another machine is refused
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import (
    findings,
    model,
    nccltopo,
    ncclxml,
    options,
    overlaid,
    overlay,
    overlayfile,
    probe,
    sysfs,
    topology,
)
from discovery.address import HostBridge, PciAddress, parse
from discovery.mock import library, render, zoo
from discovery.model import PathClass, Provenance
from driver.publish import devices
from tests.fakes import nccl_rules

ALL = pytest.mark.parametrize("name", zoo.names())


def look(directory: Path, name: str, text: str) -> model.Snapshot:
    """What the prober sees of a machine, given a file."""
    path = directory / "overlay"
    path.write_text(text, encoding="utf-8")
    tree = render.render(zoo.load(name), directory / "machine")
    machine = probe.Machine(
        files=sysfs.Sysfs(sys=tree.sys, proc=tree.proc),
        dev=tree.dev,
        library=library.Library(tree.directory),
        origin=model.Origin.RECORDING,
        options=options.ProbeOptions(overlay=overlayfile.read(path)),
        clock=lambda: 0.0,
    )
    try:
        return machine.probe()
    finally:
        machine.close()


def applied(snapshot: model.Snapshot, text: str) -> tuple[model.Snapshot, tuple[model.Finding, ...]]:
    found = findings.Findings()
    document = overlay.Overlay(file="t.xml", machines=(ncclxml.parse(text.encode(), name="t.xml"),))
    return overlaid.apply(snapshot, document, found).snapshot, found.result()


@ALL
def test_a_machine_is_written_by_nccl_s_rules_and_agrees_with_itself(
    name: str, seen: Mapping[str, model.Snapshot]
) -> None:
    snapshot = seen[name]
    text = nccltopo.build(snapshot)
    assert text == nccltopo.build(replace(snapshot, taken_at=1.0))
    root = nccl_rules.read(text)
    shown = {node.attributes["busid"] for node in root.all() if node.name == "pci"}
    assert {str(gpu.address) for gpu in snapshot.gpus} <= shown
    assert applied(snapshot, text) == (snapshot, ())


def hidden(snapshot: model.Snapshot) -> model.Snapshot:
    """As a virtual machine shows it: every device below a host bridge of its own, and no NUMA node."""

    def alone(pci: model.PciFunction) -> model.PciFunction:
        where = pci.address
        return model.PciFunction(
            address=where,
            vendor_id=pci.vendor_id,
            device_id=pci.device_id,
            class_code=pci.class_code,
            host_bridge=HostBridge(f"pci{where.domain << 8 | where.bus:08x}:{where.device:02x}"),
            physical_function=pci.physical_function,
        )

    return replace(
        snapshot,
        bridges=(),
        gpus=tuple(replace(gpu, pci=alone(gpu.pci)) for gpu in snapshot.gpus),
        nics=tuple(replace(nic, pci=alone(nic.pci)) for nic in snapshot.nics),
    )


@ALL
def test_what_was_written_brings_back_what_is_hidden(name: str, seen: Mapping[str, model.Snapshot]) -> None:
    """But for host bridges, which no overlay gives: what met in one now meets in a NUMA node, if it is known."""
    snapshot = seen[name]
    back, found = applied(hidden(snapshot), nccltopo.build(snapshot))
    assert {finding.severity for finding in found} <= {model.Severity.INFO}
    ports = topology.port_types(snapshot.bridges)
    before = topology.endpoints(snapshot.gpus, snapshot.nics, ())
    after = topology.endpoints(back.gpus, back.nics, ())
    assert [pci.numa_node for pci in after] == [pci.numa_node for pci in before]
    for (a, hidden_a), (b, hidden_b) in itertools.combinations(zip(before, after, strict=True), 2):
        expected = topology.path_class(a, b, ports)
        if expected is PathClass.PHB:
            expected = PathClass.NODE if a.numa_node is not None else PathClass.UNKNOWN
        assert topology.path_class(hidden_a, hidden_b, {}) is expected, f"{a.address} {b.address}"


AZURE = {
    0: (24, ("0003", "0103", "0004", "0104")),
    1: (24, ("0001", "0101", "0002", "0102")),
    2: (24, ("000d", "0107", "000e", "0108")),
    3: (24, ("000b", "0105", "000c", "0106")),
}
"""NUMA nodes of Azure's ND A100 v4: CPUs of each, and the PCI domains of GPUs and InfiniBand functions behind its switch."""


def azure(nodes: Mapping[int, tuple[int, tuple[str, ...]]]) -> str:
    lines = ['<system version="1">']
    for node, (count, domains) in nodes.items():
        mask = f"{(1 << count) - 1 << node * count:024x}"
        affinity = ",".join(mask[i : i + 8] for i in range(0, 24, 8))
        lines += [
            f'  <cpu numaid="{node}" affinity="{affinity}" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">',
            f'    <pci busid="ffff:ff:0{node + 1}.0" class="0x060400" link_speed="16 GT/s" link_width="16">',
            *(
                f'      <pci busid="{domain}:00:00.0" class="{"0x020700" if domain > "00ff" else "0x030200"}"/>'
                for domain in domains
            ),
            "    </pci>",
            "  </cpu>",
        ]
    return "\n".join((*lines, "</system>", ""))


def test_azure_s_file_gives_its_vm_everything(tmp_path: Path) -> None:
    snapshot = look(tmp_path, "cloud-vm-a100-8", azure(AZURE))
    offer = devices.build_offer(snapshot, options=devices.PublishOptions(driver_name="d", pcie_switches=True))
    keys = ("resource.kubernetes.io/numaNode", "pcieSwitch", "alignedPair", "alignedQuad", "nic", "nicDistance")
    told = {device.name.removeprefix("gpu-")[:4]: device.attributes for device in offer.devices}
    assert {domain: tuple(attributes.get(key) for key in keys) for domain, attributes in told.items()} == {
        domain: (node, f"{pair}:00:00.0", f"{pair}:00:00.0", f"{quad}:00:00.0", nic, "PIX")
        for domain, node, pair, quad, nic in (
            ("0001", 1, "0001", "0001", "mlx5_ib0"),
            ("0002", 1, "0001", "0001", "mlx5_ib1"),
            ("0003", 0, "0003", "0001", "mlx5_ib2"),
            ("0004", 0, "0003", "0001", "mlx5_ib3"),
            ("000b", 3, "000b", "000b", "mlx5_ib4"),
            ("000c", 3, "000b", "000b", "mlx5_ib5"),
            ("000d", 2, "000d", "000b", "mlx5_ib6"),
            ("000e", 2, "000d", "000b", "mlx5_ib7"),
        )
    }
    for attributes in told.values():
        assert "resource.kubernetes.io/pcieRoot" not in attributes
        assert attributes["pcieSwitches"] == (attributes["pcieSwitch"],)
    order = [device.name[4:8] for device in offer.devices]
    for size in (2, 4):
        groups = [set(order[i : i + size]) for i in range(0, 8, size)]
        key = "alignedPair" if size == 2 else "alignedQuad"
        assert all(len({told[domain][key] for domain in group}) == 1 for group in groups)
    assert {gpu.pci.numa_source for gpu in snapshot.gpus} == {Provenance.OVERLAY}
    codes = [finding.code for finding in snapshot.findings if finding.code != "numa-unknown"]
    assert codes == [*["numa-from-overlay"] * 4, "switch-from-overlay"]
    assert "GPU" not in " ".join(finding.message for finding in snapshot.findings if finding.code == "numa-unknown")


def test_a_file_for_another_size_of_machine_is_refused(tmp_path: Path) -> None:
    """A file of a machine with more NUMA nodes, with the same addresses in part."""
    snapshot = look(tmp_path, "cloud-vm-a100-8", azure({7: (1, ("0001", "0101")), 0: (24, ("0002", "0102"))}))
    errors = [finding for finding in snapshot.findings if finding.severity is model.Severity.ERROR]
    assert [(finding.code, finding.subject) for finding in errors] == [("overlay-refused", f"{tmp_path}/overlay:2")]
    assert "there is no NUMA node 7 on this machine, but 0, 1, 2, 3" in errors[0].message
    assert {gpu.pci.numa_node for gpu in snapshot.gpus} == {None}


GPU_BUSES = (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)


def aws(*, shift: int = 0) -> str:
    """A switch for each GPU, named by an address of something else; its four network functions stand below the GPU's bus."""
    lines = ['<system version="1">']
    for node in (0, 1):
        lines.append(f'<cpu numaid="{node}">')
        for index, bus in list(enumerate(GPU_BUSES))[node * 4 : node * 4 + 4]:
            lines += [
                f'<pci busid="0000:{index:02x}:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">',
                f'<pci busid="0000:{bus + shift:02x}:00.0" class="0x030200"><gpu dev="{index}" sm="90" rank="{index}" gdr="1"/></pci>',
                *(
                    f'<pci busid="0000:{bus - 4 + i - shift:02x}:00.0" class="0x020000"><nic><net name="n{index}-{i}" dev="{i}"'
                    f' speed="100000" port="1" latency="0.0" guid="{i}" maxconn="1024" gdr="1"/></nic></pci>'
                    for i in range(4)
                ),
                "</pci>",
            ]
        lines.append("</cpu>")
    return "\n".join((*lines, "</system>", ""))


def test_aws_s_shape_agrees_with_a_vm_that_shows_its_switches(
    tmp_path: Path, seen: Mapping[str, model.Snapshot]
) -> None:
    name = "cloud-vm-h100-8-efa"
    assert look(tmp_path, name, aws()) == seen[name]


def test_gpus_at_the_addresses_of_network_functions_are_refused(
    tmp_path: Path, seen: Mapping[str, model.Snapshot]
) -> None:
    name = "cloud-vm-h100-8-efa"
    snapshot = look(tmp_path, name, aws(shift=-4))
    assert replace(snapshot, findings=()) == replace(seen[name], findings=())
    refused = [finding.message for finding in snapshot.findings if finding.code == "overlay-refused"]
    assert any(message.startswith("0000:4f:00.0 is of class 0x03 here and class 0x02 on") for message in refused)


FLEET = """\
apiVersion: config.nearfield.dev/v1alpha1
kind: TopologyOverlay
machines:
- match: {vendor: Amazon EC2, product: p5.48xlarge}
  rails: [{nic: 0000:4f:00.0, rail: 9}]
- match: {vendor: Microsoft Corporation, gpu: 10de:20b0}
  numaNodes: [{node: 1, devices: [0001:00:00.0, 0101:00:00.0]}]
"""


def test_one_file_serves_a_fleet(tmp_path: Path) -> None:
    for name in ("cloud-vm-h100-8-efa", "cloud-vm-a100-8", "cloud-vm-t4"):
        directory = tmp_path / name
        directory.mkdir()
        snapshot = look(directory, name, FLEET)
        rails = {nic.address: nic.rail for nic in snapshot.nics if nic.rail_source is Provenance.OVERLAY}
        nodes = [gpu.pci.numa_node for gpu in snapshot.gpus if gpu.pci.numa_source is Provenance.OVERLAY]
        codes = {finding.code for finding in snapshot.findings if "overlay" in finding.code}
        match name:
            case "cloud-vm-h100-8-efa":
                assert (rails, nodes, codes) == ({parse("0000:4f:00.0"): 9}, [], set())
            case "cloud-vm-a100-8":
                assert (rails, nodes, codes) == ({}, [1], {"numa-from-overlay"})
            case _:
                assert (rails, nodes, codes) == ({}, [], {"overlay-not-for-this-machine"})


def test_addresses_are_those_of_the_machine_whatever_the_overlay_says(tmp_path: Path) -> None:
    plain = PciAddress(1, 0, 0, 0)
    gpu = look(tmp_path, "cloud-vm-a100-8", azure(AZURE)).gpu(plain)
    assert gpu is not None
    assert (gpu.pci.host_bridge, gpu.pci.pcie_root, gpu.pci.bridges) == ("pci0001:00", None, ())
