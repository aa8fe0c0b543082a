# SPDX-License-Identifier: Apache-2.0
"""What goes into a build, copied out of the tree at one moment, and the key of its content."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from hack.agentimage.errors import ImageError

CONTAINERFILE = Path("deploy/Containerfile")

INPUTS = (
    CONTAINERFILE,
    Path(".dockerignore"),
    Path("LICENSE"),
    Path("README.md"),
    Path("deploy/requirements-build.txt"),
    Path("deploy/requirements.txt"),
    Path("discovery"),
    Path("driver"),
    Path("hack/agentimage/rootfs.py"),
    Path("hack/agentimage/trim.py"),
    Path("proto"),
    Path("pyproject.toml"),
)
"""The Containerfile, and what it copies."""


def files(root: Path) -> Iterator[Path]:
    """The inputs' files as paths below the root, ordered. Raises ImageError when one is missing."""
    for name in INPUTS:
        if not (root / name).exists():
            raise ImageError(f"{root} has no {name}: run this in a whole checkout of the project")
        found = sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]
        for file in found:
            below = file.relative_to(root)
            if file.is_file() and "__pycache__" not in below.parts and file.suffix not in {".pyc", ".pyo"}:
                yield below


def copy(root: Path, target: Path) -> str:
    """Copies the inputs, so that an edit during the build changes nothing in it, and returns the hash of what was copied."""
    digest = hashlib.sha256()
    for name in files(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)
        content = (target / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
