# SPDX-License-Identifier: Apache-2.0
"""What stands on the way up from a function: its PCIe links, the narrowest of them, and its switches. Pure.

A link joins a root port or downstream port with what is plugged in there; between the upstream port and the downstream
ports of one switch there is none. The kernel shows a link at both its ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from discovery import model, pcie
from discovery.address import PciAddress

_HAS_A_LINK = (model.PortType.ROOT, model.PortType.DOWNSTREAM)

_PAYLOAD = ((2.5, 0.8), (5.0, 0.8), (8.0, 128 / 130), (16.0, 128 / 130), (32.0, 128 / 130), (64.0, 242 / 256))
"""What encoding leaves of each speed in GT/s (PCI Express base specification 6.0, 4.2): 8b/10b, 128b/130b, flits."""


_UNKNOWN = model.PcieLink()


@dataclass(frozen=True, slots=True)
class Link:
    """One link: the port at its upper end, and the function at its lower one."""

    upper: model.PciFunction
    lower: model.PciFunction

    @property
    def width(self) -> int | None:
        """The lanes in use."""
        return _end(self.lower).current_width or _end(self.upper).current_width

    @property
    def speed_gts(self) -> float | None:
        """The speed it runs with now."""
        return _end(self.lower).current_speed_gts or _end(self.upper).current_speed_gts

    @property
    def possible_width(self) -> int | None:
        """The lanes that both ends have."""
        below, above = _end(self.lower).max_width, _end(self.upper).max_width
        return None if below is None or above is None else min(below, above)

    @property
    def possible_speed_gts(self) -> float | None:
        """The best speed that both ends can."""
        below, above = _end(self.lower).max_speed_gts, _end(self.upper).max_speed_gts
        return None if below is None or above is None else min(below, above)


class Ways:
    """The ways up from functions to their host bridges."""

    def __init__(self, bridges: Iterable[model.Bridge]) -> None:
        self.bridges: Mapping[PciAddress, model.Bridge] = {bridge.pci.address: bridge for bridge in bridges}
        self._ports = {where: bridge.port_type for where, bridge in self.bridges.items()}
        self._inner = pcie.second_levels(self.bridges)

    def switches(self, pci: model.PciFunction) -> tuple[PciAddress, ...]:
        """The switches above a function, innermost first."""
        return pcie.switches(pci.bridges, self._ports, self._inner)

    def placed(self, pci: model.PciFunction) -> model.PciFunction:
        """The function with the switches above it."""
        switches = self.switches(pci)
        if not switches:
            return pci
        return replace(pci, switches=switches, switch=switches[0], switch_source=model.Provenance.SYSFS)

    def links(self, pci: model.PciFunction) -> Iterator[Link | None]:
        """The links from the host bridge down to a function; None where there may be one of which nothing is known, as behind
        a conventional bridge, or above a first bridge that is no root port. What joins the levels of one part is none, though
        it shows itself as one.
        """
        chain = [self.bridges.get(where) for where in pci.bridges]
        if chain and (chain[0] is None or chain[0].port_type is not model.PortType.ROOT):
            yield None
        for depth, bridge in enumerate(chain):
            if bridge is not None and bridge.port_type is model.PortType.UPSTREAM:
                continue
            lower = pci if depth + 1 == len(chain) else None if (below := chain[depth + 1]) is None else below.pci
            if bridge is None or lower is None or bridge.port_type not in _HAS_A_LINK:
                yield None
            elif lower.address not in self._inner:
                yield Link(bridge.pci, lower)

    def narrowest(self, pci: model.PciFunction) -> model.LinkLimit | None:
        """The link on the way up that carries the least: lanes in use times the best speed of both ends, as an idle device
        lowers the current one; of equal ones the nearest. None where the width of any link is not known, or there is none.
        Where the speed of any is not known lanes alone decide, and no speed is given, as another link may be the slower one.
        """
        found: list[tuple[Link, int]] = []
        speeds: list[float] = []
        for link in self.links(pci):
            width = None if link is None else link.width
            if link is None or width is None:
                return None
            found.append((link, width))
            speed = link.possible_speed_gts
            if speed is not None:
                speeds.append(speed)
        if not found:
            return None
        if len(speeds) < len(found):
            link, width = min(reversed(found), key=lambda item: item[1])
            return model.LinkLimit(at=link.lower.address, width=width)
        rates = [width * _payload(speed) for (_, width), speed in zip(found, speeds, strict=True)]
        index = min(range(len(rates)), key=lambda position: (rates[position], -position))
        link, width = found[index]
        return model.LinkLimit(at=link.lower.address, width=width, speed_gts=speeds[index])


def _end(pci: model.PciFunction) -> model.PcieLink:
    return pci.link or _UNKNOWN


def _payload(speed_gts: float) -> float:
    """Of a speed in GT/s, what is left for data."""
    return speed_gts * next((share for speed, share in _PAYLOAD if speed_gts <= speed), _PAYLOAD[-1][1])
