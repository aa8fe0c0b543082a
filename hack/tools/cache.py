# SPDX-License-Identifier: Apache-2.0
"""Where things that were built or fetched are kept between runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folder() -> Path:
    """The folder of all of them: $NEARFIELD_CACHE, or as the XDG Base Directory Specification has it."""
    given = os.environ.get("NEARFIELD_CACHE")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has a relative path ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "nearfield"


@contextlib.contextmanager
def made(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends well; of several that make it at once the first one stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield making
        making.chmod(0o755)
        try:
            making.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
