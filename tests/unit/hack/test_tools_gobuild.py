# SPDX-License-Identifier: Apache-2.0
"""Go programs of this tree.

- built once for the same sources and compiler, again for others
- what Go said when it failed reaches the user, and nothing stays
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.tools import gobuild
from hack.tools.errors import ToolError
from tests.fakes.programs import Programs

FAKE_GO = """
case "$1" in
env) echo go1.99.{patch};;
build)
    echo "$PWD $*" >>"{builds}"
    while [ "$1" != -o ]; do shift; done
    echo built >"$2";;
esac
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "go.mod").write_text("module judge\n\ngo 1.26.0\n")
    (folder / "go.sum").write_text("a v1\n")
    (folder / "main.go").write_text("package main\n")
    return folder


@pytest.fixture
def go(programs: Programs, tmp_path: Path) -> Path:
    """A `go` that keeps a log."""
    return programs.write("go", FAKE_GO.format(patch=1, builds=tmp_path / "builds"))


@pytest.mark.usefixtures("go")
def test_the_same_sources_are_built_once(module: Path, tmp_path: Path) -> None:
    first = gobuild.built(module, into=tmp_path / "kept" / "deep")
    assert first.path.read_text() == "built\n"
    assert first.go == "go1.99.1"
    assert gobuild.built(module, into=tmp_path / "kept" / "deep") == first
    (build,) = (tmp_path / "builds").read_text().splitlines()
    assert build.startswith(f"{module} build -trimpath")
    assert list(first.path.parent.iterdir()) == [first.path]


@pytest.mark.usefixtures("go")
def test_another_source_dependency_or_compiler_is_another_build(
    module: Path, programs: Programs, tmp_path: Path
) -> None:
    into = tmp_path / "kept"
    paths = {gobuild.built(module, into=into).path}
    (module / "go.sum").write_text("a v2\n")
    paths.add(gobuild.built(module, into=into).path)
    (module / "main.go").rename(module / "other.go")
    paths.add(gobuild.built(module, into=into).path)
    programs.write("go", FAKE_GO.format(patch=2, builds=tmp_path / "builds"))
    paths.add(gobuild.built(module, into=into).path)
    assert paths == set(into.iterdir())
    assert len(paths) == 4


def test_what_go_said_reaches_the_user(module: Path, programs: Programs, tmp_path: Path) -> None:
    programs.write("go", "[ $1 = env ] && echo go1.99.1 || { echo dial tcp: no route to host >&2; exit 1; }")
    with pytest.raises(ToolError, match="go build of judge failed: dial tcp: no route to host"):
        gobuild.built(module, into=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
