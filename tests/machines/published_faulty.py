# SPDX-License-Identifier: Apache-2.0
"""What faulty machines offer: what the healthy ones do, without the broken GPU. Nobody else's keys change."""

from __future__ import annotations

from tests.machines.attributes import BUS_ID, NUMA, Offer, written


def _without(base: str, address: str) -> Offer:
    gpus, capacities = written(base)
    return [gpu for gpu in gpus if gpu[BUS_ID] != address], capacities


def _at_no_node(base: str) -> Offer:
    gpus, capacities = written(base)
    return [{key: value for key, value in gpu.items() if key not in (NUMA, "cpuSocket")} for gpu in gpus], capacities


def _at_node_0(base: str) -> Offer:
    gpus, capacities = written(base)
    return [gpu | {NUMA: 0, "cpuSocket": 0} for gpu in gpus], capacities


MACHINES: dict[str, Offer] = {
    "faulty-gpu-dead": _without("dgx-h100", "0000:61:00.0"),
    "faulty-gpu-vfio": _without("dgx-h100", "0000:d1:00.0"),
    "faulty-link-narrow": written("l40s-8-pcie"),
    "faulty-numa-unknown": _at_no_node("dgx-h100"),
    "faulty-numa-wrong": _at_node_0("l40s-8-pcie"),
    "faulty-nvlink-down": written("a30-4-pcie"),
}
