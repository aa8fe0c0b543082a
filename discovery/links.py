# SPDX-License-Identifier: Apache-2.0
"""Links that are worse than they could be: PCIe links narrower than both ends allow, NVLinks that are down. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from discovery import findings, model


def degraded(gpus: Iterable[model.Gpu], bridges: Iterable[model.Bridge], found: findings.Findings) -> None:
    """Notes the degraded links of GPUs. PCIe speed is left alone: an idle GPU lowers it. NVLinks count as down where
    others of the same GPU are up; a board without a bridge plugged in has none up and nothing wrong.
    """
    ports = {bridge.pci.address: bridge.pci for bridge in bridges}
    for gpu in gpus:
        link = gpu.pci.link
        port = ports.get(gpu.pci.bridges[-1]) if gpu.pci.bridges else None
        if link is not None and link.current_width is not None:
            widths = [link.max_width, port.link.max_width if port is not None and port.link is not None else None]
            possible = min((width for width in widths if width is not None), default=0)
            if link.current_width < possible:
                found.warning(
                    "pcie-link-narrow",
                    gpu.address,
                    f"its PCIe link runs with {link.current_width} of {possible} lanes; reseat the card or check its slot",
                )
        down = [str(nvlink.link) for nvlink in gpu.nvlinks if not nvlink.active]
        if down and len(down) < len(gpu.nvlinks):
            found.warning(
                "nvlink-down", gpu.address, f"{len(down)} of its {len(gpu.nvlinks)} NVLinks are down: {', '.join(down)}"
            )
