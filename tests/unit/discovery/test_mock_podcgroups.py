# SPDX-License-Identifier: Apache-2.0
"""The cgroups of pods in a rendered tree: kubelet's places, both drivers, and never the kernel's own hierarchy."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path

import pytest

from discovery.mock import podcgroups

UID = "3f1c2d4e-0000-4abc-8def-0123456789ab"
DASHED = UID.replace("-", "_")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").write_text("cpu memory dmem\n")
    (tmp_path / "dmem.capacity").write_text("nvidia/0000:1b:00.0/vidmem 100\nnvidia/0000:2b:00.0/vidmem 200\n")
    return tmp_path


@pytest.mark.parametrize(
    ("qos", "driver", "place"),
    [
        ("guaranteed", "cgroupfs", f"kubepods/pod{UID}"),
        ("burstable", "cgroupfs", f"kubepods/burstable/pod{UID}"),
        ("besteffort", "cgroupfs", f"kubepods/besteffort/pod{UID}"),
        ("guaranteed", "systemd", f"kubepods.slice/kubepods-pod{DASHED}.slice"),
        (
            "burstable",
            "systemd",
            f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{DASHED}.slice",
        ),
        (
            "besteffort",
            "systemd",
            f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{DASHED}.slice",
        ),
    ],
)
def test_it_stands_where_kubelet_makes_it(
    root: Path, qos: podcgroups.Qos, driver: podcgroups.Driver, place: str
) -> None:
    made = podcgroups.make(root, UID, qos=qos, driver=driver)
    assert made == root / place
    assert made == podcgroups.make(root, UID, qos=qos, driver=driver)
    for folder in (made, made.parent):
        assert (folder / "dmem.max").read_text() == "nvidia/0000:1b:00.0/vidmem max\nnvidia/0000:2b:00.0/vidmem max\n"
    other = podcgroups.make(root, "other", qos=qos, driver=driver)
    podcgroups.remove(root, UID)
    podcgroups.remove(root, UID)
    assert not made.exists()
    assert other.is_dir()


def test_a_controller_that_is_not_handed_down_has_no_files(root: Path) -> None:
    made = podcgroups.make(root, UID, hand_down=False)
    assert not list(root.rglob("dmem.max"))
    assert (made / "cgroup.controllers").read_text() == "cpu memory\n"


def test_a_hierarchy_of_version_1_has_folders_alone(tmp_path: Path) -> None:
    made = podcgroups.make(tmp_path, UID)
    assert [path.name for path in made.iterdir()] == ["cgroup.procs"]


@pytest.mark.parametrize("uid", ["", ".", "..", "../x", "a/b", "-a", "a\n", "a" * 70])
def test_what_is_no_uid_makes_nothing(root: Path, uid: str) -> None:
    for do in (podcgroups.make, podcgroups.remove):
        with pytest.raises(ValueError, match="is no UID"):
            do(root, uid)
    assert not list(root.glob("kubepods*"))


@pytest.mark.parametrize("place", ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/proc/self", "/no/such/folder"])
def test_a_hierarchy_of_the_kernel_is_left_alone(place: str) -> None:
    for do in (podcgroups.make, podcgroups.remove):
        with pytest.raises(ValueError, match="is no hierarchy"):
            do(Path(place), UID)


def test_nor_one_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/sys/fs")
    with pytest.raises(ValueError, match="is no hierarchy"):
        podcgroups.make(tmp_path / "link", UID)


def test_many_come_at_once(root: Path) -> None:
    with futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: podcgroups.make(root, f"pod-{number % 20}"), range(60)))
    assert len(set(made)) == 20
    assert all((folder / "dmem.max").is_file() for folder in made)
    assert {path.name for path in root.iterdir()} == {"cgroup.controllers", "dmem.capacity", "kubepods"}
