# SPDX-License-Identifier: Apache-2.0
"""The Recording document.

- it reads back as it was written, and is written the same every time
- nothing in it can be written outside of its directory
- what is too large, damaged or malformed is refused, with the place
"""

from __future__ import annotations

import gzip
import json
import posixpath
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.errors import DocumentError
from discovery.mock import fault, recording
from discovery.mock.recording import Entry, Link
from tests.fakes import mockmachine


def _document(**changes: Any) -> bytes:
    document = {"apiVersion": recording.API_VERSION, "kind": "Recording", "name": "x", "files": {}, **changes}
    return json.dumps({key: value for key, value in document.items() if value is not ...}).encode()


def test_a_machine_reads_back_as_it_was_written() -> None:
    machine = mockmachine.parsed(("nvlink:", "faults: [{kind: xid, target: gpu1, xid: 79, at: 2}]\nnvlink:"))
    dumped = recording.dump(machine)
    assert recording.load(dumped, name="x") == machine
    assert recording.load(gzip.compress(dumped), name="x") == machine
    assert recording.dump(recording.load(dumped, name="x")) == dumped


def test_every_file_has_a_line_of_its_own() -> None:
    machine = mockmachine.parsed()
    assert recording.dump(machine).count(b"\n") >= len(machine.files)


def test_the_three_kinds_of_files_are_kept_apart() -> None:
    files: dict[str, Entry] = {"sys/text": "a\n", "sys/binary": b"\xff\x00", "sys/link": Link("text")}
    machine = recording.Recording(name="x", files=files)
    assert recording.load(recording.dump(machine), name="x").files == files


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"etc/passwd": "x"}, "begins with one of sys/, proc/, dev/"),
        ({"/sys/x": "x"}, "begins with one of"),
        ({"sys": "x"}, "begins with one of"),
        ({"sys/../x": "x"}, r"no empty, '\.' or '\.\.' component"),
        ({"sys//x": "x"}, "no empty"),
        ({"sys/./x": "x"}, "no empty"),
        ({"sys/x\0": "x"}, "no empty"),
        ({"sys/" + "a" * 256: "x"}, "no file can have this name"),
        ({"sys" + "/a" * 600: "x"}, "no file can have this name"),
        ({"sys/a": Link("/etc")}, "a target is relative"),
        ({"sys/a": Link("../../etc")}, "leads out of the recording"),
        ({"sys/a": Link("../..")}, "leads out of the recording"),
        ({"sys/a": Link("../etc")}, "leads out of the recording"),
        ({"sys/a": Link("b/../../../etc")}, "only at its beginning"),
        ({"sys/a": Link("")}, "a target is relative"),
        ({"sys/a": Link("../dev/x"), "sys/a/b": "x"}, "is a link and cannot have 'sys/a/b' below it"),
        ({"sys/a": "x", "sys/a/b/c": "x"}, "is a file and cannot have 'sys/a/b/c' below it"),
    ],
)
def test_a_path_that_could_leave_the_directory_is_refused(files: dict[str, Entry], why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        recording.Recording(name="x", files=files)


_PARTS = st.lists(st.sampled_from(["..", "sys", "dev", "a", "b", ".", ""]), min_size=1, max_size=6)


@settings(max_examples=120)
@given(_PARTS, _PARTS)
def test_what_is_accepted_stays_inside(path: list[str], target: list[str]) -> None:
    files: dict[str, Entry] = {"/".join(path): Link("/".join(target))}
    if not list(recording.path_problems(files)):
        resolved = posixpath.normpath(posixpath.join("/root", posixpath.dirname("/".join(path)), "/".join(target)))
        assert resolved == "/root" or resolved.split("/")[2] in recording.ROOTS
        assert ".." not in target[next((i for i, part in enumerate(target) if part != ".."), len(target)) :]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b'{"kind": "Machine"}', "expected apiVersion mock.nearfield.dev/v1alpha1 and kind Recording"),
        (_document(extra=1), "unknown field 'extra'; known are apiVersion"),
        (_document(files=[]), "files: expected an object"),
        (_document(files={"sys/a": 1}), "files.'sys/a'.: expected text"),
        (_document(files={"sys/a": {"base64": "%"}}), "files.'sys/a'.: not base64"),
        (_document(files={"sys/a": {"base64": "AA==", "link": "b"}}), "expected text"),
        (_document(files={"sys/a": {"link": "/etc/shadow"}}), "a target is relative"),
        (_document(files={"sys/\ud800": "x"}), "no file can have this name"),
        (_document(files={"sys/a": "\ud800"}), "lone surrogate"),
        (_document(name=3), "name: expected text, found 3"),
        (_document(faults={}), "faults: expected a list"),
        (_document(faults=[{"kind": "meteor"}]), r"faults\[0\].kind: 'meteor' is none of gpu-lost"),
        (_document(faults=[{"kind": "xid"}]), r"faults\[0\].target: xid needs target"),
        (_document(nvml={"system": {}, "gpus": [{"pci": "x"}]}), r"nvml.gpus\[0\]"),
        (_document(nvml={"system": {}, "colour": 1}), "nvml: unknown field 'colour'"),
    ],
)
def test_a_malformed_document_is_refused_with_its_place(data: bytes, why: str) -> None:
    with pytest.raises(DocumentError, match=why) as raised:
        recording.load(data, name="mine.json")
    assert str(raised.value).startswith(("mine.json", "Recording x"))


def test_a_gzip_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(b" " * (recording.MAX_BYTES + 1), compresslevel=9)
    assert len(bomb) < 100_000
    with pytest.raises(DocumentError, match="larger than 64 MiB"):
        recording.load(bomb, name="bomb.json.gz")


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(_document() * 1000)[:40])
    with pytest.raises(DocumentError, match=r"cut\.json\.gz: damaged gzip"):
        recording.read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="cannot be read"):
        recording.read(tmp_path / "nothing.json")


def test_a_fault_that_cannot_be_is_refused() -> None:
    with pytest.raises(DocumentError, match="link-down takes no xid"):
        recording.Recording(
            name="x", files={}, faults=(fault.Fault(kind=fault.Kind.LINK_DOWN, target=mockmachine.GPU0, xid=3),)
        )


def test_a_tree_answers_by_links() -> None:
    tree = recording.Tree(mockmachine.parsed().files)
    directory = tree.function(mockmachine.GPU0)
    assert directory == "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0"
    assert tree.text(f"{directory}/vendor") == "0x10de"
    assert "sys/bus/pci/drivers/nvidia/0000:18:00.0" in tree.links_into(directory)
    assert f"{directory}/config" in tree.below(directory)
    assert tree.resolve(f"{directory}/vendor") is None
    assert tree.function("0000:ff:00.0") is None
