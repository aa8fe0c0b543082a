# SPDX-License-Identifier: Apache-2.0
"""The Go yardstick: built where Go is, kept outside the tree."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hack.tools import cache, golang
from hack.tools.errors import ToolError

SOURCES = Path(__file__).parent / "gopeer"
BUILD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The built yardstick. Exactly one of `binary` and `missing` is set; `missing` says why there is none."""

    binary: Path | None
    missing: str = ""
    go: str | None = None


def key(sources: Path, *, go: str) -> str:
    """Names a build: another source, dependency or compiler gives another key."""
    digest = hashlib.sha256(go.encode())
    for path in sorted(sources.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Peer:
    """The yardstick, from the cache or built now. The first build fetches Go modules, and Go where there is none, and takes minutes."""
    try:
        command = golang.command(module=SOURCES)
    except ToolError as error:
        return Peer(binary=None, missing=f"the Go driver: {error}")
    go = subprocess.run([command, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout.strip()
    binary = cache.folder() / "bench" / f"gopeer-{key(SOURCES, go=go)}"
    if binary.exists():
        return Peer(binary=binary, go=go)
    binary.parent.mkdir(parents=True, exist_ok=True)
    temporary = binary.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [command, "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(temporary), "."],
            cwd=SOURCES,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"},
            capture_output=True,
            text=True,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        return Peer(binary=None, missing=f"the Go driver: go build failed: {error.stderr.strip()[-500:]}", go=go)
    except subprocess.TimeoutExpired:
        return Peer(binary=None, missing=f"the Go driver: go build took over {BUILD_TIMEOUT_S:.0f} s", go=go)
    temporary.rename(binary)
    return Peer(binary=binary, go=go)
