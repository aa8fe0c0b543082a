# SPDX-License-Identifier: Apache-2.0
"""What stands on the interfaces of NICs, and which NIC the default route leaves by.

- stacks: bonds, bridges, VLANs, and what is no stack (circles, thousands)
- default routes: metrics, families, routes that lead nowhere
- routes of another network namespace, routes that cannot be read, carriers that sysfs does not show
- a rendered machine through the whole probe
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import endpoints, findings, model, network, sysfs
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from tests.fakes import mockmachine, pcitree

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
ZERO = "0" * 32
PLACES = {
    "eno1": "pci0000:00/0000:00:03.0/virtio2",
    "eno2": "pci0000:00/0000:00:04.0",
    "ib0": "pci0000:00/0000:00:05.0",
}


def v4(interface: str, *, metric: int = 0, flags: str = "0003", destination: str = "00000000") -> str:
    mask = "00000000" if destination == "00000000" else "00FFFFFF"
    return f"{interface}\t{destination}\t010200C0\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0    "


def v6(
    interface: str, *, metric: int = 1024, flags: str = "00000003", to: str = f"{ZERO} 00", source: str = "00"
) -> str:
    return (
        f"{to} {ZERO} {source} fd000000000000000000000000000001 {metric:08x} 00000003 00000000 {flags} {interface:>8}"
    )


class Node:
    """Interfaces by name, a NIC function for each in PLACES, and routes of process 1."""

    def __init__(self, directory: Path) -> None:
        self.tree = pcitree.Tree(directory)
        self.found = findings.Findings()
        self.names = ["lo"]
        self.tree.class_device("net", "virtual/net/lo")
        for name, place in PLACES.items():
            self.tree.class_device("net", f"{place}/net/{name}")
            self.tree.link(f"sys/devices/{place}/net/{name}/device", f"devices/{place}")
            self.names.append(name)

    def virtual(self, name: str, *on: str, kind: str = "bond", enslaved: bool = True) -> None:
        self.tree.class_device("net", f"virtual/net/{name}")
        self.tree.write(f"sys/devices/virtual/net/{name}/uevent", f"DEVTYPE={kind}\nINTERFACE={name}")
        self.names.append(name)
        for lower in on:
            below = f"devices/{PLACES[lower]}/net/{lower}" if lower in PLACES else f"devices/virtual/net/{lower}"
            self.tree.link(f"sys/devices/virtual/net/{name}/lower_{lower}", below)
            self.tree.link(f"sys/{below}/upper_{name}", f"devices/virtual/net/{name}")
            if enslaved:
                self.tree.link(f"sys/{below}/master", f"devices/virtual/net/{name}")

    def routes(self, *lines: str, six: tuple[str, ...] = (), names: tuple[str, ...] | None = None) -> None:
        devices = "\n".join(f"{name:>6}: 2953700239  107814 0 0" for name in (self.names if names is None else names))
        self.tree.write("proc/1/net/dev", f"Inter-|   Receive\n face |bytes    packets\n{devices}")
        self.tree.write("proc/1/net/route", "\n".join((HEADER, *lines)))
        self.tree.write("proc/1/net/ipv6_route", "\n".join(six))

    def nics(self) -> dict[str, model.Nic]:
        files = self.tree.files()
        stack = network.Stack(files, self.found)
        nics = [
            model.Nic(
                pci=model.PciFunction(address=where, vendor_id=1, device_id=1, class_code=0x020000),
                interfaces=tuple(endpoints.interface(directory, stack) for directory in directories),
            )
            for where, directories in endpoints.class_devices(files, "net", self.found).items()
        ]
        return {nic.interfaces[0].name: nic for nic in network.with_management(nics, stack, files, self.found)}

    def managed(self) -> dict[str, bool | None]:
        return {name: nic.management for name, nic in self.nics().items()}

    def said(self) -> list[tuple[str, str]]:
        return [(finding.code, finding.message) for finding in self.found.result()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_default_route_marks_the_nic(node: Node) -> None:
    node.routes(v4("eno1"), v4("eno2", destination="000200C0"))
    assert node.managed() == {"eno1": True, "eno2": False, "ib0": False}
    assert node.said() == []


def test_without_a_default_route_no_nic_is_marked(node: Node) -> None:
    node.routes(v4("eno2", destination="000200C0"))
    assert node.managed() == {"eno1": False, "eno2": False, "ib0": False}
    assert node.said() == []


@pytest.mark.parametrize(
    ("four", "six", "marked"),
    [
        (
            (v4("eno1", metric=200), v4("eno2", metric=100)),
            (),
            {"eno2"},
        ),  # a NIC in reserve, or one of a cloud that has many
        ((v4("eno1", metric=100), v4("eno2", metric=100)), (), {"eno1", "eno2"}),
        ((), (v6("eno1"), v6("eno2"), v6("ib0", metric=2000)), {"eno1", "eno2"}),  # several hops
        ((v4("eno1"),), (v6("eno2"),), {"eno1", "eno2"}),
        ((v4("eno1", flags="0002"), v4("*", flags="0201"), v4("eno2", metric=9)), (), {"eno2"}),
        ((), (v6("lo", metric=0xFFFFFFFF, flags="00200200"), v6("ib0")), {"ib0"}),
        ((), (v6("lo", metric=0xFFFFFFFF, flags="00200200"),), set()),
        ((), (v6("eno1", source="40"), v6("eno2", to=f"{ZERO} 01")), set()),  # for some sources, to half of the world
    ],
)
def test_which_default_routes_count(node: Node, four: tuple[str, ...], six: tuple[str, ...], marked: set[str]) -> None:
    node.routes(*four, six=six)
    assert {name for name, managed in node.managed().items() if managed} == marked
    assert node.said() == []


def test_a_route_over_a_bridge_on_a_vlan_on_a_bond_marks_both_members(node: Node) -> None:
    node.virtual("bond0", "eno1", "eno2")
    node.virtual("bond0.7", "bond0", kind="vlan", enslaved=False)
    node.virtual("br0", "bond0.7", kind="bridge")
    node.virtual("veth1", kind="")
    node.routes(v4("br0"))
    nics = node.nics()
    assert {name: nic.management for name, nic in nics.items()} == {"eno1": True, "eno2": True, "ib0": False}
    assert [(nic.interfaces[0].master, nic.interfaces[0].vlans) for nic in nics.values()] == [
        ("bond0", ("bond0.7",)),
        ("bond0", ("bond0.7",)),
        (None, ()),
    ]
    assert node.said() == []


def test_the_file_of_the_bonding_driver_is_no_interface(node: Node) -> None:
    node.tree.write("sys/class/net/bonding_masters", "bond0")
    node.routes(v4("eno2"))
    assert node.managed()["eno2"] is True


def test_a_device_off_the_pci_bus_carries_it_and_then_no_nic_does(node: Node) -> None:
    node.tree.class_device("net", "LNXSYSTM:00/VMBUS:00/6045/net/eth0")
    node.tree.link("sys/devices/LNXSYSTM:00/VMBUS:00/6045/net/eth0/device", "devices/LNXSYSTM:00/VMBUS:00/6045")
    node.names.append("eth0")
    node.virtual("br0", kind="bridge")
    node.tree.link("sys/devices/virtual/net/br0/lower_eth0", "devices/LNXSYSTM:00/VMBUS:00/6045/net/eth0")
    node.routes(v4("br0"))
    assert node.managed() == {"eno1": False, "eno2": False, "ib0": False}


def test_where_sysfs_does_not_tell_what_carries_it_only_the_others_are_unknown(node: Node) -> None:
    node.virtual("br-ex", kind="")
    node.routes(v4("br-ex"), six=(v6("eno2"),))
    assert node.managed() == {"eno1": None, "eno2": True, "ib0": None}
    assert node.said() == [
        (
            "default-route-unknown",
            (
                "which NIC the default route of the node leaves by is not known: it leaves by br-ex, and sysfs does not tell which "
                "device carries that"
            ),
        )
    ]


@pytest.mark.parametrize("pod", [("lo", "eth0"), ("lo", "eno1"), ("lo", "eno1", "eno2", "ib0", "net1"), ("lo",), ()])
def test_routes_of_another_network_namespace_are_not_believed(node: Node, pod: tuple[str, ...]) -> None:
    node.routes(v4("eno1"), names=pod)
    assert set(node.managed().values()) == {None}
    (said,) = node.said()
    assert said[0] == "default-route-unknown"
    assert "give --procfs the /proc of the node" in said[1]


def test_without_process_1_in_procfs_nothing_is_known(node: Node) -> None:
    assert set(node.managed().values()) == {None}
    (said,) = node.said()
    assert "/proc/1/net/dev is not there" in said[1]


@pytest.mark.parametrize("line", ["eno1\t00000000", "eno1\tx\tx\tx\tx\tx\tx\tx", "eno1 zero", "\xff\xfe eno1"])
@pytest.mark.parametrize("six", [False, True])
def test_a_table_that_the_kernel_would_not_write(node: Node, line: str, *, six: bool) -> None:
    node.routes(v4("eno1"), *(() if six else (line,)), six=(line,) if six else ())
    assert set(node.managed().values()) == {None}
    (said,) = node.said()
    assert "holds what is no route" in said[1]


def test_without_a_nic_there_is_nothing_to_say(tmp_path: Path) -> None:
    files, found = pcitree.Tree(tmp_path).files(), findings.Findings()
    assert network.with_management((), network.Stack(files, found), files, found) == ()
    assert found.result() == ()


def test_a_long_table_is_read_to_its_end(node: Node) -> None:
    node.routes(*(v4("eno1", destination=f"{number:08X}") for number in range(1, 20_000)), v4("eno2"))
    assert node.managed()["eno2"] is True


def test_a_list_of_procfs_is_read_to_its_end_though_the_kernel_gives_it_in_pieces() -> None:
    """fs/seq_file.c gives a page or less at a time, and less of it where another line does not fit."""
    read = sysfs.Sysfs().read("proc/self/maps")
    assert read is not None
    assert len(read) > 4096
    assert read.splitlines()[-1] == Path("/proc/self/maps").read_bytes().splitlines()[-1]


def test_a_table_without_an_end_is_not(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_MAX_ROUTES_BYTES", 300_000)
    node.routes(*(v4("eno1", destination=f"{number:08X}") for number in range(1, 20_000)))
    assert set(node.managed().values()) == {None}
    assert "is longer than 300000 bytes" in node.said()[0][1]


def test_interfaces_that_stand_on_each_other_in_a_circle_end(node: Node) -> None:
    node.virtual("a", "eno1")
    node.virtual("b", "a")
    node.tree.link("sys/devices/virtual/net/b/upper_a", "devices/virtual/net/a")
    node.routes(v4("b"))
    assert node.managed()["eno1"] is True


def test_thousands_on_one_interface_are_not_all_asked_for(node: Node) -> None:
    for number in range(3_000):
        node.tree.link(f"sys/devices/{PLACES['eno2']}/net/eno2/upper_mac{number}", f"devices/virtual/net/mac{number}")
    node.routes(v4("eno1"))
    assert node.managed() == {"eno1": True, "eno2": False, "ib0": False}
    stack = network.Stack(node.tree.files(), node.found)
    assert len(stack.above("eno2")) == 256


BONDED = (
    "{nic: connectx-7-400g-ib}",
    "{nic: connectx-7-200g-dual, functions: [{interface: eno1}, {interface: eno2}]}, {nic: connectx-7-400g-ib, name: far}",
)
NETWORK = (
    "nvlink: ",
    (
        "network: {bonds: [{name: bond0, of: [eno1, eno2]}], vlans: [{name: bond0.7, on: bond0, id: 7}], defaultRoute: bond0.7}\n"
        "nvlink: "
    ),
)


def test_a_rendered_machine_tells_its_bond_and_its_route(tmp_path: Path) -> None:
    snapshot = mockmachine.probed(mockmachine.rendered(tmp_path / "node", BONDED, NETWORK))
    assert [(nic.name, nic.management) for nic in snapshot.nics] == [
        ("mlx5_0", True),
        ("mlx5_1", True),
        ("mlx5_2", False),
    ]
    assert [nic.interfaces[0].vlans for nic in snapshot.nics] == [("bond0.7",), ("bond0.7",), ()]
    assert {finding.code for finding in snapshot.findings} == {"nvlink-down"}


def test_a_nic_that_goes_leaves_the_route_of_the_others_known(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path / "node", BONDED, NETWORK)
    for number, kind in enumerate((Kind.VFIO_BOUND, Kind.FALLEN_OFF)):
        gone = mockmachine.probed(tree).nics[0].address
        faults.apply(tree.directory, [Fault(kind=kind, target=gone)], clock=lambda: 0.0)
        snapshot = mockmachine.probed(tree)
        left = {nic.address: nic.management for nic in snapshot.nics if nic.interfaces}
        assert list(left.values()) == [True, False], number
        assert "default-route-unknown" not in {finding.code for finding in snapshot.findings}
        faults.apply(tree.directory, [], clock=lambda: 0.0)
    assert mockmachine.probed(tree).nics[0].management is True
