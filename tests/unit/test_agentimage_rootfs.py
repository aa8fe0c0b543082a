# SPDX-License-Identifier: Apache-2.0
"""The root of the image: links stay links and lead to what is copied, from Debian's merged /usr to a chain of interpreters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hack.agentimage import rootfs


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with what a base has: a merged /usr, an interpreter behind two links, certificates behind links."""
    base = tmp_path / "base"
    for folder in ("usr/bin", "usr/lib/x", "usr/share/ca", "etc/ssl/certs"):
        (base / folder).mkdir(parents=True)
    (base / "lib").symlink_to("usr/lib")
    (base / "usr/bin/python3.99").write_text("interpreter")
    (base / "usr/bin/python3.99").chmod(0o755)
    (base / "usr/bin/python3").symlink_to("python3.99")
    (base / "usr/bin/python").symlink_to(base / "usr/bin/python3")
    (base / "usr/lib/x/libc.so.6").write_text("library")
    (base / "usr/share/ca/one.crt").write_text("certificate")
    (base / "etc/ssl/certs/one.pem").symlink_to("../../../usr/share/ca/one.crt")
    (base / "etc/ssl/certs/0123.0").symlink_to("one.pem")
    return base


@pytest.fixture
def new(tmp_path: Path, base: Path) -> Path:
    """Where the base lies in the new root."""
    return tmp_path / "new" / base.relative_to("/")


def test_a_chain_of_links_is_copied_to_its_end(tmp_path: Path, base: Path, new: Path) -> None:
    rootfs.Root(tmp_path / "new").add(base / "usr/bin/python")
    assert (new / "usr/bin/python").is_symlink()
    assert (new / "usr/bin/python3").readlink() == Path("python3.99")
    assert (new / "usr/bin/python3.99").read_text() == "interpreter"
    assert (new / "usr/bin/python3.99").stat().st_mode & 0o777 == 0o755


def test_a_file_behind_a_linked_folder_lies_where_the_link_leads(tmp_path: Path, base: Path, new: Path) -> None:
    root = rootfs.Root(tmp_path / "new")
    root.add(base / "lib/x/libc.so.6")
    assert (new / "lib").readlink() == Path("usr/lib")
    assert (new / "usr/lib/x/libc.so.6").read_text() == "library"
    assert root.real == {base / "usr/lib/x/libc.so.6"}


def test_a_folder_of_links_brings_what_they_lead_to(tmp_path: Path, base: Path, new: Path) -> None:
    rootfs.Root(tmp_path / "new").add(base / "etc/ssl/certs")
    assert (new / "etc/ssl/certs/0123.0").read_text() == "certificate"
    assert (new / "usr/share/ca/one.crt").exists()


def test_a_link_to_nothing_stays_one(tmp_path: Path, base: Path, new: Path) -> None:
    (base / "etc/gone").symlink_to("nowhere")
    rootfs.Root(tmp_path / "new").add(base / "etc/gone")
    assert (new / "etc/gone").readlink() == Path("nowhere")


def test_adding_twice_changes_nothing(tmp_path: Path, base: Path, new: Path) -> None:
    root = rootfs.Root(tmp_path / "new")
    for _ in range(2):
        root.add(base / "usr/bin/python")
    assert sorted(path.name for path in (new / "usr/bin").iterdir()) == ["python", "python3", "python3.99"]


def test_standard_library_comes_without_tools_to_build_and_test() -> None:
    names = {path.name for path in rootfs.standard_library()}
    assert {"socket.py", "ssl.py"} <= names
    parts = {part for path in rootfs.standard_library() for part in path.parts}
    assert not {"ensurepip", "idlelib", "tkinter", "site-packages", "dist-packages", "__pycache__"} & parts


def test_libraries_of_the_interpreter_are_found_with_what_glibc_opens_by_name() -> None:
    found = {path.name for path in rootfs.libraries([Path(sys.executable).resolve()])}
    assert {"libc.so.6", "libgcc_s.so.1"} <= found
    assert any(name.startswith("ld-linux") for name in found)


def test_a_library_that_the_base_lacks_is_an_error(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "ldd").write_text("#!/bin/sh\necho '\tlibodd.so.1 => not found'\n")
    (fake / "ldd").chmod(0o755)
    script = "from pathlib import Path; from hack.agentimage import rootfs; rootfs.libraries([Path('/x.so')])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent.parent.parent,
        env={"PATH": f"{fake}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "libraries that the base lacks: libodd.so.1" in done.stderr
