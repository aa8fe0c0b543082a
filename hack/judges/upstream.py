# SPDX-License-Identifier: Apache-2.0
"""Upstream's allocator as a child process: what kube-scheduler would give which claim on one node. See scheduler/main.go."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hack.tools import cache, gobuild

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
    """The program, from the cache or built now. Raises ToolError."""
    return gobuild.built(SOURCES, into=cache.folder() / "judges").path
