# SPDX-License-Identifier: Apache-2.0
"""The order in which GPUs are offered, the one preference that a driver can express. Pure.

The scheduler takes the first devices that fit, in listed order (first fit, no scoring), so those stand first whose use
costs later pods the least: of the NVLink islands the smallest first, in an island the GPUs that belong to no quad, in those
the ones that belong to no pair. Pairs lie in quads and quads in islands, so however many GPUs are taken from the front, at
most one island, one quad and one pair is partly taken; whole ones are left for constraints to find. Claims that end leave
gaps, which the next small ones fill from the front again. Without a constraint two GPUs are the next two, and a pair only
by luck: no order can do more. Group sizes are counted over all GPUs, sick ones included, and ties are broken by NUMA node
and address: the order of the others does not change when one GPU fails. docs/ordering.md has what it gains. Parts of GPUs: `bestfit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from discovery import model
from discovery.address import PciAddress

_Key = Callable[[model.Gpu], PciAddress | None]

_LEVELS: tuple[_Key, ...] = (
    lambda gpu: gpu.groups.nvlink_domain,
    lambda gpu: gpu.groups.aligned_quad,
    lambda gpu: gpu.groups.aligned_pair,
)
"""Outermost first."""


def order(gpus: Iterable[model.Gpu]) -> tuple[model.Gpu, ...]:
    """The GPUs in the order in which they are offered; depends on their set alone, not on the order given."""
    return tuple(_ordered(sorted(gpus, key=_place), _LEVELS))


def _place(gpu: model.Gpu) -> tuple[bool, int, PciAddress]:
    node = gpu.pci.numa_node
    return node is None, node or 0, gpu.address


def _ordered(gpus: list[model.Gpu], levels: tuple[_Key, ...]) -> list[model.Gpu]:
    """`gpus` in order of place -> grouped by the first level, each group ordered by the next."""
    if not levels:
        return gpus
    groups: dict[PciAddress | None, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(levels[0](gpu), []).append(gpu)
    left_over = groups.pop(None, [])
    whole = sorted(groups.values(), key=lambda group: (len(group), _place(group[0])))
    return [gpu for group in (left_over, *whole) for gpu in _ordered(group, levels[1:])]
