# SPDX-License-Identifier: Apache-2.0
"""Machines of the zoo as nodes: what is published of each, in the order that is published and in others."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discovery import child, options
from discovery.address import PciAddress
from discovery.mock import render, zoo
from driver.publish import devices, slices
from driver.sharing import policy, rules

DRIVER = "gpu.nearfield.dev"
CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
}

DIVIDED = (rules.Rule(mode=rules.Mode.MIG_DYNAMIC),)
"""The rules of sharing of a node whose GPUs are all divided as claims want it."""

Order = tuple[int, ...]
"""A permutation of a node's devices, as they are published."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its devices, in the order in which they are published."""

    name: str
    devices: tuple[devices.Device, ...]
    minors: Mapping[PciAddress, int | None]

    def slices(self, order: Order) -> list[dict[str, Any]]:
        """The ResourceSlices with the devices in another order."""
        place = slices.Place(driver_name=DRIVER, node_name=self.name)
        return list(slices.build_slices([self.devices[index] for index in order], place=place))

    def published(self) -> Order:
        """The order that is published."""
        return tuple(range(len(self.devices)))

    def by_address(self) -> Order:
        """In order of PCI address, as NVML counts GPUs."""
        return tuple(sorted(self.published(), key=lambda index: self.devices[index].address))

    def by_minor(self) -> Order:
        """In order of the number in /dev/nvidia<number>, which names the devices of NVIDIA's driver; unknown ones last."""
        minors = [self.minors.get(device.address) for device in self.devices]
        last = len(minors)
        return tuple(
            sorted(self.by_address(), key=lambda index: minor if (minor := minors[index]) is not None else last)
        )

    def shuffled(self, seed: int) -> Order:
        """In a random order, as NVIDIA's driver publishes them."""
        order = list(self.by_address())
        random.Random(f"{self.name} {seed}").shuffle(order)
        return tuple(order)

    def groups(self, attribute: str) -> list[frozenset[str]]:
        """The names of the devices that share a value of an attribute, a set a value, ordered."""
        sets: dict[Any, set[str]] = {}
        for device in self.devices:
            if attribute in device.attributes:
                sets.setdefault(device.attributes[attribute], set()).add(device.name)
        return [frozenset(members) for _, members in sorted(sets.items())]

    def shape(self, order: Order, attributes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """What first fit can tell of an order: of each attribute, which devices share a value, values counted as they come up.

        Orders of one shape differ in names alone, so claims that match on nothing else fare alike under them.
        """
        return tuple(
            _counted([self.devices[index].attributes.get(attribute) for index in order]) for attribute in attributes
        )

    def orderly(self, order: Order, attributes: Sequence[str]) -> bool:
        """Whether devices that are taken from the front leave at most one group by each attribute partly taken."""
        groups = [self.groups(attribute) for attribute in attributes]
        taken: set[str] = set()
        for index in order:
            taken.add(self.devices[index].name)
            if any(sum(bool(group & taken) and not group <= taken for group in sets) > 1 for sets in groups):
                return False
        return True


def read(name: str, *, sharing: Sequence[rules.Rule] = ()) -> Node:
    """The node of a machine of the zoo, whose GPUs are shared by these rules."""
    with tempfile.TemporaryDirectory(prefix="nearfield-oracle-") as folder:
        tree = render.render(zoo.load(name), Path(folder) / "tree")
        prober = child.InProcessProber(
            source=options.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory),
            options=options.ProbeOptions(),
        )
        try:
            snapshot = prober.probe(timeout_s=60.0)
        finally:
            prober.close()
    offered = devices.build_devices(
        snapshot,
        options=devices.PublishOptions(driver_name=DRIVER),
        policies=policy.resolve(sharing, snapshot.gpus).policies,
    )
    return Node(name=name, devices=offered, minors={gpu.address: gpu.minor for gpu in snapshot.gpus})


def _counted(values: Sequence[Any]) -> tuple[int, ...]:
    """Each value as its number by first occurrence; a missing one as -1, as it shares nothing."""
    numbers: dict[Any, int] = {}
    return tuple(-1 if value is None else numbers.setdefault(value, len(numbers)) for value in values)
