# SPDX-License-Identifier: Apache-2.0
"""Upstream's allocator as a child process: what kube-scheduler would give which claim on one node. See scheduler/main.go."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hack.tools import cache, gobuild

SOURCES = Path(__file__).resolve().parent / "scheduler"

Body = Mapping[str, Any]
"""An object of the API as JSON."""


FILTER_TIMEOUT_S = 10.0
"""After this a search for one pod on one node is given up (filterTimeout of the plugin DynamicResources, by default)."""


@dataclass(frozen=True, slots=True)
class Result:
    """A device that a claim got. `request` is `<request>/<subrequest>` where the request is a list of alternatives. Of a shared device
    it is the share `share_id`, and `consumed` says what that takes of each capacity.
    """

    request: str
    device: str
    share_id: str | None = None
    consumed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt gave each claim of a pod, None where they do not fit, or where the time was over. `steps`: how many
    times the search looked for one more device. `seconds`: of one processor.
    """

    results: tuple[tuple[Result, ...], ...] | None
    steps: int
    seconds: float
    over: bool


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

    def attempt(
        self,
        claims: Sequence[Body],
        held: Iterable[str],
        *,
        shares: Iterable[Result] = (),
        limit_s: float = FILTER_TIMEOUT_S,
    ) -> Attempt:
        """What the scheduler would give a pod with these claims while others have these devices and `shares` of devices, and what
        the search cost it.
        """
        taken = [{"device": one.device, "shareID": one.share_id, "consumed": one.consumed} for one in shares]
        answer = self._ask({"attempt": claims, "held": sorted(held), "shares": taken, "limit": limit_s})
        results = answer["results"]
        return Attempt(
            results=None if results is None else tuple(tuple(map(_result, claim)) for claim in results),
            steps=answer["steps"],
            seconds=answer["seconds"],
            over=answer["over"],
        )

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


def _result(one: Mapping[str, Any]) -> Result:
    return Result(one["request"], one["device"], one.get("shareID"), one.get("consumed", {}))


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
