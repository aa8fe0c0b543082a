# SPDX-License-Identifier: Apache-2.0
"""Runs in the image's build, under the venv's interpreter: removes what packages bring and the agent never loads.

What is named here must be there, so that the list cannot outlive its reasons.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

UNUSED: Mapping[str, str] = {
    "kubernetes/aio": "68 MB: a second client for asyncio, which nothing of the first one imports",
    "websocket/tests": "tests",
    "lxml/html": "a parser of HTML",
    "lxml/includes": "headers for those who compile against it",
    "lxml/isoschematron": "a validator",
    "lxml/objectify.*": "3 MB: another way to look at the same documents",
    "certifi/tests": "tests",
}
"""Folder or files of site-packages, as a pattern: why it may go."""

SOURCES = ("*.pyi", "*.pyx", "*.pxi")
"""What type checkers and Cython read."""


def main() -> int:
    """Exit status 1 when something is not where it is said to be."""
    site = Path(sysconfig.get_path("purelib"))
    unused = {pattern: list(site.glob(pattern)) for pattern in UNUSED}
    missing = [pattern for pattern, found in unused.items() if not found]
    if missing:
        print(f"trim.py names what is not in {site}: {', '.join(missing)}", file=sys.stderr)
        return 1
    for path in (path for found in unused.values() for path in found):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for source in (path for pattern in SOURCES for path in site.rglob(pattern)):
        source.unlink()
    for script in Path(
        sysconfig.get_path("scripts")
    ).iterdir():  # of the venv and of packages; the agent's own comes later
        if not script.name.startswith("python"):
            script.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
