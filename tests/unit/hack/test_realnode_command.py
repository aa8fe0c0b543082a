# SPDX-License-Identifier: Apache-2.0
"""The command line of hack/cluster: what is understood, and what is said where it is not."""

from __future__ import annotations

import os

import pytest

from hack.realnode import __main__ as command
from hack.realnode import binaries


def test_help_tells_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in ("build", "up", "hollow", "down", "status", "kubectl", "load", "logs", "exit status"):
        assert word in shown


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["sideways"],
        ["up", "--emulate", "1.30"],
        ["up", "--gates", "A"],
        ["up", "--gates", "A=yes"],
        ["up", "--runtime-config", "=true"],
        ["up", "--hollow", "0"],
        ["up", "--hollow", "many"],
        ["up", "--machine", "dgx-h100"],
        ["load"],
        ["logs"],
    ],
)
def test_usage_is_refused_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["up"],
        ["down"],
        ["down", "--all"],
        ["status"],
        ["kubectl", "get", "pods"],
        ["load", "x.tar"],
        ["logs", "kubelet"],
        ["hollow", "--hollow", "1"],
    ],
)
def test_unprivileged_is_told_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("hack/cluster: A real node needs root")
    assert "hack/kind-up" in said


@pytest.mark.parametrize(
    "words", [["up"], ["down"], ["status"], ["kubectl", "-n", "x", "get", "pods"], ["logs", "etcd"]]
)
def test_a_bad_name_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert command.main(["--name", "Not/me", *words]) == 1
    assert "--name 'Not/me'" in capsys.readouterr().err


def test_a_cache_that_the_node_hides_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEARFIELD_CACHE", "/var/lib/cache")
    assert command.main(["build"]) == 1
    assert "NEARFIELD_CACHE" in capsys.readouterr().err
    assert binaries.path().parent.as_posix() == "/var/lib/cache"


def test_each_machine_is_that_of_the_hollow_nodes_before_it() -> None:
    words = [
        "up",
        "--hollow",
        "2",
        "--machine",
        "dgx-h100",
        "--hollow",
        "1",
        "--machine",
        "gb200-tray",
        "--hollow",
        "1",
    ]
    given = command.parser().parse_args(words)
    assert command.machines(given) == ("dgx-h100", "dgx-h100", "gb200-tray", command.DEFAULT_MACHINE)
