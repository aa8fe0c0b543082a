# SPDX-License-Identifier: Apache-2.0
"""The links above a function, the narrowest of them, and what is said of those that are worse than they could be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import findings, links, model, upward
from discovery.address import PciAddress, parse
from discovery.model import LinkLimit, PortType
from tests.fakes import wiring

ROOT, UP, DOWN, DOWN2, GPU, NIC = (parse(f"0000:0{i}:00.0") for i in range(1, 7))
CHAIN = (ROOT, UP, DOWN)
TYPES = {ROOT: PortType.ROOT, UP: PortType.UPSTREAM, DOWN: PortType.DOWNSTREAM, DOWN2: PortType.DOWNSTREAM}


def link(width: int | None, speed: float | None, *, of: int | None = 16, best: float | None = 32.0) -> model.PcieLink:
    return model.PcieLink(max_width=of, current_width=width, max_speed_gts=best, current_speed_gts=speed)


FULL = link(16, 32.0)


def bridges(**links: model.PcieLink | None) -> dict[PciAddress, model.Bridge]:
    chains = {ROOT: (), UP: (ROOT,), DOWN: (ROOT, UP), DOWN2: (ROOT, UP)}
    names = {ROOT: "root", UP: "up", DOWN: "down", DOWN2: "down2"}
    return {
        where: model.Bridge(
            pci=replace(wiring.function(where, bridges=chains[where]), link=links.get(names[where], FULL)),
            port_type=port,
        )
        for where, port in TYPES.items()
    }


def gpu(own: model.PcieLink | None = FULL, chain: tuple[PciAddress, ...] = CHAIN) -> model.PciFunction:
    return replace(wiring.function(GPU, bridges=chain), link=own)


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        (FULL, {}, LinkLimit(at=GPU, width=16, speed_gts=32.0)),  # of equal ones the nearest
        (link(16, 2.5), {}, LinkLimit(at=GPU, width=16, speed_gts=32.0)),  # idle, and counts with what it can
        (FULL, {"up": link(8, 32.0)}, LinkLimit(at=UP, width=8, speed_gts=32.0)),
        (FULL, {"up": link(16, 16.0, best=16.0)}, LinkLimit(at=UP, width=16, speed_gts=16.0)),
        (FULL, {"root": link(16, 16.0, best=16.0)}, LinkLimit(at=UP, width=16, speed_gts=16.0)),  # the port's side
        (link(8, 32.0), {"up": link(16, 8.0, best=8.0)}, LinkLimit(at=UP, width=16, speed_gts=8.0)),
        (link(8, 8.0, best=8.0), {"up": link(16, 5.0, best=5.0)}, LinkLimit(at=GPU, width=8, speed_gts=8.0)),
        (link(8, 8.0, best=8.0), {"up": link(16, 2.5, best=2.5)}, LinkLimit(at=UP, width=16, speed_gts=2.5)),
        (link(16, 64.0, best=64.0), {"down": link(16, 64.0, best=64.0)}, LinkLimit(at=UP, width=16, speed_gts=32.0)),
        (None, {}, LinkLimit(at=GPU, width=16)),  # the port tells the width; the speed takes both ends
        (FULL, {"up": None}, LinkLimit(at=GPU, width=16)),
        (link(4, None, best=None), {"up": link(8, 32.0)}, LinkLimit(at=GPU, width=4)),
        (FULL, {"up": None, "root": None}, None),
        (link(None, 32.0), {"down": link(None, 32.0)}, None),
    ],
)
def test_the_narrowest_link(
    own: model.PcieLink | None, above: dict[str, model.PcieLink | None], expected: LinkLimit | None
) -> None:
    assert upward.Ways(bridges(**above).values()).narrowest(gpu(own)) == expected


def test_inside_a_switch_there_is_no_link() -> None:
    """What an upstream port and its own downstream ports say of each other would be made up."""
    ways = upward.Ways(bridges(down=link(1, 2.5, of=1, best=2.5)).values())
    assert [found and (found.upper.address, found.lower.address) for found in ways.links(gpu())] == [
        (ROOT, UP), (DOWN, GPU),
    ]  # fmt: skip
    assert list(ways.links(gpu(chain=(ROOT, UP))))[1:] == []  # the switch's own endpoint


@pytest.mark.parametrize(
    "chain",
    [
        (),  # on a root bus, as in a virtual machine: its port is not seen
        (UP, DOWN),  # a switch without a root port
        (ROOT, parse("0000:77:00.0")),  # a bridge that was left out
    ],
)
def test_where_a_link_is_not_seen_none_is_the_narrowest(chain: tuple[PciAddress, ...]) -> None:
    assert upward.Ways(bridges().values()).narrowest(gpu(chain=chain)) is None


def test_behind_a_conventional_bridge_nothing_is_known() -> None:
    seen = bridges()
    seen[UP] = replace(seen[UP], port_type=None)
    assert upward.Ways(seen.values()).narrowest(gpu(chain=(ROOT, UP))) is None


def noted(functions: list[model.PciFunction], seen: dict[PciAddress, model.Bridge]) -> list[tuple[str, str, str]]:
    found = findings.Findings()
    links.note_degraded(functions, upward.Ways(seen.values()), found)
    return [(finding.code, finding.subject, finding.message) for finding in found.result()]


def test_links_that_do_all_they_can_are_not_mentioned() -> None:
    assert noted([gpu(), gpu(link(16, 2.5)), gpu(chain=())], bridges()) == []
    assert noted([gpu(link(4, 16.0, of=4, best=16.0))], bridges()) == []  # a drive in a wide slot
    assert noted([gpu(link(8, 32.0))], bridges(down=link(8, 32.0, of=8))) == []  # a card in a narrow slot


def test_a_narrow_link_is_named_once_however_many_are_behind_it() -> None:
    nic = replace(wiring.function(NIC, bridges=(ROOT, UP, DOWN2)), link=FULL)
    second = replace(nic, address=PciAddress(*NIC[:3], 1))
    virtual = replace(nic, address=PciAddress(*NIC[:3], 2), physical_function=NIC)
    ((code, subject, message),) = noted([gpu(), nic, second, virtual], bridges(up=link(8, 32.0)))
    assert (code, subject) == ("pcie-link-narrow", str(UP))
    assert "8 of 16 lanes (3 devices are behind it)" in message


def test_the_own_link_of_any_device_may_be_narrow() -> None:
    ((code, subject, message),) = noted([gpu(link(4, 2.5))], bridges())
    assert (code, subject) == ("pcie-link-narrow", str(GPU))
    assert "4 of 16 lanes;" in message


def test_speed_is_judged_between_switch_and_port_only() -> None:
    ((code, subject, message),) = noted([gpu(link(16, 2.5))], bridges(up=link(16, 8.0)))
    assert (code, subject) == ("pcie-link-slow", str(UP))
    assert "8 of 32 GT/s;" in message


@pytest.mark.parametrize(
    ("own", "port"), [(link(8, 32.0), None), (link(8, 32.0, of=None), FULL), (link(None, None), link(None, None))]
)
def test_without_both_ends_nobody_knows_what_a_link_could_do(
    own: model.PcieLink | None, port: model.PcieLink | None
) -> None:
    assert noted([gpu(own)], bridges(down=port)) == []


def test_what_joins_the_levels_of_one_part_is_no_link() -> None:
    inner, down = parse("0000:0a:00.0"), parse("0000:0b:00.0")
    seen = bridges(down=link(1, 2.5, of=16))
    part = {"vendor_id": 0x1000, "device_id": 0xC010, "subsystem_vendor_id": 0x1000, "subsystem_device_id": 0xA001}
    seen[UP] = replace(seen[UP], pci=replace(seen[UP].pci, **part))  # type: ignore[arg-type]
    for where, above, port in ((inner, CHAIN, PortType.UPSTREAM), (down, (*CHAIN, inner), PortType.DOWNSTREAM)):
        pci = replace(wiring.function(where, bridges=above), link=link(1, 2.5, of=16), **part)  # type: ignore[arg-type]
        seen[where] = model.Bridge(pci=pci, port_type=port)
    seen[down] = replace(seen[down], pci=replace(seen[down].pci, link=FULL))
    own = gpu(chain=(*CHAIN, inner, down))
    assert upward.Ways(seen.values()).narrowest(own) == LinkLimit(at=GPU, width=16, speed_gts=32.0)
    assert noted([own], seen) == []
    seen[inner] = replace(seen[inner], pci=replace(seen[inner].pci, device_id=0xC011))
    assert [subject for _, subject, _ in noted([own], seen)] == [str(inner)] * 2
