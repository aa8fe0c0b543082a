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

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discovery import limits
from discovery.errors import DiscoveryError
from driver import quantity, values
from driver.errors import DriverError
from driver.prepare import crashpoints
from hack.judges import agentnode, shareclaims, sharenode, upstream
from hack.tools.errors import ToolError

MACHINES = ("l40s-8-pcie", "l40s-8-shares", "dgx-h100-shares+mps")
"""One whose driver limits nothing, one that counts memory by cgroup, and one with MPS, too."""

LONG = (*MACHINES, "h100-16-pcie", "cloud-vm-t4")
"""Those of a run of so many steps or more."""

LONG_STEPS = 1000
STEPS = 160
STEPS_A_CRASH = 40
AUDIT_EVERY = 20

POINTS = tuple(name for name in crashpoints.NAMES if not name.startswith(("recover.", "mig.")))
_MOMENT_S = 0.03
"""A claim is prepared or unprepared in about this time, so that a kill within it falls into the middle of it."""

_MEMORY = "memory"
_FREE = frozenset({limits.ComputeMode.DEFAULT})


@dataclass
class Tally:
    """What was done, and how it went."""

    machine: str
    steps: int = 0
    allocated: int = 0
    refused: int = 0
    """Claims that did not fit."""
    shares: int = 0
    most_sharers: int = 0
    crashes: int = 0
    abandoned: int = 0
    """Claims given up after the agent had died while it prepared them."""
    audits: int = 0
    limits: int = 0
    """Limits of pods that were compared, in all audits."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Held:
    """What a claim has, and the pod that has the claim."""

    pod: str
    cgroup: Path | None
    results: tuple[upstream.Result, ...]


class Player:
    """One sequence on one node."""

    def __init__(
        self,
        machine: str,
        node: sharenode.SharedNode,
        allocator: upstream.Allocator,
        *,
        seed: int,
        steps_a_crash: int,
    ) -> None:
        self.tally = Tally(machine)
        self._node = node
        self._allocator = allocator
        self._seed = f"{machine} {seed}"
        self._draw = random.Random(self._seed)
        self._steps_a_crash = steps_a_crash
        self._held: dict[values.ClaimRef, _Held] = {}
        self._slices: list[dict[str, Any]] = []
        self._room: Mapping[str, Mapping[str, int]] = {}
        self._limits = False

    def play(self, steps: int) -> Tally:
        """So many claims and releases, and the end of all claims. Raises NodeError."""
        began = time.monotonic()
        self._node.start()
        self._slices = self._node.slices()
        offered = {device["name"]: device for body in self._slices for device in body["spec"].get("devices") or []}
        self._room = {
            name: {what: int(quantity.parse(of["value"])) for what, of in device["capacity"].items()}
            for name, device in offered.items()
        }
        self._limits = all(
            device["attributes"]["memoryEnforcement"] == {"string": "cgroup"} for device in offered.values()
        )
        author = shareclaims.Author(self._seed, min(room[_MEMORY] for room in self._room.values()))
        self._allocator.load(self._slices, shareclaims.CLASSES)
        for step in range(1, steps + 1):
            self.tally.steps = step
            self._step(author)
            self._no_overdraft()
            if step % AUDIT_EVERY == 0:
                self._audit()
        while self._held:
            self._release(next(iter(self._held)))
        self._audit()
        self._node.kill()
        self._node.start()
        self._audit()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def _step(self, author: shareclaims.Author) -> None:
        killer = self._trouble() if self._draw.random() < 1 / self._steps_a_crash else None
        if self._held and self._draw.random() < 0.4:
            self._release(self._draw.choice(list(self._held)))
        else:
            self._claim(author)
        if killer is not None:
            killer.join()

    def _trouble(self) -> threading.Timer | None:
        """Have the agent die: at a point that some claim will bring it to, or a little later whatever it does then."""
        self.tally.crashes += 1
        if isinstance(self._node, sharenode.SupervisedNode) and self._draw.random() < 0.25:
            self._node.supervise()
            return None
        if self._draw.random() < 0.5:
            self._node.kill()
            self._node.start(crash_at=self._draw.choice(POINTS))
            return None
        timer = threading.Timer(self._draw.random() * _MOMENT_S, self._node.kill)
        timer.start()
        return timer

    def _claim(self, author: shareclaims.Author) -> None:
        claim = author.claim(f"claim-{self.tally.steps}")
        found = self._allocator.attempt([claim], (), shares=self._all_results())
        if found.results is None:
            self.tally.refused += 1
            if self._held:
                self._release(self._draw.choice(list(self._held)))
            return
        (results,) = found.results
        pod = f"{self.tally.steps:08x}-0000-4000-8000-{self._draw.getrandbits(48):012x}"
        ref, cgroup = self._node.run_pod(claim, results, pod)
        self._held[ref] = _Held(pod, cgroup, results)
        answer = self._node.prepare(ref)
        if answer is None and self._draw.random() < 0.3:
            self.tally.abandoned += 1
            self._release(ref)
            return
        if answer is None:
            answer = self._node.prepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} with {_spelled(results)} was refused: {answer.message}")
        given = Counter((device.device, device.share_id) for device in answer.devices)
        if given != Counter((result.device, result.share_id) for result in results):
            raise agentnode.NodeError(f"{ref} has {_spelled(results)} and was answered {sorted(given.elements())}")
        self.tally.allocated += 1
        self.tally.shares += len(results)

    def _release(self, ref: values.ClaimRef) -> None:
        answer = self._node.unprepare(ref)
        if answer is None:
            answer = self._node.unprepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} was not unprepared: {answer.message}")
        self._node.forget(ref)
        self._node.end_pod(self._held.pop(ref).pod)

    def _all_results(self) -> list[upstream.Result]:
        return [result for held in self._held.values() for result in held.results]

    def _no_overdraft(self) -> None:
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

    def _audit(self) -> None:
        """What is there is what the claims have, as soon as what is done behind answers is done."""
        self.tally.audits += 1
        if not self._node.alive():
            self._node.start()
        uids = sorted(ref.uid for ref in self._held)
        self._node.settle(
            lambda: sorted(row.claim.uid for row in self._node.rows()) == uids, "rows of the claims alone"
        )
        files = sorted(f"{values.DRIVER_NAME}_{uid}.json" for uid in uids)
        self._node.settle(lambda: _of_claims(self._node.cdi_files()) == files, "CDI files of the claims alone")
        self._node.settle(lambda: _offered(self._node.slices()) == _offered(self._slices), "slices that do not change")
        if self._limits:
            wanted = self._wanted_limits()
            pods = {str(held.cgroup): held.pod for held in self._held.values()}
            self._node.settle(lambda: self._node.limited(pods) == wanted, f"exactly {len(wanted)} limits")
            self.tally.limits += len(wanted)
        if isinstance(self._node, sharenode.SupervisedNode):
            shares = frozenset(result.share_id for result in self._all_results())
            self._node.settle(lambda: self._node.mps_shares() == shares, f"daemons for exactly {len(shares)} shares")
        if not self._held:
            self._node.settle(lambda: self._node.modes() <= _FREE, "compute modes as they were")

    def _wanted_limits(self) -> dict[tuple[str, str], int]:
        """What each pod has of each GPU; who has all of one has no limit."""
        wanted: Counter[tuple[str, str]] = Counter()
        for held in self._held.values():
            for result in held.results:
                wanted[result.device, held.pod] += int(quantity.parse(result.consumed[_MEMORY]))
        return {(device, pod): amount for (device, pod), amount in wanted.items() if amount < self._most(device)}

    def _most(self, device: str) -> int:
        """The most that shares can have of a GPU's memory."""
        return self._room[device][_MEMORY] >> 30 << 30


def main(argv: Sequence[str]) -> int:
    """Plays, and prints what was done. 0: the agent refused nothing and left nothing, 1: it did, or could not be judged."""
    parser = argparse.ArgumentParser(
        prog="hack/oracle shares",
        description="Have an agent that is killed now and then prepare what upstream's allocator gives away of shared GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "machines",
        nargs="*",
        metavar="MACHINE",
        help=f"machines (default: {', '.join(MACHINES)}; from {LONG_STEPS} steps on {', '.join(LONG)})",
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"claims and releases, in all ({STEPS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other claims (0)")
    parser.add_argument(
        "--steps-a-crash",
        type=int,
        default=STEPS_A_CRASH,
        metavar="N",
        help=f"kill the agent once in so many steps ({STEPS_A_CRASH})",
    )
    given = parser.parse_args(argv)
    if given.steps < 1 or given.steps_a_crash < 1:
        parser.error("at least one step is needed")
    machines = given.machines or (LONG if given.steps >= LONG_STEPS else MACHINES)
    try:
        program = upstream.build()
        print(
            "| machine | steps | allocated | shares | did not fit | most sharers | crashes | given up | audits | limits | seconds |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for machine in machines:
            with upstream.started(program) as allocator, sharenode.shared(machine) as node:
                player = Player(machine, node, allocator, seed=given.seed, steps_a_crash=given.steps_a_crash)
                print(_row(player.play(-(-given.steps // len(machines)))), flush=True)
    except agentnode.NodeError as error:
        print(f"hack/oracle: {machine}, step {player.tally.steps} of seed {given.seed}: {error}", file=sys.stderr)
        return 1
    except (ToolError, upstream.UpstreamError, DiscoveryError, DriverError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    return 0


def _row(tally: Tally) -> str:
    return (
        f"| {tally.machine} | {tally.steps} | {tally.allocated} | {tally.shares} | {tally.refused} | {tally.most_sharers}"
        f" | {tally.crashes} | {tally.abandoned} | {tally.audits} | {tally.limits} | {tally.seconds:.0f} |"
    )


def _spelled(results: Sequence[upstream.Result]) -> str:
    return ", ".join(f"{result.device} {dict(result.consumed)}" for result in results)


def _of_claims(files: Sequence[str]) -> list[str]:
    """Without those of metadata."""
    return [name for name in files if name.startswith(f"{values.DRIVER_NAME}_") and "_metadata_" not in name]


def _offered(slices: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What slices offer, whatever their generation."""
    return [{**body["spec"], "pool": None} for body in sorted(slices, key=lambda body: str(body["metadata"]["name"]))]
