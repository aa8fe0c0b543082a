# SPDX-License-Identifier: Apache-2.0
"""Which engine builds and what it is told, with programs of that name that write down how they were called."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hack.agentimage import contents
from hack.agentimage.errors import ImageError

ROOT = Path(__file__).parent.parent.parent

ENGINE = """#!/bin/sh
echo "${0##*/} $*" >> "$CALLS"
[ "$1" = info ] && exit "${INFO:-0}"
[ "$1" = save ] && while [ $# -gt 0 ]; do [ "$1" = --output ] && echo archive > "$2"; shift; done
exit 0
"""


class Machine:
    """A machine with these programs, and what they were called with."""

    def __init__(self, folder: Path, *engines: str) -> None:
        self._calls = folder / "calls"
        self._calls.touch()
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in engines:
            (bin_folder / name).write_text(ENGINE)
            (bin_folder / name).chmod(0o755)
        self.environment = {
            "PATH": str(bin_folder),
            "CALLS": str(self._calls),
            "NEARFIELD_CACHE": str(folder / "cache"),
            "HOME": str(folder),
        }

    def image(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hack.agentimage", *arguments],
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


def test_docker_builds_on_the_default_base_and_the_second_build_is_the_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "docker", "podman")
    done = machine.image("--tag", "example/agent:1", "--output", str(tmp_path / "out.tar"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out.tar'}\n"
    assert (tmp_path / "out.tar").read_text() == "archive\n"
    (build,) = [call for call in machine.calls() if call.startswith("docker buildx build")]
    assert "--build-arg" not in build
    assert "--secret id=pip.conf,src=" in build
    assert "--tag example/agent:1" in build
    again = machine.image("--tag", "example/agent:1")
    assert again.returncode == 0
    assert sum(call.startswith("docker buildx build") for call in machine.calls()) == 1
    assert [path.name for path in (tmp_path / "cache/images").glob("build-*")] == []


def test_podman_builds_where_docker_does_not_answer(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "podman")
    done = machine.image("--base", "example/python:3", "--pull")
    assert done.returncode == 0, done.stderr
    (build,) = [call for call in machine.calls() if call.startswith("podman build")]
    assert "--build-arg BASE=example/python:3 --pull" in build
    assert done.stdout.strip() == str(*(tmp_path / "cache/images").glob("agent-*.tar"))


def test_an_engine_that_is_asked_for_and_does_not_answer_is_told(tmp_path: Path) -> None:
    done = Machine(tmp_path, "docker").image("--engine", "docker", INFO="1")
    assert done.returncode == 1
    assert "`docker info` fails here" in done.stderr
    assert done.stdout == ""


def test_without_an_engine_and_without_apt_the_missing_programs_are_named(tmp_path: Path) -> None:
    done = Machine(tmp_path).image()
    assert done.returncode == 1
    expected = "there is no apt-get" if os.geteuid() == 0 else "need root"
    assert expected in done.stderr


def archive(path: Path, *layers: dict[str, bytes]) -> Path:
    """A docker-archive with these files in its layers."""

    def packed(files: dict[str, bytes]) -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return data.getvalue()

    names = [f"{number}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": ["example/agent:1"], "Layers": names}]).encode()
    inner = dict(zip(names, map(packed, layers), strict=True))
    path.write_bytes(packed({"manifest.json": manifest, "config.json": b'{"config": {}}', **inner}))
    return path


def test_upper_layers_hide_what_lower_ones_have(tmp_path: Path) -> None:
    image = contents.Image.open(
        archive(tmp_path / "a.tar", {"etc/a": b"1", "etc/b": b"2"}, {"etc/.wh.a": b"", "etc/b": b"long"})
    )
    assert {str(path): entry.size for path, entry in image.files().items()} == {"/etc/b": 4}
    assert [str(path) for path, content in image.contents() if content == b"1"] == ["/etc/a"]
    assert 0 < image.packed_bytes() < (tmp_path / "a.tar").stat().st_size


@pytest.mark.parametrize("content", [b"", b"no tar"])
def test_another_file_is_no_image(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ImageError, match=r"a\.tar is no docker-archive"):
        contents.Image.open(tmp_path / "a.tar")
