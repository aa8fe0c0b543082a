# SPDX-License-Identifier: Apache-2.0
"""metadata, metadatadir: what containers can read of their devices. Aspects: paths, content, shares, limits of the format, hostile
input, files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.errors import RecordError
from driver.prepare import ledger, metadata, metadatadir
from driver.sharing import shares
from tests.fakes import preparing

REF = preparing.ref(1)
GPU, OTHER = preparing.NAMES[:2]
DRIVER = preparing.DRIVER
PUBLISHED: dict[str, metadata.Attributes] = {
    GPU: {"productName": {"string": "NVIDIA H100 80GB HBM3"}, "uuid": {"string": "GPU-old"}, "rail": {"int": 3}},
    OTHER: {"driverVersion": {"version": "615.10.2"}},
}

USE = ledger.ShareUse(
    memory=20 << 30,
    compute=25,
    enforcement=shares.Enforcement(memory=shares.Memory.CGROUP, compute=shares.Compute.MPS),
    memory_limit=16 << 30,
    soft_limit=8 << 30,
    compute_limit=20,
)


def result(device: str = GPU, request: str = "gpu", **more: Any) -> ledger.Result:
    return ledger.Result(request=request, pool=preparing.POOL, device=device, **more)


def marked(*results: ledger.Result, name: str = REF.name, annotations: Any = None) -> tuple[ledger.Result, ...]:
    body = preparing.claim(REF, [])
    body["metadata"]["annotations"] = annotations
    return metadata.marked(results, body, replace(REF, name=name))


def entry(*results: ledger.Result) -> ledger.Entry:
    return ledger.Entry(
        claim=REF,
        state=ledger.ClaimState.COMPLETED,
        boot_id=preparing.BOOT_ID,
        devices=tuple(
            ledger.HeldDevice(name=name, address="0000:10:00.0", uuid=f"GPU-of-{name}", nodes=("/dev/nvidia0",))
            for name in dict.fromkeys(result.device for result in results)
        ),
        results=results,
        cdi_ids=tuple((f"{DRIVER}/claim={REF.uid}-{result.device}", f"{DRIVER}/node=driver") for result in results),
    )


def read(data: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, one a line."""
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.decode().splitlines()]


def documents(of: ledger.Entry, attributes: Mapping[str, metadata.Attributes] = PUBLISHED) -> dict[str, dict[str, Any]]:
    """The newest object of each file."""
    devices = {name: metadata.published(found) for name, found in attributes.items()}
    return {name: read(data)[0] for name, data in metadata.documents(of, driver=DRIVER, devices=devices)}


def test_the_first_result_of_each_request_has_the_file() -> None:
    found = marked(result(), result(OTHER), result(OTHER, "watch/slow", admin=True), result(request="watch/slow"))
    assert [one.described for one in found] == ["resourceclaims/claim-1", None, "resourceclaims/claim-1", None]
    assert metadata.requests(entry(*found)) == ("gpu", "watch")


def test_a_claim_of_a_template_is_named_as_the_pod_names_it() -> None:
    (found,) = marked(result(), annotations={metadata.POD_CLAIM: "gpus"})
    assert found.described == "resourceclaimtemplates/gpus"
    assert metadata.container_path(found.described, "gpu", DRIVER) == (
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpus/gpu/gpu.nearfield.dev-metadata.json"
    )
    assert documents(entry(found))["gpu.json"]["podClaimName"] == "gpus"


@pytest.mark.parametrize("value", ["../../../etc", "", "a/b", "A", ".", "a" * 64, "gpus\n", 7, None, ["gpus"], {}])
@pytest.mark.parametrize("hostile", [True, False])
def test_what_is_no_name_of_a_claim_in_a_pod_makes_no_path(value: Any, *, hostile: bool) -> None:
    annotations = {metadata.POD_CLAIM: value} if hostile else value
    (found,) = marked(result(), annotations=annotations)
    assert found.described == "resourceclaims/claim-1"


@pytest.mark.parametrize("name", ["..", ".", "a/../b", "", "a..b", "x" * 300])
def test_a_claim_of_an_impossible_name_has_no_file(name: str) -> None:
    assert marked(result(), name=name) == (result(),)


def test_a_request_of_an_impossible_name_has_no_file() -> None:
    found = marked(result(request=".."), result(OTHER))
    assert [one.described for one in found] == [None, "resourceclaims/claim-1"]
    assert documents(entry(*found)).keys() == {"gpu.json"}


@given(value=st.text(max_size=70))
@settings(max_examples=100)
def test_no_annotation_leads_out_of_the_folder(value: str) -> None:
    (found,) = marked(result(), annotations={metadata.POD_CLAIM: value})
    assert found.described is not None
    path = metadata.container_path(found.described, "gpu", DRIVER)
    assert os.path.normpath(path) == path
    assert path.startswith(metadata.CONTAINER_FOLDER + "/resourceclaim")


def test_a_file_is_a_stream_of_all_versions_that_say_the_same() -> None:
    devices = {name: metadata.published(found) for name, found in PUBLISHED.items()}
    ((name, data),) = metadata.documents(entry(*marked(result())), driver=DRIVER, devices=devices)
    newest, oldest = read(data)
    assert name == "gpu.json"
    assert newest == {
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1beta1",
        "metadata": {"name": "claim-1", "namespace": "team-a", "uid": REF.uid, "generation": 1},
        "requests": [
            {
                "name": "gpu",
                "devices": [
                    {
                        "driver": DRIVER,
                        "pool": preparing.POOL,
                        "name": GPU,
                        "attributes": {
                            "productName": {"string": "NVIDIA H100 80GB HBM3"},
                            "rail": {"int": 3},
                            "uuid": {"string": f"GPU-of-{GPU}"},
                        },
                    }
                ],
            }
        ],
    }
    assert oldest == {**newest, "apiVersion": "metadata.resource.k8s.io/v1alpha1"}


def test_a_request_has_all_of_its_devices_and_the_name_of_its_alternative() -> None:
    found = documents(
        entry(*marked(result(request="gpus/big"), result(OTHER, "gpus/big"), result(OTHER, "watch", admin=True)))
    )
    assert found.keys() == {"gpus.json", "watch.json"}
    (request,) = found["gpus.json"]["requests"]
    assert request["name"] == "gpus/big"
    assert [device["name"] for device in request["devices"]] == [GPU, OTHER]
    assert [device["name"] for device in found["watch.json"]["requests"][0]["devices"]] == [OTHER]


def test_a_device_that_is_not_published_has_what_the_record_says() -> None:
    (request,) = documents(entry(*marked(result())), {})["gpu.json"]["requests"]
    assert request["devices"][0]["attributes"] == {"uuid": {"string": f"GPU-of-{GPU}"}}


def test_a_share_says_what_it_is_and_what_it_is_held_to() -> None:
    one = result(share=USE, share_id="aaaa")
    two = result(share=replace(USE, memory_limit=None, soft_limit=None, compute_limit=None), share_id="bbbb")
    published = {GPU: {"memoryEnforcement": {"string": "none"}, "computeEnforcement": {"string": "none"}}}
    (request,) = documents(entry(*marked(one, two)), published)["gpu.json"]["requests"]
    assert documents(entry(*marked(result())), published)["gpu.json"]["requests"][0]["devices"][0]["attributes"] == {
        "uuid": {"string": f"GPU-of-{GPU}"},
        **published[GPU],
    }
    levels = {"memoryEnforcement": {"string": "cgroup"}, "computeEnforcement": {"string": "mps"}}
    uuid = {"uuid": {"string": f"GPU-of-{GPU}"}}
    limits = {"memoryLimit": {"int": 16 << 30}, "memorySoftLimit": {"int": 8 << 30}, "computeLimit": {"int": 20}}
    assert [device["attributes"] for device in request["devices"]] == [
        {**uuid, **levels, **limits, "shareID": {"string": "aaaa"}},
        {**uuid, **levels, "shareID": {"string": "bbbb"}},
    ]


def test_there_are_no_more_attributes_than_the_format_has_and_ours_are_among_them() -> None:
    published = {GPU: {f"a{number}": {"int": number} for number in range(40)}}
    (request,) = documents(entry(*marked(result(share=USE, share_id="aaaa"))), published)["gpu.json"]["requests"]
    found = request["devices"][0]["attributes"]
    assert len(found) == metadata.MOST_ATTRIBUTES
    assert {"uuid", "shareID", "memorySoftLimit", "a0"} <= found.keys()


def test_a_claim_that_was_prepared_before_there_were_files_has_none() -> None:
    assert documents(entry(result())) == {}


class Folder:
    """The files of claims in a folder, and what is published."""

    def __init__(self, path: Path) -> None:
        self.asked: list[Collection[str]] = []
        self.trouble: Exception | None = None
        self.files = metadatadir.MetadataDirectory(path, driver=DRIVER, published=self.published)

    def of(self, claim: ledger.Entry) -> Path:
        return self.files.path / claim.claim.uid

    def published(self, names: Collection[str]) -> Mapping[str, metadata.Attributes]:
        self.asked.append(names)
        if self.trouble is not None:
            raise self.trouble
        return PUBLISHED


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "plugins" / "dra-device-metadata")


CLAIM = entry(*marked(result(), result(OTHER, "watch")))


def modes(paths: Sequence[Path]) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


def test_files_are_written_where_they_are_mounted_from_and_anyone_may_read_them(folder: Folder) -> None:
    assert folder.files.folder(CLAIM) is None
    assert folder.files.write(CLAIM) == str(folder.of(CLAIM))
    assert folder.files.folder(CLAIM) == str(folder.of(CLAIM))
    paths = [folder.of(CLAIM) / name for name in ("gpu.json", "watch.json")]
    assert read(paths[1].read_bytes())[0]["requests"][0]["name"] == "watch"
    assert modes([*paths, *paths[0].parents[:2]]) == [0o644, 0o644, 0o755, 0o755]
    assert folder.asked == [{GPU, OTHER}]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["gpu.json", "watch.json"]


def test_the_folder_of_a_claim_counts_when_all_is_there(folder: Folder) -> None:
    folder.files.write(CLAIM)
    (folder.of(CLAIM) / "watch.json").unlink()
    assert folder.files.folder(CLAIM) is None


def test_a_claim_without_files_asks_for_nothing(folder: Folder) -> None:
    before = entry(result())
    assert folder.files.folder(before) is None
    assert folder.files.write(before) is None
    assert folder.asked == []
    assert not folder.files.path.exists()


def test_files_are_removed_and_what_was_forgotten_is_found(folder: Folder) -> None:
    folder.files.remove(REF.uid)
    assert folder.files.uids() == frozenset()
    assert folder.files.write(CLAIM) == str(folder.of(CLAIM))
    (folder.files.path / "not a claim").mkdir()
    assert folder.files.uids() == {REF.uid}
    folder.files.remove(REF.uid)
    assert folder.files.uids() == frozenset()


def test_a_record_that_cannot_be_read_costs_the_files_only(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.trouble = RecordError("the record is away")
    assert folder.files.write(CLAIM) is None
    assert "Containers of ResourceClaim team-a/claim-1" in caplog.text
    folder.trouble = None
    assert folder.files.write(CLAIM) == str(folder.of(CLAIM))


@pytest.mark.parametrize("place", ["root", "claim", "file"])
def test_something_in_the_way_costs_the_files_only(folder: Folder, place: str, tmp_path: Path) -> None:
    path = folder.of(CLAIM) / "gpu.json"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if place == "root":
        folder.files.path.parent.mkdir()
        folder.files.path.write_text("a file")
    elif place == "claim":
        folder.files.path.mkdir(parents=True)
        path.parent.write_text("a file")
    else:
        path.mkdir(parents=True)
    assert folder.files.write(CLAIM) is None
    assert folder.files.folder(CLAIM) is None
    folder.files.remove(REF.uid)


def test_a_link_in_the_place_of_a_claims_folder_is_not_followed_when_it_is_removed(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    folder.files.path.mkdir(parents=True)
    (folder.files.path / REF.uid).symlink_to(elsewhere)
    folder.files.remove(REF.uid)
    assert (elsewhere / "precious").exists()
    assert "cannot be removed" in caplog.text


def test_a_folder_that_goes_while_the_agent_runs_is_made_again(folder: Folder) -> None:
    assert folder.files.write(CLAIM) == str(folder.of(CLAIM))
    shutil.rmtree(folder.files.path.parent)
    assert folder.files.write(CLAIM) == str(folder.of(CLAIM))


def test_the_page_tells_what_a_share_has() -> None:
    page = (Path(__file__).parents[4] / "docs/metadata.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", page, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    (request,) = documents(entry(*marked(result(share=USE, share_id="aaaa"))), {})["gpu.json"]["requests"]
    own = request["devices"][0]["attributes"]
    assert told == own.keys()
    (block,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = json.loads(block)
    assert (shown["kind"], shown["apiVersion"]) == ("DeviceMetadata", metadata.VERSIONS[0])
    (device,) = shown["requests"][0]["devices"]
    assert {name: list(value) for name, value in own.items()}.items() <= {
        name: list(value) for name, value in device["attributes"].items()
    }.items()
    for described in ("resourceclaims/NAME", "resourceclaimtemplates/NAME"):
        assert f"`{metadata.container_path(described, 'REQUEST', DRIVER)}`" in page
