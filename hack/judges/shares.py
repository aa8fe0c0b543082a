# SPDX-License-Identifier: Apache-2.0
"""The judge of shared GPUs: whatever upstream's own allocator gives away of them, the agent prepares, whenever it is killed.

Claims for shares and for whole GPUs come and go at random, each with a pod of its own. Each allocation is prepared by a real agent on a
mock machine, and it must not refuse one. What the record holds of a GPU must never be more than there is of it; the limits
that the mock's driver holds the pods to must be those of their claims, where it has limits, and so must the shares of MPS
daemons, where there are any; the slices must never change. Now and then the agent dies, at a named point of its work or at any
moment, or the supervisor of MPS does, and is started again. When all claims are gone, nothing may be left: no limit, no daemon,
no compute mode, no row in the record, no file. The same seed gives the same claims.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from discovery import limits
from driver import quantity, values
from driver.prepare import crashpoints
from hack.judges import agentnode, playing, shareclaims, sharenode, upstream

MACHINES = ("l40s-8-pcie", "l40s-8-shares", "dgx-h100-shares+mps")
"""One whose driver limits nothing, one that counts memory by cgroup, and one with MPS, too."""

POINTS = tuple(name for name in crashpoints.NAMES if not name.startswith(("recover.", "mig.")))

_MEMORY = "memory"
_FREE = frozenset({limits.ComputeMode.DEFAULT})


@dataclass
class Tally(playing.Tally):
    """What was done, and how it went."""

    shares: int = 0
    most_sharers: int = 0
    limits: int = 0
    """Limits of pods that were compared, in all audits."""


@dataclass(frozen=True)
class _Pod:
    """A pod that has a claim."""

    uid: str
    cgroup: Path | None


class Player(playing.Player[sharenode.SharedNode, Tally]):
    """One sequence on one node."""

    def __init__(
        self, machine: str, node: sharenode.SharedNode, allocator: upstream.Allocator, odds: playing.Odds
    ) -> None:
        super().__init__(Tally(machine), node, allocator, odds)
        self._author: shareclaims.Author
        self._pods: dict[values.ClaimRef, _Pod] = {}
        self._room: Mapping[str, Mapping[str, int]] = {}
        self._limits = False

    def _begin(self) -> Sequence[upstream.Body]:
        offered = {device["name"]: device for body in self._slices for device in body["spec"].get("devices") or []}
        self._room = {
            name: {what: int(quantity.parse(of["value"])) for what, of in device["capacity"].items()}
            for name, device in offered.items()
        }
        self._limits = all(
            device["attributes"]["memoryEnforcement"] == {"string": "cgroup"} for device in offered.values()
        )
        self._author = shareclaims.Author(self._odds.seed, min(room[_MEMORY] for room in self._room.values()))
        return shareclaims.CLASSES

    def _write(self, name: str) -> upstream.Body:
        return self._author.claim(name)

    def _attempt(self, claim: upstream.Body) -> upstream.Attempt:
        return self._allocator.attempt([claim], (), shares=self._results())

    def _allocate(self, claim: upstream.Body, results: Sequence[upstream.Result]) -> values.ClaimRef:
        uid = f"{self.tally.steps:08x}-0000-4000-8000-{self._draw.getrandbits(48):012x}"
        ref, cgroup = self._node.run_pod(claim, results, uid)
        self._pods[ref] = _Pod(uid, cgroup)
        return ref

    def _compare(self, ref: values.ClaimRef, answer: values.Prepared) -> None:
        results = self._held[ref]
        given = Counter((device.device, device.share_id) for device in answer.devices)
        if given != Counter((result.device, result.share_id) for result in results):
            raise agentnode.NodeError(
                f"{ref} has {playing.spelled(results)} and was answered {sorted(given.elements())}"
            )
        self.tally.shares += len(results)

    def _ended(self, ref: values.ClaimRef) -> None:
        self._node.end_pod(self._pods.pop(ref).uid)

    def _strike(self) -> bool:
        """The supervisor of MPS, where there is one."""
        if isinstance(self._node, sharenode.SupervisedNode) and self._draw.random() < 0.25:
            self._node.supervise()
            return True
        return False

    def _look(self) -> None:
        """What the record holds of each device is there."""
        sums: dict[str, Counter[str]] = {name: Counter() for name in self._room}
        for row in self._node.rows():
            for result in row.results:
                sums[result.device]["shares"] += 1
                for what, amount in result.consumed_capacity.items():
                    if what != "shares":
                        sums[result.device][what] += int(quantity.parse(amount))
        for name, taken in sums.items():
            if over := {what: amount for what, amount in taken.items() if amount > self._room[name][what]}:
                raise agentnode.NodeError(f"{name} has {self._room[name]}, and the record holds {over} of it")
        self.tally.most_sharers = max(self.tally.most_sharers, *(taken["shares"] for taken in sums.values()))

    def _settle(self) -> None:
        if self._limits:
            wanted = self._wanted_limits()
            pods = {str(pod.cgroup): pod.uid for pod in self._pods.values()}
            self._node.settle(
                lambda: self._node.limited(pods) == wanted,
                f"exactly {len(wanted)} limits",
                otherwise=lambda: _difference(self._node.limited(pods), wanted),
            )
            self.tally.limits += len(wanted)
        if isinstance(self._node, sharenode.SupervisedNode):
            shares = frozenset(result.share_id for result in self._results())
            self._node.settle(lambda: self._node.mps_shares() == shares, f"daemons for exactly {len(shares)} shares")
        if not self._held:
            self._node.settle(lambda: self._node.modes() <= _FREE, "compute modes as they were")

    def _wanted_limits(self) -> dict[tuple[str, str], int]:
        """What each pod has of each GPU, by all its shares together; a share that is all of one has no limit."""
        wanted: Counter[tuple[str, str]] = Counter()
        for ref, results in self._held.items():
            for result in results:
                if (amount := int(quantity.parse(result.consumed[_MEMORY]))) < self._most(result.device):
                    wanted[result.device, self._pods[ref].uid] += amount
        return dict(wanted)

    def _most(self, device: str) -> int:
        """The most that shares can have of a GPU's memory."""
        return self._room[device][_MEMORY] >> 30 << 30


def _difference(there: Mapping[tuple[str, str], int], wanted: Mapping[tuple[str, str], int]) -> str:
    """Which limits are not those that are wanted."""
    return ", ".join(
        f"the limit of pod {pod} at {device} is {there.get((device, pod))} in place of {wanted.get((device, pod))} bytes"
        for device, pod in sorted(there.keys() | wanted.keys())
        if there.get((device, pod)) != wanted.get((device, pod))
    )


@contextlib.contextmanager
def _player(machine: str, program: Path, odds: playing.Odds) -> Iterator[Player]:
    with upstream.started(program) as allocator, sharenode.shared(machine) as node:
        yield Player(machine, node, allocator, odds)


GAME: playing.Game[sharenode.SharedNode, Tally] = playing.Game(
    name="shares",
    gpus="shared",
    machines=MACHINES,
    long=(*MACHINES, "h100-16-pcie", "cloud-vm-t4"),
    steps=160,
    points=POINTS,
    moment_s=0.03,
    table={
        "machine": lambda tally: tally.machine,
        "steps": lambda tally: tally.steps,
        "allocated": lambda tally: tally.allocated,
        "shares": lambda tally: tally.shares,
        "did not fit": lambda tally: tally.refused,
        "most sharers": lambda tally: tally.most_sharers,
        "crashes": lambda tally: tally.crashes,
        "given up": lambda tally: tally.abandoned,
        "audits": lambda tally: tally.audits,
        "limits": lambda tally: tally.limits,
        "seconds": lambda tally: f"{tally.seconds:.0f}",
    },
    player=_player,
)


def main(argv: Sequence[str]) -> int:
    """Plays, and prints what was done. 0: the agent refused nothing and left nothing, 1: it did, or could not be judged."""
    return 1 if playing.play(GAME, playing.parser(GAME).parse_args(argv)) is None else 0
