# SPDX-License-Identifier: Apache-2.0
"""The hierarchies of cgroups of a machine, before anything is in them, and who counts GPU memory there."""

from __future__ import annotations

from collections.abc import Mapping

from discovery.address import PciAddress
from discovery.mock import dmem, machine
from discovery.mock.pcitree import MachineError
from discovery.mock.recording import Entry

ROOT = "sys/fs/cgroup"
LIMITS_SINCE = 615
"""The first release of the driver that limits the memory of cgroups (CUDA 13.4; NVIDIA, "MPS v3 Memory Partitioning")."""

_DMEM_SINCE = (6, 14)
_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids", "rdma", "misc")
_V1 = ("cpu,cpuacct", "cpuset", "devices", "freezer", "hugetlb", "memory", "pids", "systemd")


def limits_memory(driver: machine.Driver) -> bool:
    """Whether a driver has the functions at all."""
    return int(driver.version.split(".")[0]) >= LIMITS_SINCE


def accounting(described: machine.Machine) -> str | None:
    """Who counts. MachineError where the machine cannot be as it is said."""
    host, driver = described.host, described.driver
    if host.memory_accounting is not None and host.cgroup != "v2":
        raise MachineError(("host", "memoryAccounting"), "GPU memory of cgroups is counted with cgroup: v2 only")
    if host.memory_accounting == dmem.CONTROLLER and _release(host.kernel) < _DMEM_SINCE:
        raise MachineError(("host", "memoryAccounting"), f"a kernel {host.kernel} has no dmem controller; 6.14 has")
    if host.cgroup != "v2" or driver is None or not limits_memory(driver):
        return None
    return host.memory_accounting or "misc"


def files(described: machine.Machine, memory: Mapping[PciAddress, int]) -> dict[str, Entry]:
    """The files. `memory`: of the GPUs that the driver has."""
    counted = accounting(described) is not None
    match described.host.cgroup:
        case "v1":
            return {f"{ROOT}/{name}/notify_on_release": "0\n" for name in _V1}
        case "v2":
            by_kernel = described.host.memory_accounting == dmem.CONTROLLER
            controllers = " ".join((*_CONTROLLERS, *([dmem.CONTROLLER] if by_kernel else ()))) + "\n"
            tree: dict[str, Entry] = {
                f"{ROOT}/{name}": controllers for name in ("cgroup.controllers", "cgroup.subtree_control")
            }
            if by_kernel:
                tree[f"{ROOT}/{dmem.CAPACITY}"] = dmem.capacity(dict(memory) if counted else {})
            return tree
        case _:
            return {}


def _release(kernel: str) -> tuple[int, int]:
    numbers = [int(part) for part in kernel.split("-", maxsplit=1)[0].split(".")[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)
