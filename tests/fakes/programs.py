# SPDX-License-Identifier: Apache-2.0
"""Shell scripts in the place of programs."""

from __future__ import annotations

from pathlib import Path


class Programs:
    """A folder of scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, name: str, script: str) -> Path:
        """A script, in the place of one of that name."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path
