# SPDX-License-Identifier: Apache-2.0
"""Writing a NCCL topology.

- a whole small machine, text for text
- what is not known, or belongs to a job, is left out; hostile names are
- a large machine gets a shorter file, one that NCCL cannot take none
- what is written keeps NCCL's rules, and reads back as the same groups
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from discovery import model, nccltopo, ncclxml, overlay, topology
from discovery.address import HostBridge, PciAddress, parse
from discovery.errors import DocumentError
from discovery.model import Provenance
from tests.fakes import nccl_rules, wiring
from tests.fakes.wiring import at

ROOT, UP, DOWN1, DOWN2 = (parse(f"0000:e{i}:00.0") for i in range(4))
X16 = model.PcieLink(max_width=16, current_width=16, max_speed_gts=32.0, current_speed_gts=2.5)


def bridge(address: PciAddress, port: model.PortType, *above: PciAddress) -> model.Bridge:
    pci = model.PciFunction(
        address=address,
        vendor_id=0x1000,
        device_id=0xC030,
        class_code=0x060400,
        subsystem_vendor_id=0x1000,
        subsystem_device_id=0x100B,
        host_bridge=HostBridge("pci0000:00"),
        bridges=above,
        numa_node=0,
        link=replace(X16, max_speed_gts=16.0),
    )
    return model.Bridge(pci=pci, port_type=port)


BRIDGES = (
    bridge(ROOT, model.PortType.ROOT),
    bridge(UP, model.PortType.UPSTREAM, ROOT),
    bridge(DOWN1, model.PortType.DOWNSTREAM, ROOT, UP),
    bridge(DOWN2, model.PortType.DOWNSTREAM, ROOT, UP),
)


def function(bus: int, *bridges: PciAddress, class_code: int = 0x030200, **more: object) -> model.PciFunction:
    pci = wiring.function(at(bus), bridges=bridges, switches=(UP,) if UP in bridges else ())
    source = Provenance.SYSFS if pci.switches else None
    return replace(pci, class_code=class_code, switch_source=source, link=X16, **more)  # type: ignore[arg-type]


def nic(bus: int, *names: str, pci: model.PciFunction | None = None, ports: int = 1, **more: object) -> model.Nic:
    return model.Nic(
        pci=pci or function(bus, class_code=0x020700),
        rdma_devices=tuple(
            model.RdmaDevice(
                name=name, ports=tuple(model.RdmaPort(port=i + 1, rate_mbps=400_000) for i in range(ports))
            )
            for name in names
        ),
        **more,  # type: ignore[arg-type]
    )


def machine(
    *gpus: model.Gpu, nics: tuple[model.Nic, ...] = (), bridges: tuple[model.Bridge, ...] = ()
) -> model.Snapshot:
    return model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(),
        numa_nodes=(model.NumaNode(node=0, cpus=(0, 1, 40)), model.NumaNode(node=1, cpus=())),
        gpus=gpus,
        nics=nics,
        bridges=bridges,
    )


def test_a_small_machine() -> None:
    links = (
        model.NvLink(link=0, active=True, remote_kind=model.RemoteKind.GPU, remote=at(2)),
        model.NvLink(link=1, active=True, remote_kind=model.RemoteKind.GPU, remote=at(2)),
        model.NvLink(link=2, active=False, remote_kind=model.RemoteKind.GPU, remote=at(2)),
    )
    narrow = replace(X16, current_width=8)
    gpu = replace(
        wiring.gpu(at(1), *links, pci=replace(function(1, ROOT, UP, DOWN1), link=narrow)), compute_capability=(9, 0)
    )
    plain = wiring.gpu(at(2), pci=replace(function(2), numa_node=1, link=None, subsystem_vendor_id=0x10DE))
    network = nic(
        3, "mlx5_0", pci=function(3, ROOT, UP, DOWN2, class_code=0x020700), rail=4, rail_source=Provenance.OVERLAY
    )
    unknown = nic(4, "mlx5_1", pci=replace(function(4, class_code=0x020000), numa_node=None, numa_source=None))
    text = nccltopo.build(machine(gpu, plain, nics=(network, unknown), bridges=BRIDGES))
    identity = 'vendor="0x10de" device="0x2330"'
    assert text == (
        '<system version="1">\n'
        '  <cpu numaid="0" affinity="00000100,00000003">\n'
        '    <pci busid="0000:e1:00.0" class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" '
        'subsystem_device="0x100b" link_speed="16.0 GT/s PCIe" link_width="16">\n'
        f'      <pci busid="0000:01:00.0" class="0x030200" {identity} link_speed="16.0 GT/s PCIe" link_width="8">\n'
        '        <gpu sm="90">\n'
        '          <nvlink target="0000:02:00.0" count="2" tclass="0x030200"/>\n'
        "        </gpu>\n"
        "      </pci>\n"
        f'      <pci busid="0000:03:00.0" class="0x020700" {identity} link_speed="16.0 GT/s PCIe" link_width="16">\n'
        "        <nic>\n"
        '          <net name="mlx5_0" port="1" speed="400000" rail="4"/>\n'
        "        </nic>\n"
        "      </pci>\n"
        "    </pci>\n"
        "  </cpu>\n"
        '  <cpu numaid="1">\n'
        f'    <pci busid="0000:02:00.0" class="0x030200" {identity}/>\n'
        "  </cpu>\n"
        '  <cpu numaid="-1">\n'
        f'    <pci busid="0000:04:00.0" class="0x020000" {identity} link_speed="32.0 GT/s PCIe" link_width="16">\n'
        "      <nic>\n"
        '        <net name="mlx5_1" port="1" speed="400000"/>\n'
        "      </nic>\n"
        "    </pci>\n"
        "  </cpu>\n"
        "</system>\n"
    )
    nccl_rules.read(text)


def nvlinks(*links: model.NvLink) -> list[dict[str, str]]:
    root = nccl_rules.read(nccltopo.build(machine(wiring.gpu(at(1), *links), wiring.gpu(at(2)))))
    return [node.attributes for node in root.all() if node.name == "nvlink"]


def test_nvlinks_end_in_gpus_and_switches_seen_or_not() -> None:
    def link(number: int, remote: PciAddress | None) -> model.NvLink:
        return model.NvLink(link=number, active=True, remote_kind=model.RemoteKind.SWITCH, remote=remote)

    assert nvlinks(link(0, at(9)), link(1, at(9)), link(2, None)) == [
        {"target": "0000:09:00.0", "count": "2", "tclass": "0x068000"},
        {"target": "fffffff:ffff:ff", "count": "1", "tclass": "0x068000"},
    ]
    # One that nobody knows: NCCL has to ask for all, and does only where there is none.
    assert nvlinks(link(0, at(9)), model.NvLink(link=1, active=True)) == []
    assert nvlinks(model.NvLink(link=0, active=True, remote_kind=model.RemoteKind.CPU)) == []


def test_names_that_nccl_could_not_read_back_are_left_out() -> None:
    root = nccl_rules.read(
        nccltopo.build(
            machine(nics=(nic(1, 'a"/><x y="', "ok_0"), nic(2, "<", "é"), nic(3, "two", ports=2), nic(4, "x" * 300)))
        )
    )
    assert [node.attributes["name"] for node in root.all() if node.name == "net"] == ["ok_0"]
    assert sum(node.name == "nic" for node in root.all()) == 1


def test_virtual_functions_are_left_out() -> None:
    virtual = replace(function(2, class_code=0x020000), physical_function=at(1))
    root = nccl_rules.read(nccltopo.build(machine(nics=(nic(1, "a"), nic(2, "b", pci=virtual)))))
    assert [node.attributes["busid"] for node in root.all() if node.name == "pci"] == ["0000:01:00.0"]


def test_a_machine_without_devices_is_an_empty_system() -> None:
    assert nccltopo.build(machine()) == '<system version="1"/>\n'


def large(gpus: int, nics: int) -> model.Snapshot:
    switches = [
        model.NvLink(link=i, active=True, remote_kind=model.RemoteKind.SWITCH, remote=at(0xF0 + i)) for i in range(6)
    ]
    return machine(
        *(wiring.gpu(at(1 + i), *switches, pci=function(1 + i)) for i in range(gpus)),
        nics=tuple(nic(0x60 + i, f"mlx5_{i}") for i in range(nics)),
    )


def test_a_large_machine_is_said_with_fewer_elements() -> None:
    root = nccl_rules.read(nccltopo.build(large(20, 40)))
    nodes = list(root.all())
    assert {node.name for node in nodes} == {"system", "cpu", "pci", "gpu", "nvlink"}
    assert {tuple(node.attributes.values()) for node in nodes if node.name == "nvlink"} == {
        ("0000:f0:00.0", "6", "0x068000")
    }
    with pytest.raises(
        DocumentError, match="NCCL takes a topology of 256 elements, and this machine has 272: 90 GPUs and 0 NICs"
    ):
        nccltopo.build(large(90, 0))


PLACES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from((None, 0, 1)), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=100)
@given(PLACES, st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), min_size=5, max_size=5))
@example(
    [(3, None, False), (1, None, False)], [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)]
)  # a group with a group and a device
@example([(3, None, False), (1, None, False), (2, None, False)], [(-1, 0), (0, 0), (0, 0), (1, 0), (-1, 0)])
def test_groups_read_back_as_the_same(devices: list[tuple[int, int | None, bool]], tree: list[tuple[int, int]]) -> None:
    groups = tuple(
        overlay.Group(
            name=f"g{i}",
            line=1,
            parent=f"g{around % i}" if around >= 0 and i else None,
            devices=tuple(
                overlay.Device(address=at(bus + 1), line=1) for bus, (group, _, _) in enumerate(devices) if group == i
            ),
        )
        for i, (around, _) in enumerate(tree)
    )
    above = overlay.switches(overlay.chains(overlay.Machine(file="o", line=1, groups=groups)))
    functions = []
    for bus, (_, _, is_nic) in enumerate(devices):
        pci = wiring.function(at(bus + 1), root=f"pci0000:{bus:02x}", switches=above[at(bus + 1)], numa=0)
        functions.append(replace(pci, switch_source=Provenance.OVERLAY, class_code=0x020000 if is_nic else 0x030200))
    snapshot = machine(
        *(wiring.gpu(pci.address, pci=pci) for pci in functions if pci.class_code == 0x030200),
        nics=tuple(model.Nic(pci=pci) for pci in functions if pci.class_code == 0x020000),
    )
    text = nccltopo.build(snapshot)
    root = nccl_rules.read(text)
    assert [node.attributes["numaid"] for node in root.inside] == ["0"]
    back = ncclxml.parse(text.encode(), name="t.xml")
    above_back = overlay.switches(overlay.chains(back))
    for a, b in itertools.combinations(functions, 2):
        again, other = (replace(pci, switches=above_back[pci.address]) for pci in (a, b))
        assert topology.path_class(again, other, {}) is topology.path_class(a, b, {})
