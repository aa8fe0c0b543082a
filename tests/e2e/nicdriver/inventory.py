# SPDX-License-Identifier: Apache-2.0
"""The NICs of a machine as dranet publishes them: names and types of the attributes are those of its pkg/apis/attributes.go,
the name of a device is its PCI address, the standard attributes come from k8s.io/dynamic-resource-allocation/deviceattribute.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.kit import wiring
from tests.e2e.kit.api import Json

DRIVER = "dra.net"
VENDORS = {0x15B3: "Mellanox Technologies", 0x8086: "Intel Corporation"}
ENCAPSULATIONS = {1: "ether", 32: "infiniband"}


def device_name(address: str) -> str:
    """Of a NIC, from its PCI address."""
    return "pci-" + address.replace(":", "-").replace(".", "-")


def address_of(device: str) -> str:
    """The other way round."""
    domain, bus, slot, function = device.removeprefix("pci-").split("-")
    return f"{domain}:{bus}:{slot}.{function}"


def devices(machine: Path) -> list[Json]:
    """The devices of a rendered machine, ordered by name."""
    found = [
        {"name": device_name(nic.address), "attributes": dict(sorted(_attributes(nic).items()))}
        for nic in wiring.read(machine).nics
    ]
    return sorted(found, key=lambda device: str(device["name"]))


def character_devices(machine: Path, address: str) -> list[str]:
    """The RDMA device nodes of a NIC."""
    (nic,) = (nic for nic in wiring.read(machine).nics if nic.address == address)
    return [f"/dev/infiniband/{name}" for name in _children(nic, "infiniband_verbs")]


def _attributes(nic: wiring.Function) -> Json:
    rdma = bool(_children(nic, "infiniband"))
    found: Json = {
        f"{DRIVER}/pciAddress": {"string": nic.address},
        f"{DRIVER}/rdma": {"bool": rdma},
    }
    if nic.root is not None:
        found["resource.kubernetes.io/pcieRoot"] = {"string": nic.root}
    subsystem = nic.directory / "subsystem_device"
    if subsystem.exists():
        found[f"{DRIVER}/pciSubsystem"] = {"string": _text(subsystem).removeprefix("0x")}
    vendor = VENDORS.get(int(_text(nic.directory / "vendor"), 16))
    if vendor is not None:
        found[f"{DRIVER}/pciVendor"] = {"string": vendor}
    if nic.numa is not None:
        found[f"{DRIVER}/numaNode"] = {"int": nic.numa}
        found["resource.kubernetes.io/numaNode"] = {"int": nic.numa}
    for name in _children(nic, "net"):
        link = nic.directory / "net" / name
        found |= {
            f"{DRIVER}/ifName": {"string": name},
            f"{DRIVER}/mac": {"string": _text(link / "address")},
            f"{DRIVER}/mtu": {"int": int(_text(link / "mtu"))},
            f"{DRIVER}/encapsulation": {"string": ENCAPSULATIONS[int(_text(link / "type"))]},
            f"{DRIVER}/state": {"string": _text(link / "operstate")},
            f"{DRIVER}/type": {"string": "device"},
            f"{DRIVER}/ebpf": {"bool": False},
            f"{DRIVER}/sriov": {"bool": False},
            f"{DRIVER}/virtual": {"bool": False},
        }
        found |= _virtual_functions(nic)
    if rdma and f"{DRIVER}/ifName" not in found:
        found[f"{DRIVER}/rdmaDevice"] = {"string": _children(nic, "infiniband")[0]}
    return found


def _virtual_functions(nic: wiring.Function) -> Json:
    """A function that can have some says so, and how many are on; one that is one says that."""
    total = nic.directory / "sriov_totalvfs"
    found: Json = {}
    if total.exists() and int(_text(total)) > 0:
        found[f"{DRIVER}/sriov"] = {"bool": True}
        found[f"{DRIVER}/sriovVfs"] = {"int": int(_text(nic.directory / "sriov_numvfs"))}
    if (nic.directory / "physfn").exists():
        found[f"{DRIVER}/isSriovVf"] = {"bool": True}
    return found


def _children(nic: wiring.Function, kind: str) -> list[str]:
    folder = nic.directory / kind
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    return path.read_text().strip()
