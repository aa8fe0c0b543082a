# SPDX-License-Identifier: Apache-2.0
"""Whether another driver on this node already offers our GPUs: two that hand out one device hand it out twice. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from discovery import address
from driver import quantity

_BUS_ID_NAMES = frozenset({"pcibusid", "pciebusid", "pciaddress"})
"""Last part of an attribute's name, in lower case: the standard name, and what drivers used before there was one."""

_DEVICE_PLUGIN = "nvidia.com/"
_DEVICE_PLUGIN_RESOURCES = ("gpu", "mig-")


def other_driver(foreign: Iterable[Mapping[str, Any]], *, ours: Collection[address.PciAddress]) -> str | None:
    """Which other driver publishes one of our GPUs, in a sentence; None when none does. `foreign`: the ResourceSlices of
    this node that other drivers published.
    """
    for body in foreign:
        spec = body.get("spec")
        if not isinstance(spec, Mapping):
            continue
        for device in _list(spec.get("devices")):
            for bus_id in _bus_ids(device):
                if bus_id in ours:
                    return (
                        f"driver {spec.get('driver')} publishes GPU {bus_id} of this node too "
                        f"(device {device.get('name')} of pool {_pool(spec)})"
                    )
    return None


def device_plugin(node: Mapping[str, Any]) -> str | None:
    """What NVIDIA's device plugin offers on a Node, in a sentence; None when it offers nothing."""
    for name, amount in _allocatable(node).items():
        resource = name.removeprefix(_DEVICE_PLUGIN)
        if resource != name and resource.startswith(_DEVICE_PLUGIN_RESOURCES) and _positive(amount):
            return f"NVIDIA's device plugin offers {name}: {amount} on this node too"
    return None


def _bus_ids(device: Mapping[str, Any]) -> Iterable[address.PciAddress]:
    values = device.get("attributes")
    for name, value in values.items() if isinstance(values, Mapping) else ():
        text = value.get("string") if isinstance(value, Mapping) else None
        if str(name).rpartition("/")[2].lower() in _BUS_ID_NAMES and isinstance(text, str):
            try:
                yield address.parse(text)
            except ValueError:
                continue


def _pool(spec: Mapping[str, Any]) -> str:
    pool = spec.get("pool")
    return str(pool.get("name")) if isinstance(pool, Mapping) else "?"


def _list(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _allocatable(node: Mapping[str, Any]) -> Mapping[str, Any]:
    status = node.get("status")
    allocatable = status.get("allocatable") if isinstance(status, Mapping) else None
    return allocatable if isinstance(allocatable, Mapping) else {}


def _positive(amount: object) -> bool:
    try:
        return quantity.parse(amount) > 0
    except ValueError:
        return False
