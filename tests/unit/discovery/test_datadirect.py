# SPDX-License-Identifier: Apache-2.0
"""Data Direct functions and their NICs, from trees with vital product data in them, and by the probe as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import datadirect, errors, findings, model, pci, sysfs, vpd
from discovery.address import PciAddress, parse
from discovery.mock import vital
from tests.fakes import pcitree, wiring

DMA_CLASS = {**pcitree.NIC, "device": "0x2100", "class": "0x080100"}
DMA1, DMA2, NIC1, NIC1B, NIC2 = (
    parse(name) for name in ("0001:01:00.0", "0002:01:00.0", "0000:01:00.0", "0000:01:00.1", "0000:02:00.0")
)


def card(**fields: str) -> bytes:
    return vital.build("card", {{"unique": "V3", "serial": "SN"}[key]: value for key, value in fields.items()})


def look(
    tree: pcitree.Tree, files: sysfs.Sysfs | None = None
) -> tuple[dict[PciAddress, PciAddress], list[tuple[str, str]]]:
    """NICs with their Data Direct function, and what was noted."""
    files = files or tree.files()
    found = findings.Findings()
    functions = pci.functions(files, (), found)
    locator = pci.Locator(files, found)
    located = [(function.kind, described) for function in functions if (described := locator.describe(function))]
    nics = tuple(model.Nic(pci=function) for kind, function in located if kind is pci.Kind.NIC)
    dmas = [function for kind, function in located if kind is pci.Kind.DATA_DIRECT]
    vpds = datadirect.read(files, functions, [nic.pci for nic in nics], found)
    if vpds is not None:
        nics = datadirect.paired(dmas, nics, vpds, found)
    pairs = {nic.address: nic.data_direct.address for nic in nics if nic.data_direct is not None}
    return pairs, [(finding.code, finding.subject) for finding in found.result()]


def plant(tmp_path: Path, **cards: bytes | None) -> pcitree.Tree:
    """Functions by name, each with its vital product data."""
    tree = pcitree.Tree(tmp_path)
    for name, data in cards.items():
        where = globals()[name]
        kind = DMA_CLASS if name.startswith("DMA") else pcitree.NIC
        tree.function(f"pci{where.domain:04x}:00/{where}", **kind, vpd=data)
    return tree


def test_the_uuid_pairs_all_functions_of_a_nic(tmp_path: Path) -> None:
    one, two = card(unique="aa", serial="S"), card(unique="bb", serial="S")  # two NICs on one board
    tree = plant(tmp_path, DMA1=one, DMA2=two, NIC1=one, NIC1B=one, NIC2=two)
    assert look(tree) == ({NIC1: DMA1, NIC1B: DMA1, NIC2: DMA2}, [])


def test_without_uuids_the_serial_number_of_a_board_with_one_nic_does(tmp_path: Path) -> None:
    tree = plant(
        tmp_path, DMA1=card(serial="S"), DMA2=card(serial="T"), NIC1=card(serial="S"), NIC1B=card(serial="S"), NIC2=card(serial="T")
    )  # fmt: skip
    assert look(tree) == ({NIC1: DMA1, NIC1B: DMA1, NIC2: DMA2}, [])


@pytest.mark.parametrize(
    ("dma", "nic", "other"),
    [
        (card(unique="aa"), card(unique="bb"), card()),
        (card(unique="aa", serial="S"), card(unique="bb", serial="S"), card()),  # two NICs of one board
        (card(serial="S"), card(serial="S"), card(serial="S")),  # which of the two?
        (card(), card(), card()),
        (card(unique="aa"), None, None),
        (None, card(unique="aa"), card(unique="bb")),
    ],
)
def test_what_is_not_clear_pairs_nothing(tmp_path: Path, dma: bytes | None, nic: bytes, other: bytes) -> None:
    assert look(plant(tmp_path, DMA1=dma, NIC1=nic, NIC2=other)) == ({}, [("data-direct-unpaired", str(DMA1))])


def test_two_functions_that_name_one_nic_pair_nothing(tmp_path: Path) -> None:
    same = card(unique="aa")
    assert look(plant(tmp_path, DMA1=same, DMA2=same, NIC1=same)) == (
        {}, [("data-direct-unpaired", str(DMA1)), ("data-direct-unpaired", str(DMA2))],
    )  # fmt: skip


def test_data_that_contradict_themselves_are_a_finding_and_count_as_not_there(tmp_path: Path) -> None:
    good = card(unique="aa")
    tree = plant(tmp_path, DMA1=good, NIC1=good[:-3], NIC2=card(unique="bb"))
    assert look(tree) == ({}, [("data-direct-unpaired", str(DMA1)), ("vpd-malformed", str(NIC1))])


class Guarded(sysfs.Sysfs):
    """Keeps vital product data to itself, or fails to read them; counts who asks."""

    def __init__(self, tree: pcitree.Tree, kind: str) -> None:
        super().__init__(sys=tree.sys, proc=tree.proc)
        self.kind = kind
        self.asked: list[str] = []

    def read(self, path: str, *, limit: int = sysfs.MAX_FILE_BYTES) -> bytes | None:
        if path.endswith("/vpd"):
            self.asked.append(path)
            raise errors.SourceError("sysfs", self.kind, f"/{path} cannot be read")
        return super().read(path, limit=limit)


def test_without_the_right_to_read_it_is_said_once(tmp_path: Path) -> None:
    same = card(unique="aa")
    tree = plant(tmp_path, DMA1=same, DMA2=same, NIC1=same)
    files = Guarded(tree, "eacces")
    assert look(tree, files) == ({}, [("vpd-restricted", "sysfs")])
    assert len(files.asked) == 1


def test_a_read_that_fails_is_a_finding_of_its_own(tmp_path: Path) -> None:
    tree = plant(tmp_path, DMA1=card(), NIC1=card())
    assert look(tree, Guarded(tree, "etimedout")) == (
        {}, [("data-direct-unpaired", str(DMA1)), ("sysfs-etimedout", str(NIC1)), ("sysfs-etimedout", str(DMA1))],
    )  # fmt: skip


def test_where_no_such_function_is_nothing_is_read(tmp_path: Path) -> None:
    tree = plant(tmp_path, NIC1=card(unique="aa"))
    files = Guarded(tree, "eacces")
    assert look(tree, files) == ({}, [])
    assert files.asked == []


def test_virtual_functions_and_nics_of_others_are_not_asked(tmp_path: Path) -> None:
    same = card(unique="aa")
    tree = plant(tmp_path, DMA1=same, NIC1=same)
    for name, vendor in (("0000:01:00.2", "0x15b3"), ("0000:03:00.0", "0x8086")):
        tree.function(f"pci0000:00/{name}", **{**pcitree.NIC, "vendor": vendor}, vpd=same)
    tree.link("sys/devices/pci0000:00/0000:01:00.2/physfn", f"devices/pci0000:00/{NIC1}")
    assert look(tree) == ({NIC1: DMA1}, [])


def test_the_owners_of_a_function_do_not_depend_on_order() -> None:
    vpds = {NIC1: vpd.Vpd(unique="a"), NIC2: vpd.Vpd(unique="b"), DMA1: vpd.Vpd(unique="b"), DMA2: vpd.Vpd(unique="a")}
    nics = tuple(model.Nic(pci=wiring.function(where)) for where in (NIC2, NIC1))
    dmas = [wiring.function(where) for where in (DMA2, DMA1)]
    found = findings.Findings()
    pairs = {nic.address: nic.data_direct for nic in datadirect.paired(dmas, nics, vpds, found)}
    assert pairs == {NIC1: dmas[0], NIC2: dmas[1]}
