# SPDX-License-Identifier: Apache-2.0
"""What can be said of the agent's image without building it: the Containerfile, its lists of packages, and what enters a build."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from driver import version
from hack.agentimage import context, debian

ROOT = Path(__file__).parent.parent
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

LISTS = {
    "deploy/requirements.txt": PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["nccl"],
    "deploy/requirements-build.txt": PROJECT["build-system"]["requires"],
}


def instructions() -> list[str]:
    """The Containerfile's, comments dropped and continued lines joined."""
    lines = [line for line in CONTAINERFILE.splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def copied_from_context() -> list[str]:
    return [
        word
        for line in instructions()
        if line.startswith("COPY ") and "--from=" not in line
        for word in line.split()[1:-1]
    ]


def locked(name: str) -> dict[str, tuple[Version, int]]:
    """The packages of a list: version, and how many files may be it."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[Version, int]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line.split(" --hash=")[0])
            assert line.count("--hash=sha256:") == len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?:\s|$)", line)), line
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found[canonicalize_name(requirement.name)] = (Version(pin.version), line.count("--hash="))
    return found


def test_default_base_is_a_public_python() -> None:
    assert instructions()[0] == "ARG BASE=docker.io/library/python:3.13-slim"


def test_only_the_base_argument_decides_what_it_stands_on() -> None:
    stages = [line.split()[1:] for line in instructions() if line.startswith("FROM ")]
    assert stages == [["${BASE}", "AS", "build"], ["scratch"]]


def test_last_stage_runs_nothing_and_copies_from_stages_only() -> None:
    last = instructions()[[line.startswith("FROM scratch") for line in instructions()].index(True) :]
    assert {line.split()[0] for line in last} == {"FROM", "COPY", "ENV", "LABEL", "USER", "ENTRYPOINT", "CMD"}
    assert all("--from=" in line for line in last if line.startswith("COPY"))
    assert last[-2:] == ['ENTRYPOINT ["nearfield"]', 'CMD ["run"]']


def test_it_takes_nothing_of_the_builders_machine_but_secrets() -> None:
    """No argument but the base, so that no proxy, index or password gets into the history of the image."""
    assert [line.split("=")[0] for line in instructions() if line.startswith("ARG")] == ["ARG BASE"]
    assert re.findall(r"https?://\S+", CONTAINERFILE) == []
    assert re.findall(r"--mount=type=(\w+)", CONTAINERFILE) == ["secret", "secret"]


def test_its_version_is_the_agents() -> None:
    assert f'org.opencontainers.image.version="{version.VERSION}"' in CONTAINERFILE


def test_what_it_copies_is_what_decides_whether_to_build_again() -> None:
    others = {"deploy/Containerfile", ".dockerignore"}
    assert sorted(copied_from_context()) == sorted({str(name) for name in context.INPUTS} - others)


def test_context_is_what_it_copies() -> None:
    patterns = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    assert patterns[0] == "*"
    assert sorted(line[1:] for line in patterns if line.startswith("!")) == sorted(copied_from_context())
    for unwanted in ("driver/cli/__pycache__", "driver/cli/main.pyc"):
        assert any(fnmatch.fnmatch(unwanted, pattern) for pattern in patterns[1:] if not pattern.startswith("!"))


@pytest.mark.parametrize("name", LISTS)
def test_list_of_packages_has_what_the_project_asks_for(name: str) -> None:
    pins = locked(name)
    for text in LISTS[name]:
        requirement = Requirement(text)
        pinned, files = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{name} has {requirement.name} {pinned}: run hack/lock"
        assert files, requirement.name


@pytest.mark.parametrize("name", LISTS)
def test_every_package_of_a_list_has_hashes(name: str) -> None:
    assert [package for package, (_, files) in locked(name).items() if files == 0] == []


def test_base_of_debian_packages_has_no_tool_to_build_with() -> None:
    assert not {"gcc", "build-essential", "python3-dev", "python3-pip"} & set(debian.PACKAGES)
