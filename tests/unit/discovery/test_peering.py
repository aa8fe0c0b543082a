# SPDX-License-Identifier: Apache-2.0
"""Whether traffic stays below the host bridge: which ports decide, both ways, and what is said where they redirect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import findings, model, peering
from discovery.address import PciAddress, parse
from discovery.model import PathClass, PortType
from tests.fakes import wiring

ROOT, UP, DOWN1, DOWN2, UP2, DOWN3, DOWN4 = (parse(f"0000:e{i}:00.0") for i in range(7))
TYPES = {
    ROOT: PortType.ROOT, UP: PortType.UPSTREAM, DOWN1: PortType.DOWNSTREAM, DOWN2: PortType.DOWNSTREAM,
    UP2: PortType.UPSTREAM, DOWN3: PortType.DOWNSTREAM, DOWN4: PortType.DOWNSTREAM,
}  # fmt: skip
NESTED = (ROOT, UP, DOWN2, UP2, DOWN3)


def bridges(*redirecting: PciAddress, unknown: tuple[PciAddress, ...] = ()) -> dict[PciAddress, model.Bridge]:
    return {
        where: model.Bridge(
            pci=wiring.function(where),
            port_type=port,
            redirects=None if where in unknown else where in redirecting,
        )
        for where, port in TYPES.items()
    }


def below(bus: int, *chain: PciAddress, root: str | None = "pci0000:00") -> model.PciFunction:
    return wiring.function(wiring.at(bus), bridges=chain, root=root)


FLAT = (below(1, ROOT, UP, DOWN1), below(2, ROOT, UP, DOWN2))
DEEP = (below(1, ROOT, UP, DOWN1), below(2, *NESTED))
INNER = (below(1, *NESTED), below(2, ROOT, UP, DOWN2, UP2, DOWN4))


@pytest.mark.parametrize(
    ("pair", "redirecting", "forth", "back"),
    [
        (FLAT, (), True, True),
        (FLAT, (DOWN1,), False, True),
        (FLAT, (DOWN2,), True, False),
        (FLAT, (ROOT,), True, True),  # what turns below never comes to the root port
        (DEEP, (DOWN3,), True, True),  # goes up from there anyway
        (DEEP, (DOWN2,), True, False),
        (DEEP, (DOWN1, DOWN2, DOWN3), False, False),
        (INNER, (DOWN2,), True, True),
        (INNER, (DOWN3,), False, True),
        (INNER, (DOWN4,), True, False),
    ],
)
def test_the_ports_of_the_switch_where_the_path_turns_decide(
    pair: tuple[model.PciFunction, model.PciFunction],
    redirecting: tuple[PciAddress, ...],
    forth: bool,
    back: bool,
) -> None:
    a, b = pair
    seen = bridges(*redirecting)
    assert peering.reaches(a, b, seen) is forth
    assert peering.reaches(b, a, seen) is back
    assert peering.direct(a, b, seen) is peering.direct(b, a, seen) is (forth and back)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (below(1), below(2), False),  # through the host bridge
        (below(1, ROOT), below(2, DOWN1), False),
        (below(1, root="pci0000:00"), below(2, root="pci0000:80"), False),
        (below(1, root=None), below(2), None),
        (below(1, ROOT), below(2, ROOT), None),  # on the bus of one port: inside a device
        (below(1, ROOT, DOWN1), below(2, ROOT, DOWN2), None),  # downstream ports without an upstream port
        (below(1, ROOT, UP), below(2, ROOT, UP, DOWN1), None),  # the switch's own endpoint
        (below(1, ROOT, UP, UP2), below(2, ROOT, UP, DOWN1), None),  # no downstream port
        (below(1), wiring.function(wiring.at(1, function=1)), None),  # functions of one device
    ],
)
def test_what_no_port_tells_is_unknown(a: model.PciFunction, b: model.PciFunction, expected: bool | None) -> None:
    assert peering.direct(a, b, bridges()) is peering.direct(b, a, bridges()) is expected


def test_a_port_that_is_not_readable_leaves_it_open_unless_the_other_decides() -> None:
    a, b = FLAT
    assert peering.direct(a, b, bridges(unknown=(DOWN1,))) is None
    assert peering.direct(a, b, bridges(DOWN2, unknown=(DOWN1,))) is False
    assert peering.direct(a, b, {}) is None


def test_nobody_sees_the_ports_of_a_group_that_an_overlay_gives() -> None:
    a, b = (replace(function, switch_source=model.Provenance.OVERLAY) for function in FLAT)
    assert peering.direct(a, b, bridges()) is None


def noted(
    gpus: tuple[model.Gpu, ...], nics: tuple[model.Nic, ...], seen: dict[PciAddress, model.Bridge]
) -> list[tuple[str, str]]:
    found = findings.Findings()
    peering.note_redirected(gpus, nics, seen, found)
    assert {finding.code for finding in found.result()} <= {"peer-to-peer-redirected"}
    return [(finding.subject, finding.message) for finding in found.result()]


def paired(pci: model.PciFunction, nic: model.Nic, *, data_direct: PciAddress | None = None) -> model.Gpu:
    chosen = model.NicPairing(address=nic.address, distance=PathClass.PIX, ties=(nic.address,), data_direct=data_direct)
    return replace(wiring.gpu(pci.address, pci=pci), nic=chosen)


def test_two_gpus_that_are_near_and_redirected_are_one_finding_for_the_switch() -> None:
    gpus = tuple(wiring.gpu(pci.address, pci=pci) for pci in (*FLAT, below(3, ROOT, UP, DOWN1)))
    assert noted(gpus, (), bridges()) == []
    assert [subject for subject, _ in noted(gpus[:2], (), bridges(DOWN2))] == [str(UP)]  # one way is enough
    ((subject, message),) = noted(gpus, (), bridges(DOWN1, DOWN2))
    assert subject == str(UP)
    assert "traffic from 0000:01:00.0 to 0000:02:00.0 and of 1 more pairs goes up" in message
    assert f"pci=disable_acs_redir={DOWN1};{DOWN2} " in message


def test_of_a_nic_its_own_requests_count() -> None:
    gpu, nic = FLAT[0], model.Nic(pci=FLAT[1])
    assert noted((paired(gpu, nic),), (nic,), bridges(DOWN1)) == []
    ((_, message),) = noted((paired(gpu, nic),), (nic,), bridges(DOWN2))
    assert f"disable_acs_redir={DOWN2} " in message


def test_a_nic_with_data_direct_speaks_from_there() -> None:
    """As rdma_topo sets up ConnectX-8: the port of the DMA function does not redirect, that of the GPU does."""
    dma = below(2, ROOT, UP, DOWN1)
    nic = model.Nic(pci=below(3, root="pci0000:80"), data_direct=dma)
    gpu = paired(below(1, *NESTED), nic, data_direct=dma.address)
    assert noted((gpu,), (nic,), bridges(ROOT, DOWN2, DOWN3)) == []
    assert [subject for subject, _ in noted((gpu,), (nic,), bridges(DOWN1))] == [str(UP)]


def test_what_is_far_or_unknown_is_no_finding() -> None:
    gpus = tuple(
        wiring.gpu(pci.address, pci=pci) for pci in (below(1), below(2), below(3, root="pci0000:80"), below(4, ROOT))
    )
    assert noted(gpus, (), bridges(*TYPES)) == []
    near = tuple(wiring.gpu(pci.address, pci=pci) for pci in FLAT)
    assert noted(near, (), bridges(unknown=tuple(TYPES))) == []


def test_a_pairing_says_whether_the_nic_reaches_the_gpu_directly() -> None:
    dma = below(7, ROOT, UP, DOWN1)
    near, far = model.Nic(pci=FLAT[1]), model.Nic(pci=below(3, root="pci0000:80"), data_direct=dma)
    gpus = (
        paired(FLAT[0], near),
        paired(below(5, *NESTED), far, data_direct=dma.address),
        wiring.gpu(below(6).address),
    )
    snapshot = model.Snapshot(
        origin=model.Origin.RECORDING, taken_at=0.0, host=model.Host(), gpus=gpus, nics=(near, far)
    )
    pairings = {gpu.address: gpu.nic for gpu in gpus if gpu.nic is not None}

    def told(known: peering.Bridges) -> list[bool | None]:
        return [pairing.direct for pairing in peering.with_direct(pairings, snapshot, known).values()]

    assert told(bridges()) == [True, True]
    assert told(bridges(DOWN1)) == [True, False]
    assert told(bridges(DOWN2)) == [False, True]
    assert told(bridges(unknown=tuple(TYPES))) == [None, None]
