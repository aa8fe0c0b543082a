# SPDX-License-Identifier: Apache-2.0
"""What the benchmark sets up.

- claims are allocated as the scheduler would, with and without admin access
- turns: everyone runs first equally often
- facts of the machine: the type of a file system by its device number
- the command line names what it does not know
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from hack.bench import __main__ as command
from hack.bench import bench, claims, machine

MOUNTS = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 0:99 / /broken
"""


def test_an_allocated_claim() -> None:
    stored = {**claims.body("c", count=2, admin=False), "metadata": {"name": "c", "namespace": "default", "uid": "u"}}
    claim = claims.allocated(stored, driver="d", node="n", devices=["gpu-0", "gpu-1"], admin=False)
    assert claim["spec"] == stored["spec"]
    assert claim["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
    assert claim["status"]["allocation"]["devices"]["results"] == [
        {"request": "gpu", "driver": "d", "pool": "n", "device": "gpu-0"},
        {"request": "gpu", "driver": "d", "pool": "n", "device": "gpu-1"},
    ]


def test_admin_access_is_asked_for_and_given() -> None:
    body = claims.body("c", count=1, admin=True)
    assert body["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] is True
    stored = {**body, "metadata": {"name": "c", "uid": "u"}}
    claim = claims.allocated(stored, driver="d", node="n", devices=["gpu-0"], admin=True)
    assert claim["status"]["allocation"]["devices"]["results"][0]["adminAccess"] is True


def test_the_path_of_a_claim() -> None:
    assert claims.Claim(uid="u", name="c").path == "/apis/resource.k8s.io/v1/namespaces/bench/resourceclaims/c"


def test_everyone_runs_first_equally_often() -> None:
    orders = [tuple(bench.rotated("abc", turn)) for turn in range(9)]
    assert Counter(order[0] for order in orders) == {"a": 3, "b": 3, "c": 3}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


@pytest.mark.parametrize(
    ("device", "kind"),
    [((253, 0), "ext4"), ((0, 21), "tmpfs"), ((0, 99), "unknown"), ((8, 1), "unknown")],
)
def test_the_type_of_a_file_system(device: tuple[int, int], kind: str) -> None:
    assert machine.file_system(MOUNTS, os.makedev(*device)) == kind


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = machine.facts(tmp_path, go=None, environment="between stand-ins")
    assert facts["cores"] >= 1
    assert facts["go"] == "none"
    assert all(value not in ("", None) for value in facts.values())


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "prepare,speed"])
    assert "'speed' is not one of prepare," in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "2.5", "many"])
def test_a_number_of_turns_is_above_zero(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([f"--rounds={number}"])
    assert f"'{number}' is not a whole number above 0" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--directory", str(tmp_path / "x")])
    assert f"{tmp_path / 'x'} is no directory" in capsys.readouterr().err


def test_a_directory_too_deep_for_sockets_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    with pytest.raises(SystemExit):
        command.main(["--directory", str(deep)])
    assert "too long for the sockets below it" in capsys.readouterr().err
    assert list(deep.iterdir()) == []
