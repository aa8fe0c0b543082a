# SPDX-License-Identifier: Apache-2.0
"""The hot-plug slots of a machine, as pciehp shows them (drivers/pci/hotplug, Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

from collections.abc import Sequence

from discovery.mock.pcitree import Function, MachineError
from discovery.mock.recording import Entry


def files(functions: Sequence[Function]) -> dict[str, Entry]:
    """/sys/bus/pci/slots. MachineError where two ports have slots of one name."""
    tree: dict[str, Entry] = {}
    taken: dict[str, Function] = {}
    behind = {(function.address.domain, function.address.bus) for function in functions}
    for port in functions:
        if port.hot_plug is None or port.bridging is None:
            continue
        first = taken.setdefault(port.hot_plug, port)
        if first is not port:
            raise MachineError((*port.place, "slot"), f"slot {port.hot_plug} is that of {first.address}")
        here = f"sys/bus/pci/slots/{port.hot_plug}"
        full = (port.address.domain, port.bridging.secondary) in behind
        tree[f"{here}/address"] = f"{port.address.domain:04x}:{port.bridging.secondary:02x}:00\n"
        tree[f"{here}/adapter"] = tree[f"{here}/power"] = f"{int(full)}\n"
    return tree
