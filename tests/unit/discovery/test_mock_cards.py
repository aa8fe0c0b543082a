# SPDX-License-Identifier: Apache-2.0
"""IOMMU groups that follow from access control, and vital product data, in rendered machines."""

from __future__ import annotations

from discovery import vpd
from discovery.mock.recording import Tree
from tests.fakes import mockmachine

REDIRECTING = (
    "rootPort: intel-sapphire-rapids-root-port",
    "rootPort: intel-sapphire-rapids-root-port, acsRedirect: true",
)
NIC_SLOT = "{nic: connectx-7-400g-ib}"


def _groups(*changes: tuple[str, str]) -> dict[str, str | None]:
    """The last component of the group of every function."""
    tree = Tree(mockmachine.parsed(*changes).files)
    functions = [path.rpartition("/")[2] for path in tree.below("sys/bus/pci/devices")]
    found = {pci: tree.resolve(f"{tree.function(pci)}/iommu_group") for pci in functions}
    return {pci: group and group.rpartition("/")[2] for pci, group in found.items()}


def test_where_every_port_redirects_every_function_is_alone() -> None:
    groups = _groups(REDIRECTING)
    assert len(set(groups.values())) == len(groups)


def test_what_a_root_port_does_not_redirect_is_one_group() -> None:
    groups = _groups(("ports: [{nvme: samsung-pm9a3}]", "ports: [{nvme: samsung-pm9a3}, {nvme: samsung-pm9a3}]"))
    assert groups["0000:80:02.0"] == groups["0000:82:00.0"] != groups["0000:80:01.0"]
    assert len({group for pci, group in groups.items() if not pci.startswith("0000:8")}) == 1
    assert groups["0000:80:01.0"] == groups["0000:81:00.0"] != groups["0000:15:01.0"]


def test_a_downstream_port_that_does_not_redirect_joins_its_switch() -> None:
    groups = _groups(REDIRECTING, (NIC_SLOT, "{nic: connectx-7-400g-ib, acsRedirect: false}"))
    joined = {
        groups[f"0000:{pci}"] for pci in ("16:00.0", "17:00.0", "17:01.0", "17:02.0", "18:00.0", "19:00.0", "1a:00.0")
    }
    assert len(joined) == 1
    assert groups["0000:15:01.0"] not in joined


def test_without_an_iommu_there_are_no_groups() -> None:
    off = ("rootPort: intel-sapphire-rapids-root-port", "rootPort: intel-sapphire-rapids-root-port, iommu: off")
    assert set(_groups(off).values()) == {None}


def test_functions_with_the_same_word_are_one_card() -> None:
    def told(*words: str | None) -> list[vpd.Vpd | None]:
        slots = ", ".join(NIC_SLOT if word is None else f"{{nic: connectx-7-400g-ib, vpd: {word}}}" for word in words)
        tree = Tree(mockmachine.parsed((NIC_SLOT, slots)).files)
        contents = [tree.files.get(f"{tree.function(f'0000:1{digit}:00.0')}/vpd") for digit in "abc"[: len(words)]]
        assert all(content is None or isinstance(content, bytes) for content in contents)
        return [vpd.parse(content) if isinstance(content, bytes) else None for content in contents]

    one, same, other = told("one", "one", "other")
    assert one == same
    assert one is not None
    assert other is not None
    assert None not in (one.serial, one.unique, other.serial, other.unique)
    assert (one.serial, one.unique) != (other.serial, other.unique)
    assert told(None) == [None]
