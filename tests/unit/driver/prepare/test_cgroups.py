# SPDX-License-Identifier: Apache-2.0
"""cgroups: the cgroup of a pod is found wherever kubelet keeps it, in both spellings, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.prepare import cgroups

UID = "0c9a4d1e-7b1f-4c55-9f5e-2b8f0f6c1a2b"
SPELT = UID.replace("-", "_")


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def folder(root: Path, inside: str) -> str:
    path = root / inside
    path.mkdir(parents=True)
    return str(path)


@pytest.mark.parametrize(
    "inside",
    [
        f"kubepods/burstable/pod{UID}",
        f"kubepods/besteffort/pod{UID}",
        f"kubepods/pod{UID}",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SPELT}.slice",
        f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SPELT}.slice",
        f"kubepods.slice/kubepods-pod{SPELT}.slice",
        # kubelet --cgroup-root, and a kubelet in a container
        f"nodes/one/kubepods/burstable/pod{UID}",
        f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{SPELT}.slice",
        f"system.slice/docker-0f.scope/kubelet/kubepods/pod{UID}",
    ],
)
def test_a_pod_is_found_wherever_kubelet_keeps_it(tmp_path: Path, inside: str) -> None:
    path = folder(tmp_path, inside)
    found = cgroups.Cgroups(tmp_path)
    assert found.find(UID) == path
    assert found.pods() == {UID: path}


def test_where_no_pod_can_have_a_cgroup_that_is_told(tmp_path: Path) -> None:
    clock = Clock()
    found = cgroups.Cgroups(tmp_path, clock=clock)
    folder(tmp_path, "system.slice")
    assert f"there is no kubepods below {tmp_path}" in str(found.problem())
    clock.now_s += 60
    folder(tmp_path, "kubepods.slice")
    assert found.problem() is None
    (tmp_path / "kubepods.slice").rmdir()
    clock.now_s += 60
    assert found.problem() is not None


def test_what_is_no_cgroup_of_a_pod_is_not_taken_for_one(tmp_path: Path) -> None:
    for inside in (
        f"elsewhere/pod{UID}",  # not below kubepods
        f"kubepods/burstable/other/pod{UID}",  # kubelet makes none there
        "kubepods/burstable/podman",
        "kubepods/burstable/pod",
        "podruntime.slice",
        f"kubepods.slice/kubepods-burstable.slice/other-pod{SPELT}.slice",
        f"kubepods.slice/pod{UID}",
    ):
        folder(tmp_path, inside)
    (tmp_path / "kubepods" / f"pod{UID}").write_text("a file")
    (tmp_path / "kubepods" / "besteffort").mkdir()
    (tmp_path / "kubepods" / "besteffort" / f"pod{UID}").symlink_to(tmp_path / "elsewhere")
    found = cgroups.Cgroups(tmp_path)
    assert found.find(UID) is None
    assert dict(found.pods()) == {"man": str(tmp_path / "kubepods" / "burstable" / "podman")}


@pytest.mark.parametrize("uid", ["", "..", "a/b", "../../x", "a\0b", "a" * 64, "-a", "ü"])
def test_a_uid_that_is_none_leads_nowhere(tmp_path: Path, uid: str) -> None:
    folder(tmp_path, "kubepods/burstable")
    (tmp_path / "x").mkdir()
    assert cgroups.Cgroups(tmp_path).find(uid) is None


def test_without_a_root_there_is_nothing(tmp_path: Path) -> None:
    found = cgroups.Cgroups(tmp_path / "none")
    assert found.find(UID) is None
    assert found.pods() == {}


def test_a_cgroup_that_comes_is_found_at_once_and_one_that_goes_is_gone(tmp_path: Path) -> None:
    folder(tmp_path, "kubepods/burstable")
    found = cgroups.Cgroups(tmp_path, clock=Clock())
    assert found.find(UID) is None
    path = folder(tmp_path, f"kubepods/burstable/pod{UID}")
    assert found.find(UID) == path
    Path(path).rmdir()
    assert found.find(UID) is None


def test_a_tree_that_comes_later_is_searched_for_again_after_a_while(tmp_path: Path) -> None:
    clock = Clock()
    found = cgroups.Cgroups(tmp_path, clock=clock)
    assert found.find(UID) is None
    path = folder(tmp_path, f"kubepods/pod{UID}")
    assert found.find(UID) is None
    clock.now_s = 1.0
    assert found.find(UID) == path


def test_pods_are_not_searched_and_loops_end(tmp_path: Path) -> None:
    inner = folder(tmp_path, f"kubepods/burstable/pod{UID}/kubepods")
    folder(tmp_path, f"kubepods/burstable/pod{UID}/kubepods/pod11111111-2222-3333-4444-555555555555")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = cgroups.Cgroups(tmp_path)
    assert list(found.pods()) == [UID]
    assert Path(inner).is_dir()


def test_a_huge_tree_is_given_up(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(40):
        deep /= "d"
    (deep / "kubepods" / f"pod{UID}").mkdir(parents=True)
    assert cgroups.Cgroups(tmp_path).find(UID) is None
