# SPDX-License-Identifier: Apache-2.0
"""Small Go programs of this tree, built where they are missing and kept outside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hack.tools import golang
from hack.tools.errors import ToolError


@dataclass(frozen=True, slots=True)
class Program:
    """A built program, and the version of the compiler."""

    path: Path
    go: str


def built(module: Path, *, into: Path) -> Program:
    """The program of a Go module, from the folder `into` or built now: the first build fetches Go modules, and Go where there is
    none, and takes minutes. Raises ToolError with what Go said.
    """
    command = golang.command(module=module)
    go = golang.version(command, module=module)
    program = into / f"{module.name}-{key(module, go=go)}"
    if program.exists():
        return Program(program, go)
    print(f"Building {module.name} (the first time takes minutes)", file=sys.stderr, flush=True)
    into.mkdir(parents=True, exist_ok=True)
    made = into / f".{program.name}.{os.getpid()}"
    done = subprocess.run(
        [command, "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w", "-o", str(made), "."],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise ToolError(f"go build of {module.name} failed: {done.stderr.strip()[-2000:]}")
    made.rename(program)
    return Program(program, go)


def key(module: Path, *, go: str) -> str:
    """Names a build: another source, dependency or compiler gives another key."""
    digest = hashlib.sha256(go.encode())
    for path in sorted(module.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
