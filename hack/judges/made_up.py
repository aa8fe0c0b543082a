# SPDX-License-Identifier: Apache-2.0
"""Machines that nobody built, drawn by a seed: deep and nested switches, empty ports, devices of several functions, domains,
sub-NUMA nodes, nodes without CPUs or memory, roots whose node the firmware keeps to itself. Pure.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 4
_BUSES_OF_A_ROOT = 0x40

_DEVICES: tuple[Mapping[str, str], ...] = (
    {"gpu": "nvidia-h100-sxm5-80gb"},
    {"gpu": "nvidia-rtx-6000-ada"},
    {"nic": "connectx-7-400g-ib"},
    {"nic": "connectx-7-200g-dual"},
    {"nvme": "samsung-pm1733"},
    {"device": "nvswitch-3"},
)
_SWITCHES = ("broadcom-pex890xx", "connectx-7-bridge", "microchip-switchtec-gen4")


def document(seed: int) -> str:
    """The Machine of a seed, in the part of YAML that is JSON."""
    return json.dumps(_Drawing(random.Random(seed)).machine(f"made-up-{seed}"))


@dataclass
class _Drawing:
    draw: random.Random
    buses: int = 0
    """Those that are left below the root that is being drawn."""

    def machine(self, name: str) -> dict[str, Any]:
        nodes = self._nodes()
        count = len(nodes)
        own = [[10 if a == b else 10 + 2 * (1 + abs(a - b)) for b in range(count)] for a in range(count)]
        return {
            "apiVersion": "mock.nearfield.dev/v1alpha1",
            "kind": "Machine",
            "name": name,
            "host": {"cpu": "None", "rootPort": "intel-sapphire-rapids-root-port", "threads": self.draw.choice((1, 2))},
            "driver": {"version": "580.95.05", "cuda": "13.0"},
            "numa": {"nodes": nodes, "distances": own},
            "pci": [self._root(domain, first, count) for domain in self._domains() for first in self._first_buses()],
        }

    def _nodes(self) -> list[dict[str, Any]]:
        sockets, parts = self.draw.choice((1, 2, 4)), self.draw.choice((1, 2))
        cores = 2 * self.draw.randint(1, 6)
        nodes: list[dict[str, Any]] = []
        for number in range(sockets * parts):
            first = number * cores
            memory = "0GiB" if number and self.draw.random() < 0.2 else f"{self.draw.randint(1, 64)}GiB"
            cpus = f"{first}-{first + cores - 1}"
            nodes.append(
                {"node": number, "socket": number // parts, "die": number % parts, "cpus": cpus, "memory": memory}
            )
        if self.draw.random() < 0.3:
            nodes.append({"node": sockets * parts, "memory": "8GiB"})
        return nodes

    def _domains(self) -> list[int]:
        return sorted(self.draw.sample((0, 1, 2, 0x10, 0xFFFF), self.draw.randint(1, 3)))

    def _first_buses(self) -> list[int]:
        return sorted(self.draw.sample(range(0, 0x100, _BUSES_OF_A_ROOT), self.draw.randint(1, 3)))

    def _root(self, domain: int, first: int, nodes: int) -> dict[str, Any]:
        self.buses = _BUSES_OF_A_ROOT - 1
        root: dict[str, Any] = {"root": f"{domain:04x}:{first:02x}", "ports": self._ports(1, self.draw.randint(1, 4))}
        if self.draw.random() < 0.8:
            root["numa"] = self.draw.randrange(nodes)
        return root

    def _ports(self, depth: int, most: int) -> list[dict[str, Any]]:
        ports = []
        for _ in range(most):
            if self.buses < 1:
                break
            self.buses -= 1
            ports.append(self._slot(depth))
        return ports

    def _slot(self, depth: int) -> dict[str, Any]:
        chance = self.draw.random()
        if chance < 0.1:
            return {}
        if chance < 0.5 and depth < MAX_DEPTH and self.buses > 1:
            self.buses -= 1
            return {"switch": self.draw.choice(_SWITCHES), "ports": self._ports(depth + 1, self.draw.randint(1, 5))}
        return dict(self.draw.choice(_DEVICES))
