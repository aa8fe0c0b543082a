# SPDX-License-Identifier: Apache-2.0
"""The files that the kernel shows of every PCI function (drivers/pci/pci-sysfs.c, Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence

from discovery.mock import configspace, cpulists, iommu
from discovery.mock.pcitree import Function
from discovery.mock.products import SPEEDS
from discovery.mock.recording import Entry, Link


def files(
    functions: Sequence[Function], *, node_cpus: Mapping[int, Sequence[int]], iommu_type: str
) -> dict[str, Entry]:
    """All of them, and the buses, drivers and IOMMU groups that link to them. `node_cpus`: CPUs of each NUMA node;
    `iommu_type`: type of the groups, or `off`.
    """
    every = tuple(sorted(cpu for cpus in node_cpus.values() for cpu in cpus))
    possible = every[-1] + 1
    sharing = Counter((f.address.domain, f.address.bus, f.address.device) for f in functions)
    tree: dict[str, Entry] = {}
    for function in functions:
        multifunction = sharing[function.address.domain, function.address.bus, function.address.device] > 1
        cpus = every if function.numa is None else tuple(node_cpus[function.numa])
        tree.update(_function(function, cpus, possible=possible, multifunction=multifunction))
    if iommu_type != "off":
        groups = iommu.groups(functions)
        for function in functions:
            _group(tree, function, groups[function.address], iommu_type)
    for directory, numa in _root_buses(functions).items():
        cpus = every if numa is None else tuple(node_cpus[numa])
        bus = posixpath.basename(directory).removeprefix("pci")
        tree[f"sys/devices/{directory}/pci_bus/{bus}/cpuaffinity"] = f"{cpulists.mask(cpus, possible=possible)}\n"
        tree[f"sys/devices/{directory}/pci_bus/{bus}/cpulistaffinity"] = f"{cpulists.spell(cpus)}\n"
        tree[f"sys/class/pci_bus/{bus}"] = Link(f"../../devices/{directory}/pci_bus/{bus}")
    return tree


def up(directory: str) -> str:
    """The way from `sys/devices/<directory>` up to `sys`."""
    return "../" * (directory.count("/") + 2)


def _function(function: Function, cpus: Sequence[int], *, possible: int, multifunction: bool) -> dict[str, Entry]:
    here = f"sys/devices/{function.directory}"
    pci = str(function.address)
    subsystem = function.part.subsystem
    tree: dict[str, Entry] = {
        f"sys/bus/pci/devices/{pci}": Link(f"../../../devices/{function.directory}"),
        f"{here}/vendor": f"0x{function.ids.vendor:04x}\n",
        f"{here}/device": f"0x{function.ids.device:04x}\n",
        f"{here}/class": f"0x{function.class_code:06x}\n",
        f"{here}/numa_node": f"{-1 if function.numa is None else function.numa}\n",
        f"{here}/local_cpulist": f"{cpulists.spell(cpus)}\n",
        f"{here}/local_cpus": f"{cpulists.mask(cpus, possible=possible)}\n",
        f"{here}/driver_override": "(null)\n",
        f"{here}/config": configspace.config(function, multifunction=multifunction),
        f"{here}/subsystem": Link(f"{up(function.directory)}bus/pci"),
    }
    if subsystem is not None:
        tree[f"{here}/subsystem_vendor"] = f"0x{subsystem.vendor:04x}\n"
        tree[f"{here}/subsystem_device"] = f"0x{subsystem.device:04x}\n"
    if function.vpd is not None:
        tree[f"{here}/vpd"] = function.vpd
    if function.part.revision is not None:
        tree[f"{here}/revision"] = f"0x{function.part.revision:02x}\n"
    if function.link is not None:
        tree |= {
            f"{here}/max_link_speed": f"{SPEEDS[function.link.max_generation]} GT/s PCIe\n",
            f"{here}/max_link_width": f"{function.link.max_width}\n",
            f"{here}/current_link_speed": f"{SPEEDS[function.link.generation]} GT/s PCIe\n",
            f"{here}/current_link_width": f"{function.link.width}\n",
        }
    if function.driver is not None:
        tree[f"{here}/driver"] = Link(f"{up(function.directory)}bus/pci/drivers/{function.driver}")
        tree[f"sys/bus/pci/drivers/{function.driver}/{pci}"] = Link(f"../../../../devices/{function.directory}")
    return tree


def _group(tree: dict[str, Entry], function: Function, group: int, iommu_type: str) -> None:
    groups = f"kernel/iommu_groups/{group}"
    tree[f"sys/devices/{function.directory}/iommu_group"] = Link(f"{up(function.directory)}{groups}")
    tree[f"sys/{groups}/type"] = f"{iommu_type}\n"
    tree[f"sys/{groups}/devices/{function.address}"] = Link(f"../../../../devices/{function.directory}")


def _root_buses(functions: Sequence[Function]) -> dict[str, int | None]:
    """Directories of host bridges, with the NUMA node of what hangs on them."""
    return {
        posixpath.dirname(function.directory): function.numa
        for function in reversed(functions)
        if posixpath.basename(posixpath.dirname(function.directory)).startswith("pci")
    }
