# SPDX-License-Identifier: Apache-2.0
"""Links that are worse than they could be: PCIe links that are narrower or slower than both ends allow, NVLinks that are down.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from discovery import findings, model, nvlink, upward
from discovery.address import PciAddress


@dataclass(slots=True)
class _Seen:
    """A link, and how many devices are behind it."""

    link: upward.Link
    devices: int = 0


def note_degraded(functions: Iterable[model.PciFunction], ways: upward.Ways, found: findings.Findings) -> None:
    """Notes the degraded PCIe links above functions, each link once.

    A link is narrow where it has fewer lanes than both ends; a link of which one end is not seen may have all that it can,
    as in a virtual machine. Speed counts on links that end in a switch only: devices lower the speed of their own when idle,
    GPUs above all, and those between a switch and the port above it keep theirs.
    """
    seen: dict[PciAddress, _Seen] = {}
    for function in functions:
        if function.physical_function is None:
            for link in ways.links(function):
                if link is not None:
                    seen.setdefault(link.upper.address, _Seen(link)).devices += 1
    for behind in seen.values():
        link = behind.link
        width, possible = link.width, link.possible_width
        shared = f" ({behind.devices} devices are behind it)" if behind.devices > 1 else ""
        if width is not None and possible is not None and width < possible:
            found.warning(
                "pcie-link-narrow",
                link.lower.address,
                f"its PCIe link runs with {width} of {possible} lanes{shared}; reseat the card or check its slot",
            )
        speed, best = link.speed_gts, link.possible_speed_gts
        if link.lower.address in ways.bridges and speed is not None and best is not None and speed < best:
            found.warning(
                "pcie-link-slow",
                link.lower.address,
                f"the PCIe link of this switch runs at {speed:g} of {best:g} GT/s{shared}; reset or reseat what it is on, or "
                f"check its riser",
            )


def note_nvlinks_down(gpus: Sequence[model.Gpu], found: findings.Findings) -> None:
    """Notes the NVLinks that are down. They count as down where something says that they lead somewhere: others of the same GPU
    are up, they still name what they end in, or others of its model have links to NVSwitches, as boards of that kind wire
    all alike. A card without a bridge plugged in has none up and nothing wrong; where others of its model here have a bridge it
    may have lost its own.
    """
    switched = _boards_with_links_to(gpus, model.RemoteKind.SWITCH)
    bridged = _boards_with_links_to(gpus, model.RemoteKind.GPU)
    for gpu in gpus:
        down = [link for link in gpu.nvlinks if not link.active]
        wired = any(link.remote is not None or link.remote_kind is not None for link in down)
        if down and (len(down) < len(gpu.nvlinks) or wired or nvlink.board(gpu) in switched):
            numbers = ", ".join(str(link.link) for link in down)
            found.warning(
                "nvlink-down", gpu.address, f"{len(down)} of its {len(gpu.nvlinks)} NVLinks are down: {numbers}"
            )
        elif down and nvlink.board(gpu) in bridged:
            found.info(
                "nvlink-down",
                gpu.address,
                f"none of its {len(gpu.nvlinks)} NVLinks is up, though other GPUs of its model here are joined; if there is a "
                "bridge on it, reseat it",
            )


def _boards_with_links_to(gpus: Iterable[model.Gpu], kind: model.RemoteKind) -> set[tuple[int | None, ...]]:
    """The models of which some GPU has an active link to something of a kind."""
    return {nvlink.board(gpu) for gpu in gpus if any(link.active and link.remote_kind is kind for link in gpu.nvlinks)}
