# SPDX-License-Identifier: Apache-2.0
"""lstopo, found or installed, and where things are kept.

- one on the PATH is taken as it is
- root has it installed by apt; anybody else has it unpacked, once, in folders of their own
- what apt says reaches the user, and half a folder does not stay
- the cache is where it is asked to be; of two that make a folder at once the first stays
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from hack.tools import cache, debian, hwloc
from hack.tools.errors import ToolError
from tests.fakes.programs import Programs

LSTOPO = "#!/bin/sh\necho lstopo 2.9.0\n"

APT = """
echo "$@" >>"{log}"
for argument; do case "$argument" in Dir::Cache::Archives=*) archives=${{argument#*=}};; esac; done
case "$*" in
*install*--download-only*) echo deb >"$archives/hwloc-nox.deb"; echo deb >"$archives/libhwloc15.deb";;
*install*) printf '{lstopo}' >"{bin}/lstopo"; chmod +x "{bin}/lstopo";;
esac
"""

DPKG_DEB = """
case "$2" in
*hwloc-nox.deb) mkdir -p "$3/usr/bin"; printf '{lstopo}' >"$3/usr/bin/lstopo-no-graphics"; chmod +x "$3/usr/bin/lstopo-no-graphics";;
*) mkdir -p "$3/usr/lib/x86_64-linux-gnu"; echo >"$3/usr/lib/x86_64-linux-gnu/libhwloc.so.15";;
esac
"""


@pytest.fixture
def bare(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A machine with an apt that keeps a log, without hwloc; its programs."""
    for name in "sh", "mkdir", "chmod":
        (programs.folder / name).symlink_to(f"/bin/{name}")
    quoted = LSTOPO.replace("\n", "\\n")
    programs.write("apt-get", APT.format(log=tmp_path / "apt", bin=programs.folder, lstopo=quoted))
    programs.write("dpkg-deb", DPKG_DEB.format(lstopo=quoted))
    monkeypatch.setenv("PATH", str(programs.folder))
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "cache"))
    return programs


def said_to_apt(tmp_path: Path) -> list[str]:
    return (tmp_path / "apt").read_text().splitlines()


@pytest.mark.parametrize("name", hwloc.NAMES)
def test_one_on_the_path(bare: Programs, tmp_path: Path, name: str) -> None:
    bare.write(name, "echo lstopo 2.9.0")
    assert hwloc.lstopo() == hwloc.Lstopo(str(bare.folder / name))
    assert not (tmp_path / "apt").exists()


def test_root_installs_it(bare: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert hwloc.lstopo() == hwloc.Lstopo(str(bare.folder / "lstopo"))
    assert [line.split()[2] for line in said_to_apt(tmp_path)] == ["update", "install"]
    assert said_to_apt(tmp_path)[-1].endswith(" hwloc-nox")


def test_others_unpack_it_once(bare: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = hwloc.lstopo()
    folder = tmp_path / "cache" / "hwloc-nox"
    assert found.command == str(folder / "usr/bin/lstopo-no-graphics")
    assert found.environment == {"LD_LIBRARY_PATH": str(folder / "usr/lib/x86_64-linux-gnu")}
    before = said_to_apt(tmp_path)
    assert all("Debug::NoLocking=1" in line and "Dir::State::Lists=" in line for line in before)
    (bare.folder / "apt-get").unlink()
    assert hwloc.lstopo() == found
    assert said_to_apt(tmp_path) == before


def test_what_apt_says_reaches_the_user(bare: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bare.write("apt-get", "echo E: no such package >&2\nexit 100")
    with pytest.raises(ToolError, match="E: no such package"):
        hwloc.lstopo()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_package_without_the_program(bare: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bare.write("dpkg-deb", "")
    with pytest.raises(ToolError, match="holds no lstopo"):
        hwloc.lstopo()
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_apt(bare: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (bare.folder / "apt-get").unlink()
    with pytest.raises(ToolError, match="no apt-get here"):
        debian.install(["hwloc-nox"])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NEARFIELD_CACHE": "/c"}, "/c"),
        ({"NEARFIELD_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/nearfield"),
        ({"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}, "/h/.cache/nearfield"),
        ({"HOME": "/h"}, "/h/.cache/nearfield"),
    ],
)
def test_where_things_are_kept(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "NEARFIELD_CACHE", "XDG_CACHE_HOME":
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path(expected)


def test_the_first_of_two_that_make_a_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with cache.made(target) as second:
        (second / "who").write_text("second")
        with cache.made(target) as first:
            (first / "who").write_text("first")
    assert (target / "who").read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_folder_whose_making_failed_does_not_stay(tmp_path: Path) -> None:
    with contextlib.suppress(ToolError), cache.made(tmp_path / "target") as making:
        (making / "half").touch()
        raise ToolError
    assert list(tmp_path.iterdir()) == []
