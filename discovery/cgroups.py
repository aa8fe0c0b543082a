# SPDX-License-Identifier: Apache-2.0
"""Which version of cgroups this node has, and who counts the GPU memory of a cgroup there.

Version 2 shows `cgroup.controllers` at the root of its one hierarchy (Documentation/admin-guide/cgroup-v2.rst). The kernel's
controller of device memory (Linux 6.14) lists at the root what it counts: `drm/...`, `nvidia/<address>/...`. The driver takes it
where it can, else it counts by itself, and its parameter `RmMemacctMode` decides otherwise (NVIDIA, "MPS v3 Memory
Partitioning").
"""

from __future__ import annotations

import re

from discovery import findings, model, sysfs

ROOT = "fs/cgroup"
"""Below /sys."""

_V1_CONTROLLERS = frozenset(
    ("blkio", "cpu", "cpu,cpuacct", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids", "systemd", "unified")
)
"""Names under which the hierarchies of version 1 are mounted; `unified` is that of version 2 beside them."""

_COUNTED = re.compile(r"^nvidia/", re.MULTILINE)
_MODE = re.compile(r"^RegistryDwords: \"(?:[^\"]*[;,\s])?RmMemacctMode=(0x[0-9a-fA-F]{1,8}|[0-9]{1,10})", re.MULTILINE)
_OFF, _MISC, _DMEM = range(3)
_FIRST_DRIVER = 615


def version(files: sysfs.Sysfs, found: findings.Findings) -> int | None:
    """1 or 2; None where no hierarchy is mounted."""
    root = sysfs.Directory(files, f"sys/{ROOT}", subject="host", found=found)
    names = frozenset(root.names())
    if "cgroup.controllers" in names:
        return 2
    return 1 if names & _V1_CONTROLLERS else None


def accounting(files: sysfs.Sysfs, driver: str | None, found: findings.Findings) -> model.MemoryAccounting | None:
    """Who counts, by the version of the driver that is loaded."""
    root = sysfs.Directory(files, f"sys/{ROOT}", subject="host", found=found)
    controllers = root.text("cgroup.controllers")
    if controllers is None and "cgroup.controllers" not in root.names():
        return None
    major = (driver or "").partition(".")[0]
    if not major.isdecimal() or int(major) < _FIRST_DRIVER:
        return None
    text = sysfs.Directory(files, "proc/driver/nvidia", subject="nvidia", found=found).text("params")
    forced = _MODE.search(text or "")
    mode = None if forced is None else int(forced[1], 0)
    if mode == _OFF:
        return None
    counted = "dmem" in (controllers or "").split() and _COUNTED.search(root.text("dmem.capacity") or "nvidia/")
    return model.MemoryAccounting.DMEM if counted and mode != _MISC else model.MemoryAccounting.MISC
