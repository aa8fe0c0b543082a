# SPDX-License-Identifier: Apache-2.0
"""The Go yardstick: built where Go is or can be had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hack.tools import cache, gobuild
from hack.tools.errors import ToolError

SOURCES = Path(__file__).resolve().parent / "gopeer"


@dataclass(frozen=True)
class Peer:
    """The built yardstick. Exactly one of `binary` and `missing` is set; `missing` says why there is none."""

    binary: Path | None
    missing: str = ""
    go: str | None = None


def build() -> Peer:
    """The yardstick, from the cache or built now."""
    try:
        program = gobuild.built(SOURCES, into=cache.folder() / "bench")
    except ToolError as error:
        return Peer(binary=None, missing=f"the Go driver: {error}")
    return Peer(binary=program.path, go=program.go)
