# SPDX-License-Identifier: Apache-2.0
"""Sysfs: what is absent, what is an error, bounds, and directories whose broken attributes are Findings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery import errors, findings, sysfs
from tests.fakes import pcitree


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    return pcitree.Tree(tmp_path)


def kind_of(tree: pcitree.Tree, read: str, path: str, *arguments: int) -> str:
    with pytest.raises(errors.SourceError) as caught:
        getattr(tree.files(), read)(path, *arguments)
    assert caught.value.source == "sysfs"
    assert path in str(caught.value)
    return caught.value.kind


def test_what_is_there_is_read(tree: pcitree.Tree) -> None:
    tree.write("sys/a/number", "-1")
    tree.write("sys/a/hex", "0x10de")
    tree.write("proc/text", "  two words ")
    tree.write("sys/a/list", "0-2,7")
    tree.write("sys/a/empty", "")
    tree.link("sys/a/driver", "bus/pci/drivers/nvidia")
    files = tree.files()
    assert files.number("sys/a/number") == -1
    assert files.hexadecimal("sys/a/hex", 16) == 0x10DE
    assert files.text("proc/text") == "two words"
    assert files.cpu_list("sys/a/list") == (0, 1, 2, 7)
    assert files.cpu_list("sys/a/empty") == ()
    assert files.link("sys/a/driver") == "../bus/pci/drivers/nvidia"
    assert files.names("sys/a") == ("driver", "empty", "hex", "list", "number")
    assert (files.sys, files.proc) == (tree.sys, tree.proc)


def test_what_is_not_there_is_none(tree: pcitree.Tree) -> None:
    files = tree.files()
    tree.write("sys/file", "x")
    assert files.text("sys/nothing") is None
    assert files.text("sys/file/below") is None
    assert files.link("sys/nothing") is None
    assert files.link("sys/file") is None
    assert files.names("sys/nothing") == ()
    assert files.names("sys/file") == ()
    assert files.boot_id() is None


@pytest.mark.parametrize("content", ["", "1x", "0x1", "1_000", "٣", "9" * 20, "1 2"])
def test_what_is_no_number_is_malformed(tree: pcitree.Tree, content: str) -> None:
    tree.write("sys/n", content)
    assert kind_of(tree, "number", "sys/n") == "malformed"


@pytest.mark.parametrize("content", ["", "10de", "0x", "0x1_0", "0x10000", "0xg"])
def test_what_is_no_hexadecimal_number_is_malformed(tree: pcitree.Tree, content: str) -> None:
    tree.write("sys/n", content)
    assert kind_of(tree, "hexadecimal", "sys/n", 16) == "malformed"


def test_bytes_that_are_no_text_are_malformed(tree: pcitree.Tree) -> None:
    tree.write("sys/n", b"\xff\xfe")
    assert kind_of(tree, "text", "sys/n") == "malformed"


def test_what_cannot_be_read_is_an_error_and_not_absent(tree: pcitree.Tree) -> None:
    (tree.sys / "directory").mkdir()
    assert kind_of(tree, "text", "sys/directory") == "eisdir"
    (tree.sys / "loop").symlink_to("loop")
    assert kind_of(tree, "text", "sys/loop") == "eloop"


def test_a_file_without_end_and_a_pipe_do_not_hold_the_probe(tree: pcitree.Tree) -> None:
    tree.write("sys/huge", b"1" * (sysfs.MAX_FILE_BYTES + 1))
    assert kind_of(tree, "text", "sys/huge") == "malformed"
    os.mkfifo(tree.sys / "fifo")
    assert tree.files().text("sys/fifo") == ""


def test_names_that_are_no_text_are_left_out(tree: pcitree.Tree) -> None:
    (tree.sys / "d").mkdir()
    (tree.sys / "d" / "good").touch()
    os.close(os.open(os.fsencode(tree.sys / "d") + b"/\xff", os.O_CREAT))
    (tree.sys / "link").symlink_to(os.fsdecode(b"\xff"))
    assert tree.files().names("sys/d") == ("good",)
    assert kind_of(tree, "link", "sys/link") == "malformed"


def test_a_root_that_is_no_directory_ends_it(tmp_path: Path) -> None:
    with pytest.raises(errors.ProbeError, match="for /proc") as caught:
        sysfs.Sysfs(sys=tmp_path, proc=tmp_path / "missing").check_roots()
    assert not caught.value.retryable


def test_a_directory_notes_what_is_broken_and_goes_on(tree: pcitree.Tree) -> None:
    tree.write("sys/d/good", "5")
    tree.write("sys/d/bad", "five")
    tree.write("sys/d/empty", "")
    tree.link("sys/d/driver", "bus/pci/drivers/nvidia")
    found = findings.Findings()
    directory = sysfs.Directory(tree.files(), "sys/d", subject="0000:01:00.0", found=found)
    assert directory.name == "d"
    assert directory.number("good") == 5
    assert directory.number("bad") is None
    assert directory.number("missing") is None
    assert directory.hexadecimal("bad", 8) is None
    assert directory.text("empty") is None
    assert directory.cpu_list("bad") is None
    assert directory.link_name("driver") == "nvidia"
    assert directory.below("x").path == "sys/d/x"
    assert {(finding.code, finding.subject) for finding in found.result()} == {("sysfs-malformed", "0000:01:00.0")}


@pytest.mark.parametrize(
    ("content", "cpus"),
    [("00000000,0000000f", (0, 1, 2, 3)), ("80000001,00000000", (32, 63)), ("0", ()), ("00000000,00000000", ())],
)
def test_bitmaps_of_cpus(tree: pcitree.Tree, content: str, cpus: tuple[int, ...]) -> None:
    tree.write("sys/mask", content)
    assert tree.files().cpu_mask("sys/mask") == cpus


@pytest.mark.parametrize("content", ["", "xyz", "0x1", "f" * 20_000])
def test_what_is_no_bitmap_is_malformed(tree: pcitree.Tree, content: str) -> None:
    tree.write("sys/mask", content)
    assert kind_of(tree, "cpu_mask", "sys/mask") == "malformed"


@given(st.sets(st.integers(0, sysfs.MAX_CPUS - 1), max_size=30))
def test_lists_of_cpus(cpus: set[int]) -> None:
    assert sysfs.parse_list(",".join(map(str, sorted(cpus)))) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["1-", "3-1", "0-999999999", "a", "1,,2", "-1", "65536"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        sysfs.parse_list(text)
