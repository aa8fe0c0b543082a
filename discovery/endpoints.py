# SPDX-License-Identifier: Apache-2.0
"""The network interfaces, RDMA devices and NVMe controllers of PCI functions, from the class directories of sysfs.

/sys/class/net shows the network namespace that mounted this /sys, and interfaces move into pods: nothing is decided by
what is here. Devices without a PCI function (bridges, soft RDMA) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from discovery import address, findings, model, network, pci, sysfs
from discovery.address import PciAddress

_STATE = re.compile(r"[0-9]+: *(\S.*)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]+)?) Gb/sec")

RDMA = "infiniband"

ClassDevices = Mapping[PciAddress, tuple[sysfs.Directory, ...]]
"""The devices of one class by PCI function, ordered by name."""


def class_devices(files: sysfs.Sysfs, class_name: str, found: findings.Findings) -> ClassDevices:
    """The devices of a class that hang on a PCI function, however deep (virtio puts a bus of its own in between)."""
    root = sysfs.Directory(files, f"sys/class/{class_name}", subject=class_name, found=found)
    devices: dict[PciAddress, list[sysfs.Directory]] = {}
    for name in root.names():
        target = root.link(name)
        components = pci.device_components(f"{root.path}/{name}", target) if target is not None else ()
        where = _nearest_function(components)
        directory = sysfs.Directory(files, "sys/devices/" + "/".join(components), subject=where, found=found)
        if where is not None and not (class_name == RDMA and _is_soft(directory)):
            devices.setdefault(where, []).append(directory)
    return {where: tuple(directories) for where, directories in devices.items()}


def interface(directory: sysfs.Directory, stack: network.Stack) -> model.NetworkInterface:
    """A network interface (Documentation/ABI/testing/sysfs-class-net); speed is -1 or unreadable while the link is down."""
    speed = directory.number("speed")
    return model.NetworkInterface(
        name=directory.name,
        operstate=directory.text("operstate"),
        speed_mbps=speed if speed is not None and speed > 0 else None,
        link_type=directory.number("type"),
        mtu=directory.number("mtu"),
        master=stack.master(directory.name),
        vlans=tuple(sorted(upper.name for upper in stack.above(directory.name) if upper.vlan)),
    )


def rdma_device(directory: sysfs.Directory) -> model.RdmaDevice:
    """An RDMA device with its ports (Documentation/ABI/stable/sysfs-class-infiniband)."""
    ports = []
    for name in directory.names("ports"):
        if name.isascii() and name.isdecimal() and len(name) <= 3:
            port = directory.below(f"ports/{name}")
            ports.append(
                model.RdmaPort(
                    port=int(name),
                    state=_named_state(port.text("state")),
                    physical_state=_named_state(port.text("phys_state")),
                    link_layer=port.text("link_layer"),
                    rate_mbps=_rate(port.text("rate")),
                )
            )
    return model.RdmaDevice(name=directory.name, ports=tuple(sorted(ports, key=lambda port: port.port)))


def _nearest_function(components: tuple[str, ...]) -> PciAddress | None:
    for component in reversed(components):
        try:
            return address.parse(component)
        except ValueError:
            continue
    return None


def _is_soft(directory: sysfs.Directory) -> bool:
    """Whether an RDMA device is made of software upon an interface (rxe), which only such a device names in `parent`
    (drivers/infiniband/sw/rxe/rxe_verbs.c). Kernels before 6.4 showed it below the function of that interface.
    """
    return directory.text("parent") is not None


def _named_state(text: str | None) -> str | None:
    """`4: ACTIVE` as `ACTIVE`."""
    match = _STATE.fullmatch(text or "")
    return match[1] if match else None


def _rate(text: str | None) -> int | None:
    """`400 Gb/sec (4X NDR)` as Mbit/s; 0 is what a port shows that knows none."""
    match = _RATE.match(text or "")
    return round(float(match[1]) * 1000) or None if match else None
