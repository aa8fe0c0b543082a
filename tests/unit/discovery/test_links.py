# SPDX-License-Identifier: Apache-2.0
"""NVLinks that are down, and those that merely lead nowhere. (PCIe links: test_upward.py.)"""

from __future__ import annotations

from dataclasses import replace

from discovery import findings, links, model
from tests.fakes.wiring import at, gpu, to_switch


def noted(*gpus: model.Gpu) -> list[model.Finding]:
    found = findings.Findings()
    links.note_nvlinks_down(gpus, found)
    return list(found.result())


def down(*gpus: model.Gpu) -> list[tuple[str, str]]:
    """What costs something."""
    return [(one.subject, one.message) for one in noted(*gpus) if one.severity is model.Severity.WARNING]


def to(*far: int, active: bool = False, named: bool = True) -> tuple[model.NvLink, ...]:
    kind = model.RemoteKind.GPU if named else None
    return tuple(
        model.NvLink(link=link, active=active, remote_kind=kind, remote=at(bus) if named else None)
        for link, bus in enumerate(far)
    )


def test_one_of_several() -> None:
    assert down(gpu(at(1), *to_switch(4, down=1))) == [("0000:01:00.0", "1 of its 4 NVLinks are down: 0")]


def test_all_that_are_up_are_no_finding() -> None:
    assert down(gpu(at(1), *to_switch(4)), gpu(at(2))) == []


def test_a_card_without_a_bridge_has_nothing_wrong() -> None:
    assert noted(gpu(at(3), *to(0, 0, named=False)), gpu(at(4), *to(0, 0, named=False))) == []


def test_where_others_have_a_bridge_it_may_have_lost_its_own() -> None:
    bridged = (gpu(at(1), *to(2, 2, active=True)), gpu(at(2), *to(1, 1, active=True)))
    alone = gpu(at(3), *to(0, 0, named=False))
    (only,) = noted(*bridged, alone)
    assert (only.severity, only.subject) == (model.Severity.INFO, "0000:03:00.0")
    assert noted(*bridged, replace(alone, pci=replace(alone.pci, device_id=1))) == []


def test_links_that_name_their_far_end_lead_somewhere() -> None:
    said = "2 of its 2 NVLinks are down: 0, 1"
    assert down(gpu(at(1), *to(2, 2)), gpu(at(2), *to(1, 1))) == [("0000:01:00.0", said), ("0000:02:00.0", said)]


def test_boards_with_nvswitches_wire_every_gpu() -> None:
    dark = gpu(at(1), *to(0, 0, named=False))
    said = [("0000:01:00.0", "2 of its 2 NVLinks are down: 0, 1")]
    assert down(dark, gpu(at(2), *to_switch(2))) == said
    assert down(replace(dark, pci=replace(dark.pci, device_id=1)), gpu(at(2), *to_switch(2))) == []
