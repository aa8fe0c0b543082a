# SPDX-License-Identifier: Apache-2.0
"""nodespec: the CDI file of libraries, programs and common device nodes. Aspects: content, following the driver root,
a root without a driver, mock machines.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from driver.prepare import cdi, cdidir, devnodes, locks, nodespec, rootfs
from tests.fakes import cdi_rules, driver_roots, preparing
from tests.fakes.driver_roots import VERSION


class PresentNodes(devnodes.DeviceNodes):
    """Device nodes by name, as a test cannot make any."""

    def __init__(self, present: Collection[str]) -> None:
        super().__init__(Path("/nowhere"), mock=False)
        self.present = set(present)

    def missing(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if path not in self.present)


class Rig:
    """A node spec over a made-up Debian root, at a time of the test's own."""

    def __init__(self, directory: Path, *, mock: bool = False, installed: bool = True) -> None:
        self.now_s = 100.0
        self.now_ns = time.time_ns() + 3600 * 10**9
        self.version: str | None = VERSION
        self.root = directory / "root"
        self.nodes = PresentNodes(nodespec.COMMON_NODES[:3])
        dialect = cdi.Dialect(driver=preparing.DRIVER, mock=mock)
        self.path = directory / "cdi" / dialect.node_file
        if installed:
            driver_roots.debian(self.root)
        self.spec = nodespec.NodeSpec(
            cdidir.CdiDirectory(directory / "cdi", dialect=dialect),
            dialect=dialect,
            root=rootfs.DriverRoot(Path("/run/nvidia/driver"), mount=self.root) if installed else None,
            nodes=self.nodes,
            node_locks=locks.Locks(directory, stop=threading.Event()),
            driver_version=lambda: self.version,
            machine="x86_64",
            clock=lambda: self.now_s,
            clock_ns=lambda: self.now_ns,
        )

    def edits(self) -> dict[str, Any]:
        """What the one device of the file gives to a container."""
        data = self.path.read_bytes()
        assert cdi_rules.violations(data) == []
        (device,) = json.loads(data)["devices"]
        assert device["name"] == "driver"
        return dict(device["containerEdits"])


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_file_has_the_driver_and_the_nodes_that_are_there(rig: Rig) -> None:
    rig.spec.ensure()
    edits = rig.edits()
    assert edits["deviceNodes"] == [{"path": path} for path in nodespec.COMMON_NODES[:3]]
    mounts = {mount["containerPath"]: mount for mount in edits["mounts"]}
    assert mounts["/usr/lib64/libcuda.so.1"] == {
        "hostPath": f"/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}",
        "containerPath": "/usr/lib64/libcuda.so.1",
        "options": ["ro", "nosuid", "nodev", "bind"],
    }
    assert "/usr/bin/nvidia-smi" in mounts


def test_a_mock_machine_has_nodes_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path, mock=True, installed=False)
    rig.nodes.present.clear()
    rig.spec.ensure()
    assert rig.edits() == {"deviceNodes": [{"path": path, "hostPath": "/dev/null"} for path in nodespec.COMMON_NODES]}


def test_a_mock_machine_has_the_libraries_of_a_root_that_was_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, mock=True)
    rig.nodes.present.clear()
    rig.spec.ensure()
    edits = rig.edits()
    assert {node["hostPath"] for node in edits["deviceNodes"]} == {"/dev/null"}
    assert "/usr/lib64/libcuda.so.1" in {mount["containerPath"] for mount in edits["mounts"]}
    shutil.rmtree(rig.root)
    rig.now_s += 60
    with pytest.raises(nodespec.NodeSpecError, match="does not exist"):
        rig.spec.ensure()


def test_what_has_not_changed_is_not_written(rig: Rig) -> None:
    rig.spec.ensure()
    before = rig.path.stat()
    rig.now_s += 3600
    rig.spec.ensure()
    rig.spec.look_after()
    assert rig.path.stat() == before


def test_what_changed_a_moment_ago_is_read_once_more(rig: Rig) -> None:
    rig.spec.ensure()
    name = f"/usr/lib/x86_64-linux-gnu/libnvidia-late.so.{VERSION}"
    rig.now_ns = time.time_ns()
    driver_roots.file(rig.root, "/usr/bin/something")
    rig.spec.look_after()
    before = (rig.root / "usr/lib/x86_64-linux-gnu").stat()
    driver_roots.file(rig.root, name, driver_roots.library(None))
    os.utime(rig.root / "usr/lib/x86_64-linux-gnu", ns=(before.st_atime_ns, before.st_mtime_ns))
    rig.spec.look_after()
    assert [mount for mount in rig.edits()["mounts"] if mount["containerPath"].endswith("/libnvidia-late.so")]


def test_a_node_without_a_driver_is_watched_in_silence(rig: Rig) -> None:
    rig.version = None
    rig.nodes.present.clear()
    rig.spec.watch()
    assert rig.spec.problem() is None
    assert not rig.path.exists()
    rig.version = VERSION
    rig.spec.watch()
    assert "/dev/nvidiactl is missing" in (rig.spec.problem() or "")
    rig.version = None
    rig.spec.watch()
    assert rig.spec.problem() is None


def test_a_lost_or_edited_file_is_back_before_the_next_claim(rig: Rig) -> None:
    rig.spec.ensure()
    before = rig.edits()
    rig.path.unlink()
    rig.spec.ensure()
    assert rig.edits() == before
    rig.path.write_text("{}")
    rig.spec.ensure()
    assert rig.edits() == before


def test_another_driver_in_the_root_makes_another_file(rig: Rig) -> None:
    rig.spec.ensure()
    shutil.rmtree(rig.root)
    driver_roots.rhel(rig.root)
    rig.spec.look_after()
    hosts = {mount["hostPath"] for mount in rig.edits()["mounts"]}
    assert f"/run/nvidia/driver/usr/lib64/libcuda.so.{VERSION}" in hosts
    assert not [host for host in hosts if "x86_64-linux-gnu" in host]


def test_an_added_library_and_a_new_device_node_are_noticed(rig: Rig) -> None:
    rig.spec.ensure()
    driver_roots.file(rig.root, f"/usr/lib/x86_64-linux-gnu/libnvidia-new.so.{VERSION}", driver_roots.library(None))
    rig.nodes.present.add("/dev/nvidia-modeset")
    rig.spec.look_after()
    edits = rig.edits()
    assert {"path": "/dev/nvidia-modeset"} in edits["deviceNodes"]
    assert [mount for mount in edits["mounts"] if mount["containerPath"] == "/usr/lib64/libnvidia-new.so"]


def test_a_file_that_is_replaced_in_its_place_is_noticed(rig: Rig) -> None:
    rig.spec.ensure()
    name = f"/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.{VERSION}"
    driver_roots.file(rig.root, name, driver_roots.library("libnvidia-nvvm.so.5") + b" ")
    rig.spec.look_after()
    assert [mount for mount in rig.edits()["mounts"] if mount["containerPath"].endswith("/libnvidia-nvvm.so.5")]


def test_a_prepare_soon_after_a_look_does_not_look_again(rig: Rig) -> None:
    rig.spec.ensure()
    shutil.rmtree(rig.root)
    rig.now_s += 1
    rig.spec.ensure()
    rig.now_s += 10
    with pytest.raises(nodespec.NodeSpecError):
        rig.spec.ensure()


def test_a_root_that_lost_its_driver_stops_every_prepare_until_it_is_back(rig: Rig) -> None:
    rig.spec.ensure()
    before = rig.path.read_bytes()
    shutil.rmtree(rig.root)
    rig.root.mkdir()
    for _ in range(2):
        with pytest.raises(nodespec.NodeSpecError, match=r"no libcuda\.so"):
            rig.spec.look_after()
        with pytest.raises(nodespec.NodeSpecError, match=r"no libcuda\.so"):
            rig.spec.ensure()
    assert "no libcuda.so" in (rig.spec.problem() or "")
    assert rig.path.read_bytes() == before, "containers that run have what they have; no file without libraries is made"
    driver_roots.debian(rig.root)
    rig.spec.ensure()
    assert rig.spec.problem() is None


def test_libraries_that_do_not_fit_the_kernel_module_are_refused(rig: Rig) -> None:
    rig.spec.ensure()
    rig.version = "590.10"
    with pytest.raises(nodespec.NodeSpecError, match=r"loaded kernel module is 590\.10"):
        rig.spec.look_after()


def test_a_missing_control_node_is_said_with_the_way_to_make_it(rig: Rig) -> None:
    rig.nodes.present.remove(nodespec.CONTROL_NODE)
    with pytest.raises(nodespec.NodeSpecError, match="/dev/nvidiactl is missing: load the NVIDIA driver"):
        rig.spec.ensure()


def test_a_file_that_cannot_be_written_is_said_with_its_path(rig: Rig) -> None:
    rig.path.mkdir(parents=True)
    with pytest.raises(nodespec.NodeSpecError, match=str(rig.path)):
        rig.spec.ensure()
    rig.path.rmdir()
    rig.spec.ensure()
    assert rig.edits()["mounts"]


def test_what_containers_would_get_is_said_once_however_often_it_cannot_be_written(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig.path.parent.write_text("no folder")
    for _ in range(3):
        with pytest.raises(nodespec.NodeSpecError):
            rig.spec.ensure()
    rig.path.parent.unlink()
    rig.spec.ensure()
    assert caplog.text.count("Containers get") == 1
    assert caplog.text.count("No container can get a GPU") == 1
