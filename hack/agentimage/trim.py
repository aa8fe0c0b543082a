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
    "certifi/tests": "tests",
}
"""Folder of site-packages: why it may go."""


def main() -> int:
    """Exit status 1 when a folder is not where it is said to be."""
    site = Path(sysconfig.get_path("purelib"))
    missing = [name for name in UNUSED if not (site / name).is_dir()]
    if missing:
        print(f"trim.py names what is not in {site}: {', '.join(missing)}", file=sys.stderr)
        return 1
    for name in UNUSED:
        shutil.rmtree(site / name)
    for stub in site.rglob("*.pyi"):
        stub.unlink()
    for script in Path(
        sysconfig.get_path("scripts")
    ).iterdir():  # of the venv and of packages; the agent's own comes later
        if not script.name.startswith("python"):
            script.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
