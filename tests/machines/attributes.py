# SPDX-License-Identifier: Apache-2.0
"""What machines publish, as it is written down in `published/<machine>.txt`: the attributes that all GPUs share, the capacities of
every GPU, and a table with a line for each GPU, in the order in which they are offered. `-` is an attribute that a GPU has not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from discovery.mock import zoo

Offer = tuple[list[dict[str, Any]], dict[str, str]]
"""The attributes of each GPU of a machine but its UUID, in the order in which they are offered, and the capacities of every GPU."""

FOLDER = Path(__file__).parent / "published"

BUS_ID, ROOT, NUMA = (f"resource.kubernetes.io/{name}" for name in ("pciBusID", "pcieRoot", "numaNode"))
_STANDARD = {"pciBusID": BUS_ID, "pcieRoot": ROOT, "numaNode": NUMA}
_NUMBERS = ("numaNode", "cpuSocket", "rail")
_WHOLE = {"type": "gpu", "memoryEnforcement": "whole", "computeEnforcement": "whole"}

FAULTY = tuple(name for name in zoo.names() if name.startswith("faulty-"))
"""Machines of the zoo with a fault: of them alone some rules of the others do not hold."""
HEALTHY = tuple(name for name in zoo.names() if name not in FAULTY)
DIVIDED = tuple(name for name in HEALTHY if name.endswith("-mig"))
"""Machines with MIG enabled on some GPUs, and instances on them."""


def written(name: str) -> Offer:
    """What is written down of a machine."""
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    shared, capacities, table = "\n".join(line for line in lines if not line.startswith("#")).split("\n\n")
    header, *rows = (line.split() for line in table.splitlines())
    return [{**_WHOLE, **_pairs(shared), **_cells(header, row)} for row in rows], _pairs(capacities)


def _pairs(paragraph: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in paragraph.splitlines())


def _cells(header: list[str], row: list[str]) -> dict[str, int | str]:
    return {
        _STANDARD.get(key, key): int(word) if key in _NUMBERS else word
        for key, word in zip(header, row, strict=True)
        if word != "-"
    }
