# SPDX-License-Identifier: Apache-2.0
"""hwloc's lstopo: the machine's own, else from Debian's package."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hack.tools import cache, debian
from hack.tools.errors import ToolError

PACKAGE = "hwloc-nox"
"""The one without windows. Its PCI discovery by sysfs is built in; packages of plugins are not needed."""

NAMES = ("lstopo-no-graphics", "lstopo")


@dataclass(frozen=True, slots=True)
class Lstopo:
    """How to run it: the program, and what its environment needs besides."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)


def lstopo() -> Lstopo:
    """lstopo, installed now if it is not there: by root on the machine, by anybody else in the cache. Raises ToolError."""
    if (found := _on_path()) is not None:
        return Lstopo(found)
    if os.geteuid() == 0:
        print(f"Installing {PACKAGE}", file=sys.stderr, flush=True)
        debian.install([PACKAGE])
        if (found := _on_path()) is None:
            raise ToolError(f"{PACKAGE} is installed, and there is none of {', '.join(NAMES)} on the PATH")
        return Lstopo(found)
    folder = cache.folder() / PACKAGE
    if not folder.is_dir():
        print(f"Unpacking {PACKAGE} into {folder}", file=sys.stderr, flush=True)
        with cache.made(folder) as making:
            debian.unpack([PACKAGE], making)
            _unpacked(making)
    return _unpacked(folder)


def _on_path() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


def _unpacked(folder: Path) -> Lstopo:
    program = folder / "usr" / "bin" / NAMES[0]
    if not program.is_file():
        raise ToolError(f"{folder} holds no {NAMES[0]}: remove it, and it will be unpacked again")
    # Only libraries that the machine lacks are here; usr/lib/<triplet> on Debian.
    libraries = sorted({str(library.parent) for library in (folder / "usr" / "lib").rglob("*.so.*")})
    return Lstopo(str(program), {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})
