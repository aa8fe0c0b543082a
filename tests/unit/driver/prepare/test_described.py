# SPDX-License-Identifier: Apache-2.0
"""cdi, cdidir: the metadata of devices as a part of what a claim has on disk. Aspects: mounts, writing, what is lost, removing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driver.prepare import cdi, cdidir, claims, ledger, metadata, metadatadir, plan
from tests.fakes import preparing

DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=True)
REF = preparing.ref(1)
GPU, OTHER = preparing.NAMES[:2]
INSIDE = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim-1"
FILE = f"{preparing.DRIVER}-metadata.json"


def result(device: str = GPU, request: str = "gpu", *, admin: bool = False) -> ledger.Result:
    return ledger.Result(request=request, pool=preparing.POOL, device=device, admin=admin)


def entry(*results: ledger.Result, described: bool = True) -> ledger.Entry:
    body = preparing.claim(REF, [])
    planned = plan.plan_prepare(
        claims.Allocation(claim=REF, results=metadata.marked(results, body, REF) if described else results),
        devices=preparing.FixedIndex().devices,
        holders=(),
        dialect=DIALECT,
        boot_id=preparing.BOOT_ID,
    )
    assert isinstance(planned, plan.PreparePlan)
    return planned.entry


def mounts(data: bytes) -> dict[str, list[tuple[str, str]]]:
    """What each device of a claim's file mounts, by the name of the device."""
    spec: dict[str, Any] = json.loads(data)
    assert spec["kind"] == f"{preparing.DRIVER}/claim"
    found = {}
    for device in spec["devices"]:
        edits = device["containerEdits"].get("mounts", [])
        assert all(set(edit["options"]) >= {"ro", "bind"} for edit in edits)
        found[device["name"].removeprefix(f"{REF.uid}-")] = [
            (edit["hostPath"], edit["containerPath"]) for edit in edits
        ]
    return found


class Node:
    """A CDI folder with metadata beside it, both on disk."""

    def __init__(self, path: Path) -> None:
        self.metadata = path / "plugin" / "dra-device-metadata"
        self.cdi = cdidir.CdiDirectory(
            path / "cdi",
            dialect=DIALECT,
            described=metadatadir.MetadataDirectory(self.metadata, driver=preparing.DRIVER, published=lambda _: {}),
        )

    def place(self, of: ledger.Entry) -> None:
        self.cdi.write_claim(of, ledger.to_columns(of))

    def mounts(self) -> dict[str, list[tuple[str, str]]]:
        return mounts((self.cdi.path / DIALECT.claim_file(REF.uid)).read_bytes())

    def block(self) -> None:
        """From now on no metadata can be written."""
        self.metadata.rename(self.metadata.with_name("away"))
        self.metadata.write_text("in the way")


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_first_device_of_each_request_mounts_its_file() -> None:
    found = entry(result(), result(OTHER), result(preparing.NAMES[2], "watch/slow"))
    assert mounts(DIALECT.claim_spec(found, described="/host/uid")) == {
        GPU: [("/host/uid/gpu.json", f"{INSIDE}/gpu/{FILE}")],
        OTHER: [],
        preparing.NAMES[2]: [("/host/uid/watch.json", f"{INSIDE}/watch/{FILE}")],
    }


def test_a_device_that_a_claim_has_twice_mounts_both_files() -> None:
    found = entry(result(), result(request="watch", admin=True))
    assert mounts(DIALECT.claim_spec(found, described="/host/uid")) == {
        GPU: [("/host/uid/gpu.json", f"{INSIDE}/gpu/{FILE}"), ("/host/uid/watch.json", f"{INSIDE}/watch/{FILE}")]
    }


@pytest.mark.parametrize("described", [True, False])
def test_what_is_not_there_is_not_mounted(*, described: bool) -> None:
    found = entry(result(), described=described)
    assert mounts(DIALECT.claim_spec(found, described=None if described else "/host/uid")) == {GPU: []}


def test_kubelet_is_told_the_same_with_metadata_and_without() -> None:
    assert ledger.answer(entry(result())) == ledger.answer(entry(result(), described=False))


def test_the_mark_survives_in_the_record_and_in_the_file(node: Node) -> None:
    written = entry(result(), result(OTHER))
    node.place(written)
    assert node.cdi.entry(REF.uid) == written
    assert ledger.from_columns(ledger.to_columns(written)) == written


def test_files_are_there_before_what_mounts_them_and_go_with_it(node: Node) -> None:
    node.place(entry(result()))
    ((host, _),) = node.mounts()[GPU]
    assert Path(host).is_file()
    assert node.cdi.with_metadata() == {REF.uid}
    node.cdi.remove_claim(REF.uid)
    assert not Path(host).parent.exists()
    assert node.cdi.with_metadata() == frozenset()


def test_a_claim_is_prepared_without_metadata_that_cannot_be_written_and_gets_it_later(node: Node) -> None:
    written = entry(result())
    node.metadata.parent.mkdir()
    node.metadata.write_text("in the way")
    node.place(written)
    assert node.mounts() == {GPU: []}
    assert node.cdi.verify_claim(written)
    assert not node.cdi.ensure_claim(written)
    node.metadata.unlink()
    assert node.cdi.ensure_claim(written)
    assert len(node.mounts()[GPU]) == 1
    assert node.cdi.verify_claim(written)


def test_metadata_that_is_lost_comes_back(node: Node) -> None:
    written = entry(result())
    node.place(written)
    ((host, _),) = node.mounts()[GPU]
    Path(host).unlink()
    assert not node.cdi.verify_claim(written)
    assert not node.cdi.ensure_claim(written)
    assert Path(host).is_file()
    assert node.cdi.verify_claim(written)


def test_metadata_that_is_lost_for_good_is_mounted_no_more(node: Node) -> None:
    written = entry(result())
    node.place(written)
    node.block()
    assert node.cdi.ensure_claim(written)
    assert node.mounts() == {GPU: []}


def test_a_claim_from_before_there_was_metadata_is_left_as_it_is(node: Node) -> None:
    written = entry(result(), described=False)
    node.place(written)
    assert (node.cdi.path / DIALECT.claim_file(REF.uid)).read_bytes() == DIALECT.claim_spec(written)
    assert not node.cdi.ensure_claim(written)
    assert not node.metadata.exists()


def test_an_agent_that_writes_no_metadata_mounts_none_of_an_entry_that_has_some(tmp_path: Path) -> None:
    directory = cdidir.CdiDirectory(tmp_path / "cdi", dialect=DIALECT)
    written = entry(result())
    directory.write_claim(written, ledger.to_columns(written))
    assert mounts((directory.path / DIALECT.claim_file(REF.uid)).read_bytes()) == {GPU: []}
    assert not directory.ensure_claim(written)
    assert directory.verify_claim(written)
