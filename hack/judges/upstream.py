# SPDX-License-Identifier: Apache-2.0
"""Upstream's allocator as a child process: what kube-scheduler would give which claim on one node. See scheduler/main.go."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hack.tools import cache, golang
from hack.tools.errors import ToolError

SOURCES = Path(__file__).resolve().parent / "scheduler"

Body = Mapping[str, Any]
"""An object of the API as JSON."""


class UpstreamError(Exception):
    """Upstream's allocator answered with an error, or not at all."""


class Allocator:
    """One node's. Not thread-safe. Every question is answered from the slices and from what it says is held."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def load(self, slices: Sequence[Body], classes: Sequence[Body]) -> None:
        """From now on the node has these slices."""
        self._ask({"load": {"slices": slices, "classes": classes}})

    def fit(self, claim: Body, held: Iterable[str]) -> tuple[str, ...] | None:
        """The names of the devices that the claim would get while these are held; None where it does not fit. The claim is as
        the API server stores it, so with its defaults.
        """
        results = self._ask({"fit": claim, "held": sorted(held)})["results"]
        return None if results is None else tuple(result["device"] for result in results)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question, separators=(",", ":")).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError as error:
            raise UpstreamError(f"upstream's allocator ended: {error.strerror}") from error
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise UpstreamError(f"upstream's allocator: {answer['error']}")
        return dict(answer)


@contextlib.contextmanager
def started(program: Path) -> Iterator[Allocator]:
    """An allocator for the block."""
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        try:
            yield Allocator(child)
        finally:
            child.kill()
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # of a question that a child that ended did not take
                child.stdin.close()


def build() -> Path:
    """The program, from the cache or built now; the first build fetches Go modules and takes minutes. Raises ToolError."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    program = cache.folder() / "judges" / f"scheduler-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    go = golang.command(module=SOURCES)
    print("Building upstream's allocator (the first time takes minutes)", file=sys.stderr, flush=True)
    program.parent.mkdir(parents=True, exist_ok=True)
    made = program.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [go, "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w", "-o", str(made), "."],
        cwd=SOURCES,
        env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise ToolError(f"go build of {SOURCES.name} failed: {done.stderr.strip()[-2000:]}")
    made.rename(program)
    return program
