# SPDX-License-Identifier: Apache-2.0
"""rootfs: links are followed inside the driver root and never lead out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.prepare import rootfs
from tests.fakes import driver_roots


@pytest.fixture
def root(tmp_path: Path) -> rootfs.DriverRoot:
    mount = tmp_path / "root"
    driver_roots.file(mount, "/usr/lib64/real.so")
    for inside, target in {
        "/lib64": "usr/lib64",
        "/absolute": "/usr/lib64",
        "/usr/lib64/up.so": "../../../../../../usr/lib64/real.so",
        "/usr/lib64/through.so": "/absolute/./up.so",
        "/out": str(tmp_path / "secret"),
        "/usr/lib64/loop.so": "loop.so",
        "/usr/lib64/ping": "pong",
        "/usr/lib64/pong": "ping",
        "/usr/lib64/broken.so": "nowhere.so",
    }.items():
        driver_roots.link(mount, inside, target)
    (tmp_path / "secret").write_text("of the agent's own file system")
    return rootfs.DriverRoot(Path("/run/nvidia/driver"), mount=mount)


@pytest.mark.parametrize(
    ("inside", "resolved"),
    [
        ("/usr/lib64/real.so", "/usr/lib64/real.so"),
        ("usr//lib64/./real.so", "/usr/lib64/real.so"),
        ("/lib64/real.so", "/usr/lib64/real.so"),
        ("/absolute/real.so", "/usr/lib64/real.so"),
        ("/../../usr/lib64/real.so", "/usr/lib64/real.so"),
        ("/usr/lib64/up.so", "/usr/lib64/real.so"),
        ("/usr/lib64/through.so", "/usr/lib64/real.so"),
        ("/", "/"),
        ("/out", None),
        ("/usr/lib64/loop.so", None),
        ("/usr/lib64/ping", None),
        ("/usr/lib64/broken.so", None),
        ("/usr/lib64/real.so/below", None),
        ("/none", None),
    ],
)
def test_links_are_resolved_inside(root: rootfs.DriverRoot, inside: str, resolved: str | None) -> None:
    assert root.resolve(inside) == resolved


def test_the_three_spellings_of_a_path(root: rootfs.DriverRoot) -> None:
    assert root.on_host("/usr/lib64/real.so") == "/run/nvidia/driver/usr/lib64/real.so"
    assert root.seen("/usr/lib64/real.so") == root.mount / "usr/lib64/real.so"
    assert rootfs.DriverRoot(Path("/"), mount=root.mount).on_host("/usr/lib64/real.so") == "/usr/lib64/real.so"


def test_files_and_folders_are_told_apart(root: rootfs.DriverRoot) -> None:
    assert root.file("/lib64/up.so") == "/usr/lib64/real.so"
    assert root.file("/lib64") is None
    assert root.directory("/lib64") == "/usr/lib64"
    assert root.directory("/lib64/up.so") is None
    assert root.directory("/none") is None
    assert "real.so" in root.names("/usr/lib64")
    assert root.names("/none") == ()
