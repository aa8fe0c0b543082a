# SPDX-License-Identifier: Apache-2.0
"""What a real node needs of the machine, and what is said where it is not there.

- Go: none, and none to be had
- programs: a static one is told from one that needs libraries
- room: a disk that is too full
- building: once for the same sources; again for others; after an interruption; what Go said when it failed
"""

from __future__ import annotations

import shutil
import stat
import struct
import sys
from pathlib import Path

import pytest

from hack.realnode import binaries, needs
from hack.realnode.errors import ClusterError
from hack.tools import cache, golang
from tests.fakes.programs import Programs

MODULE = binaries.MODULES / "kubernetes"


@pytest.mark.usefixtures("programs")
def test_without_a_go_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golang, "PLACES", "")
    monkeypatch.setenv("GOPROXY", "off")
    with pytest.raises(ClusterError, match=r"built from Go modules. Go 1\.26\.0 or newer is needed"):
        needs.go(module=MODULE)


def elf(*kinds: int) -> bytes:
    """The beginning of an ELF program with segments of these kinds (elf(5))."""
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, len(kinds), 0, 0, 0)
    return head + b"".join(struct.pack("<I", kind).ljust(56, b"\0") for kind in kinds)


@pytest.mark.parametrize(
    ("content", "static"), [(elf(1, 1), True), (elf(1, 3, 1), False), (b"#!/bin/sh\n", False), (b"", False)]
)
def test_a_static_program_names_no_loader(tmp_path: Path, content: bytes, static: bool) -> None:
    (tmp_path / "x").write_bytes(content)
    assert needs.is_static(tmp_path / "x") is static


def test_this_python_is_not_static() -> None:
    assert not needs.is_static(Path(sys.executable).resolve())


def test_a_full_disk_is_told_before_it_is_full(tmp_path: Path) -> None:
    needs.require_room(tmp_path / "not" / "there", 1, "A cluster")
    with pytest.raises(ClusterError, match=r"A cluster needs about \d+ GiB below .*are free there"):
        needs.require_room(tmp_path / "not" / "there", 1 << 60, "A cluster")


FAKE_GO = """
case "$1" in
env) echo go1.99.0;;
build)
    echo "$@" >>"$BUILDS"
    while [ "$1" != -o ]; do shift; done
    case "$2" in
    */) for name in containerd ctr; do echo built >"$2$name"; done;;
    *) echo built >"$2";;
    esac;;
esac
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the modules, which can be changed, and a cache of its own."""
    copied = tmp_path / "upstream"
    shutil.copytree(binaries.MODULES, copied)
    monkeypatch.setattr(binaries, "MODULES", copied)
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    monkeypatch.setattr(needs, "BUILD_BYTES", 0)
    return copied


def test_the_same_sources_are_built_once(sources: Path, programs: Programs, tmp_path: Path) -> None:
    programs.write("go", FAKE_GO)
    first = binaries.build()
    assert binaries.build() == first
    assert (first / "kubelet").read_text() == (first / "containerd").read_text() == "built\n"
    builds = (tmp_path / "builds").read_text().splitlines()
    assert len(builds) == len(binaries.BUILDS)
    assert all("-trimpath" in build and "-buildvcs=false" in build for build in builds)
    main = sources / "kubernetes/main.go"
    main.write_text(main.read_text() + "\n// changed\n")
    assert binaries.build() != first
    assert stat.S_IMODE(first.stat().st_mode) == 0o755


def test_what_an_interrupted_build_left_is_removed(sources: Path, programs: Programs) -> None:
    programs.write("go", FAKE_GO)
    left = cache.folder() / ".components-x"
    left.mkdir(parents=True)
    (left / "half").touch()
    folder = binaries.build()
    assert [path.name for path in cache.folder().iterdir() if path.is_dir()] == [folder.name]
    assert sources.is_dir()


@pytest.mark.usefixtures("sources")
def test_what_go_said_reaches_the_user(programs: Programs) -> None:
    programs.write("go", "[ $1 = env ] && echo go1.99.0 || { echo dial tcp: no route to host >&2; exit 1; }")
    with pytest.raises(ClusterError, match=r"go build of .*kubernetes failed: dial tcp: no route to host"):
        binaries.build()
    assert [path for path in cache.folder().iterdir() if path.is_dir()] == []
