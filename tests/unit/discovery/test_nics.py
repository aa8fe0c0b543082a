# SPDX-License-Identifier: Apache-2.0
"""NIC pairing: nearest class, all ties, balance over cards, what does not count, and rails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import findings, model, nics
from discovery.address import PciAddress, parse
from tests.fakes import wiring
from tests.fakes.wiring import at

UP, DOWN1, DOWN2, INNER = (parse(f"0000:e{i}:00.0") for i in range(4))
PORTS: dict[PciAddress, model.PortType | None] = {
    UP: model.PortType.UPSTREAM,
    DOWN1: model.PortType.DOWNSTREAM,
    DOWN2: model.PortType.DOWNSTREAM,
    INNER: model.PortType.UPSTREAM,
}


def gpu(bus: int, **place: object) -> model.Gpu:
    return wiring.gpu(at(bus), pci=wiring.function(at(bus), **place))  # type: ignore[arg-type]


def nic(
    bus: int, function: int = 0, *, rdma: str | None = None, of: PciAddress | None = None, **place: object
) -> model.Nic:
    pci = wiring.function(at(bus, function), **place)  # type: ignore[arg-type]
    if of is not None:
        pci = model.PciFunction(
            address=pci.address,
            vendor_id=1,
            device_id=1,
            class_code=1,
            host_bridge=pci.host_bridge,
            physical_function=of,
        )
    return model.Nic(pci=pci, rdma_devices=() if rdma is None else (model.RdmaDevice(name=rdma),))


def pair(
    gpus: Sequence[model.Gpu], cards: Sequence[model.Nic], rails: Mapping[PciAddress, int] | None = None
) -> nics.Pairings:
    return nics.pair(gpus, cards, PORTS, rails or {}, findings.Findings())


def chosen(pairings: nics.Pairings) -> dict[int, tuple[int, int]]:
    return {gpu.bus: (own.address.bus, own.address.function) for gpu, own in pairings.gpus.items()}


def test_the_nearest_class_wins_over_the_order() -> None:
    near = nic(9, bridges=(UP, DOWN2), rdma="mlx5_9")
    (own,) = pair([gpu(1, bridges=(UP, DOWN1))], [nic(2), near]).gpus.values()
    assert own == model.NicPairing(address=at(9), distance=model.PathClass.PIX, name="mlx5_9", ties=(at(9),), rail=0)


def test_a_nic_is_as_near_as_its_data_direct_function_where_that_is_nearer() -> None:
    near, far = wiring.function(at(8), bridges=(UP, DOWN2)), wiring.function(at(8), root="pci0000:80")
    own = gpu(1, bridges=(UP, DOWN1))
    beside = replace(nic(9, root="pci0000:80", numa=None), data_direct=near)
    (pairing,) = pair([own], [nic(2), beside]).gpus.values()
    assert (pairing.address, pairing.distance, pairing.data_direct) == (at(9), model.PathClass.PIX, at(8))
    for data_direct in (near, far):
        (pairing,) = pair([own], [replace(nic(9, bridges=(UP, DOWN2)), data_direct=data_direct)]).gpus.values()
        assert (pairing.distance, pairing.data_direct) == (model.PathClass.PIX, None)


def test_all_ties_are_kept_and_shared_out_in_the_order_of_addresses() -> None:
    pairings = pair([gpu(bus) for bus in (1, 2, 3)], [nic(bus) for bus in (4, 5, 6)])
    assert chosen(pairings) == {1: (4, 0), 2: (5, 0), 3: (6, 0)}
    assert all(own.ties == (at(4), at(5), at(6)) for own in pairings.gpus.values())


def test_a_gpu_gives_way_to_one_that_has_no_other_choice() -> None:
    both = gpu(1, root="pci0000:00", numa=0)
    one = gpu(2, root="pci0000:20", numa=0, bridges=(UP, DOWN1))
    only = nic(4, root="pci0000:20", numa=0, bridges=(UP, DOWN2))
    other = nic(5, root="pci0000:40", numa=0)
    assert chosen(pair([both, one], [only, other])) == {1: (5, 0), 2: (4, 0)}


def test_of_one_class_the_card_of_the_same_half_of_a_switch_comes_first() -> None:
    """As on DGX A100: one big switch of two levels, two GPUs and two NICs below it, all PXB to each other."""
    half = (UP, DOWN2, INNER, parse("0000:e4:00.0"))
    pairings = pair([gpu(1, bridges=(UP, DOWN1)), gpu(2, bridges=half)], [nic(3, bridges=half), nic(4, bridges=(UP,))])
    assert chosen(pairings) == {1: (4, 0), 2: (3, 0)}


def test_a_person_tells_the_halves_where_no_bridge_does() -> None:
    def grouped(function: model.PciFunction, *groups: int) -> model.PciFunction:
        switches = tuple(at(group) for group in groups)
        return replace(function, switches=switches, switch=switches[0], switch_source=model.Provenance.OVERLAY)

    gpus = [
        replace(own, pci=grouped(own.pci, *groups)) for own, groups in ((gpu(1), (0xF1, 0xF0)), (gpu(2), (0xF2, 0xF0)))
    ]
    cards = [
        replace(own, pci=grouped(own.pci, *groups)) for own, groups in ((nic(3), (0xF2, 0xF0)), (nic(4), (0xF1, 0xF0)))
    ]
    assert chosen(pair(gpus, cards)) == {1: (4, 0), 2: (3, 0)}


def test_of_equally_near_cards_the_one_with_the_faster_link_comes_first() -> None:
    """The port of the mainboard has the lowest address, and is nobody's NIC while a real one is as near."""

    def linked(card: model.Nic, width: int) -> model.Nic:
        return replace(card, pci=replace(card.pci, link=model.PcieLink(max_width=width, max_speed_gts=32.0)))

    port, fast, other = linked(nic(3), 4), linked(nic(4), 16), linked(nic(5), 16)
    assert chosen(pair([gpu(1), gpu(2)], [port, fast, other])) == {1: (4, 0), 2: (5, 0)}
    assert chosen(pair([gpu(1), gpu(2)], [port, fast])) == {1: (4, 0), 2: (3, 0)}
    assert chosen(pair([gpu(1)], [nic(3), fast])) == {1: (4, 0)}


def test_cards_are_used_before_second_ports() -> None:
    ports = [nic(4), nic(4, 1), nic(5), nic(5, 1)]
    assert chosen(pair([gpu(1), gpu(2)], ports)) == {1: (4, 0), 2: (5, 0)}
    assert chosen(pair([gpu(bus) for bus in (1, 2, 3)], ports)) == {1: (4, 0), 2: (5, 0), 3: (4, 1)}


def test_virtual_functions_are_no_candidates() -> None:
    assert chosen(pair([gpu(1)], [nic(4, 1, of=at(4)), nic(5)])) == {1: (5, 0)}


def test_what_the_node_shows_of_a_nic_changes_nothing() -> None:
    bare = [nic(4), nic(5)]
    shown = [nic(4, rdma="mlx5_0"), nic(5, rdma="mlx5_1")]
    assert chosen(pair([gpu(1), gpu(2)], bare)) == chosen(pair([gpu(1), gpu(2)], shown))


def test_there_is_no_pairing_over_an_unknown_path() -> None:
    assert pair([gpu(1, numa=None)], [nic(4, root="pci0000:80")]).gpus == {}
    assert pair([gpu(1)], []).gpus == {}


def test_rails_count_the_paired_nics() -> None:
    pairings = pair([gpu(1), gpu(2)], [nic(4), nic(5), nic(6)])
    assert pairings.rails == {at(4): 0, at(5): 1}
    assert [own.rail for own in pairings.gpus.values()] == [0, 1]
    assert [(own.rail, own.rail_source) for own in nics.with_rails([nic(4), nic(5), nic(6)], pairings)] == [
        (0, model.Provenance.SYSFS),
        (1, model.Provenance.SYSFS),
        (None, None),
    ]


def test_configured_rails_replace_counted_ones() -> None:
    found = findings.Findings()
    pairings = nics.pair([gpu(1), gpu(2)], [nic(4), nic(5)], PORTS, {at(5): 7, at(99): 1}, found)
    assert (pairings.rails, pairings.rail_source) == ({at(5): 7}, model.Provenance.OVERLAY)
    assert [own.rail for own in pairings.gpus.values()] == [None, 7]
    assert [(finding.code, finding.subject) for finding in found.result()] == [("rail-without-nic", "0000:63:00.0")]


NUMA = st.lists(st.integers(0, 1), max_size=8)


@given(NUMA, NUMA)
def test_no_card_feeds_two_gpus_while_an_equally_near_one_idles(gpu_nodes: list[int], nic_nodes: list[int]) -> None:
    gpus = [gpu(1 + i, root=f"pci0001:{i:02x}", numa=node) for i, node in enumerate(gpu_nodes)]
    cards = [nic(100 + i, root=f"pci0002:{i:02x}", numa=node) for i, node in enumerate(nic_nodes)]
    pairings = pair(gpus, cards)
    used = Counter(own.address for own in pairings.gpus.values())
    for own in pairings.gpus.values():
        assert used[own.address] <= min(used[tie] for tie in own.ties) + 1
    assert pairings == pair(list(reversed(gpus)), list(reversed(cards)))


@pytest.mark.parametrize("count", [1, 300])
def test_many_gpus_and_cards(count: int) -> None:
    gpus = [wiring.gpu(PciAddress(1, i % 256, i // 256, 0)) for i in range(count)]
    cards = [model.Nic(pci=wiring.function(PciAddress(2, i % 256, i // 256, 0))) for i in range(count)]
    assert len({own.address for own in pair(gpus, cards).gpus.values()}) == count
