# SPDX-License-Identifier: Apache-2.0
"""Writes small /sys and /proc trees, in the formats of the kernel, for tests of the readers.

Only what a test says is there: `Tree(tmp_path).function("pci0000:00/0000:00:01.0/0000:01:00.0", vendor="0x10de", ...)`
makes the directory, the link from the bus, and one file for each attribute. A value of None leaves the attribute out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from discovery import sysfs

GPU = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "0", "local_cpulist": "0-3"}
NIC = {"vendor": "0x15b3", "device": "0x1021", "class": "0x020000", "numa_node": "0", "local_cpulist": "0-3"}
NVME = {"vendor": "0x144d", "device": "0xa80a", "class": "0x010802", "numa_node": "0", "local_cpulist": "0-3"}
BRIDGE = {"vendor": "0x1000", "device": "0xc030", "class": "0x060400"}

ROOT, UPSTREAM, DOWNSTREAM = 4, 5, 6


def config(
    port: int | None,
    *,
    length: int | None = None,
    vendor: int = 0x1000,
    device: int = 0xC030,
    subsystem: tuple[int, int] | None = None,
    extended: bool = False,
    access: int | None = None,
) -> bytes:
    """Configuration space of a bridge; `port`: device/port type of its PCI Express capability, None for no capability.
    `extended`: with the space above 256 bytes, where `access` is the control register of access control services.
    """
    space = bytearray(4096 if extended else 256)
    struct.pack_into("<HH", space, 0, vendor, device)
    struct.pack_into("<I", space, 8, 0x060400 << 8)
    space[0x0E] = 1
    if port is not None:
        struct.pack_into("<H", space, 6, 0x10)
        space[0x34] = 0x40
        space[0x40:0x44] = bytes((0x01, 0x60, 0, 0))  # power management first, so that the list is walked
        struct.pack_into("<BBH", space, 0x60, 0x10, 0, port << 4 | 2)
        if subsystem is not None:
            space[0x41] = 0x50
            struct.pack_into("<BBxxHH", space, 0x50, 0x0D, 0x60, *subsystem)
    if extended:
        struct.pack_into("<I", space, 0x100, 0x140 << 20 | 0x20001)  # error reporting first
        if access is None:
            struct.pack_into("<I", space, 0x140, 0x10002)  # virtual channel
        else:
            struct.pack_into("<IHH", space, 0x140, 0x1000D, 0x1F, access)
    return bytes(space[:length])


def reader(config: bytes) -> Callable[[int, int], bytes]:
    """Reads pieces of it."""
    return lambda offset, size: config[offset : offset + size]


class Tree:
    """A machine below `directory`: `sys`, `proc` and `dev`."""

    def __init__(self, directory: Path) -> None:
        self.sys = directory / "sys"
        self.proc = directory / "proc"
        self.dev = directory / "dev"
        for root in (self.sys, self.proc, self.dev):
            root.mkdir(parents=True, exist_ok=True)
        (self.sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)

    def files(self) -> sysfs.Sysfs:
        """A reader of it."""
        return sysfs.Sysfs(sys=self.sys, proc=self.proc)

    def write(self, path: str, content: str | bytes) -> Path:
        """A file, `sys/...`, `proc/...` or `dev/...`."""
        place = self.sys.parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        return place

    def link(self, path: str, target: str) -> None:
        """A symbolic link to a place below /sys, relative as the kernel makes them."""
        place = self.sys.parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.sys / target, place.parent))

    def function(self, path: str, *, driver: str | None = None, **attributes: str | bytes | None) -> None:
        """A PCI function at `path` below /sys/devices."""
        name = path.rpartition("/")[2]
        (self.sys / "devices" / path).mkdir(parents=True, exist_ok=True)
        for attribute, content in attributes.items():
            if content is not None:
                self.write(f"sys/devices/{path}/{attribute}", content)
        if driver is not None:
            self.link(f"sys/devices/{path}/driver", f"bus/pci/drivers/{driver}")
        self.link(f"sys/bus/pci/devices/{name}", f"devices/{path}")

    def bridge(self, path: str, port: int | None, **attributes: str | bytes | None) -> None:
        """A bridge whose configuration space tells its port type."""
        told: dict[str, str | bytes | None] = {**BRIDGE, "config": config(port), **attributes}
        self.function(path, driver=None, **told)

    def class_device(self, class_name: str, path: str) -> None:
        """A device of a class at `path` below /sys/devices."""
        (self.sys / "devices" / path).mkdir(parents=True, exist_ok=True)
        self.link(f"sys/class/{class_name}/{path.rpartition('/')[2]}", f"devices/{path}")

    def cpus(self, *packages: str) -> None:
        """Online CPUs, a list for each physical package, which is a NUMA node too."""
        nodes = range(len(packages))
        self.write("sys/devices/system/node/online", f"0-{len(packages) - 1}" if len(packages) > 1 else "0")
        self.write("sys/devices/system/cpu/online", ",".join(packages))
        for package, cpus in enumerate(packages):
            self.write(f"sys/devices/system/node/node{package}/cpulist", cpus)
            distances = " ".join("10" if other == package else "21" for other in nodes)
            self.write(f"sys/devices/system/node/node{package}/distance", distances)
            for cpu in sysfs.parse_list(cpus):
                topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{topology}/physical_package_id", str(package))
                self.write(f"{topology}/core_siblings", f"{sum(1 << member for member in sysfs.parse_list(cpus)):08x}")
