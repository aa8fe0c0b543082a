# SPDX-License-Identifier: Apache-2.0
"""What the judges do that play with an agent which is killed: claims come and go at random, and are prepared whatever happens.

Each allocation that upstream's allocator makes is prepared by a real agent on a mock machine, and it must not refuse one. The slices
must never change, and the record and the files of CDI must be those of the claims alone. Now and then the agent dies, at a named
point of its work or at any moment, and is started again. What else must hold is each judge's own.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from discovery.errors import DiscoveryError
from driver import values
from driver.errors import DriverError
from hack.judges import agentnode, upstream
from hack.tools.errors import ToolError

LONG_STEPS = 1000
"""From so many on a run is a long one."""

STEPS_A_CRASH = 40
AUDIT_EVERY = 20


@dataclass
class Tally:
    """What was done, and how it went."""

    machine: str
    steps: int = 0
    allocated: int = 0
    refused: int = 0
    """Claims that did not fit."""
    crashes: int = 0
    abandoned: int = 0
    """Claims given up after the agent had died while it prepared them."""
    audits: int = 0
    seconds: float = 0.0


N = TypeVar("N", bound=agentnode.AgentNode)
T = TypeVar("T", bound=Tally)


@dataclass(frozen=True, kw_only=True)
class Odds:
    """`seed`: another one, other claims. `steps_a_crash`: the agent dies once in so many steps, at one of `points` or within
    `moment_s`: a claim is prepared or unprepared in about this time, so that a kill within it falls into the middle of it.
    """

    seed: str
    steps_a_crash: int
    points: Sequence[str]
    moment_s: float


class Player(ABC, Generic[N, T]):
    """One sequence on one node. The same seed gives the same claims."""

    def __init__(self, tally: T, node: N, allocator: upstream.Allocator, odds: Odds) -> None:
        self.tally = tally
        self._node = node
        self._allocator = allocator
        self._odds = odds
        self._draw = random.Random(odds.seed)
        self._held: dict[values.ClaimRef, tuple[upstream.Result, ...]] = {}
        self._slices: list[dict[str, Any]] = []

    def play(self, steps: int) -> T:
        """So many claims and releases, and the end of all claims. Raises NodeError."""
        began = time.monotonic()
        self._node.start()
        self._slices = self._node.slices()
        self._allocator.load(self._slices, self._begin())
        for step in range(1, steps + 1):
            self.tally.steps = step
            self._step()
            self._look()
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

    @abstractmethod
    def _begin(self) -> Sequence[upstream.Body]:
        """The agent runs, and its slices are known: the DeviceClasses that claims name."""

    @abstractmethod
    def _write(self, name: str) -> upstream.Body:
        """The next claim."""

    @abstractmethod
    def _attempt(self, claim: upstream.Body) -> upstream.Attempt:
        """What the allocator gives it beside those that have something."""

    @abstractmethod
    def _allocate(self, claim: upstream.Body, results: Sequence[upstream.Result]) -> values.ClaimRef:
        """The claim as it is stored, before it is prepared."""

    @abstractmethod
    def _compare(self, ref: values.ClaimRef, answer: values.Prepared) -> None:
        """Raises NodeError where a claim was answered with something that it does not have. Else it counts."""

    @abstractmethod
    def _ended(self, ref: values.ClaimRef) -> None:
        """A claim is gone."""

    @abstractmethod
    def _look(self) -> None:
        """After every step. Raises NodeError."""

    @abstractmethod
    def _settle(self) -> None:
        """What else is there must be what the claims have, as soon as what is done behind answers is done. Raises NodeError."""

    def _strike(self) -> bool:
        """Have something else die than the agent, now and then; False where it has to be the agent."""
        return False

    def _step(self) -> None:
        killer = self._trouble() if self._draw.random() < 1 / self._odds.steps_a_crash else None
        if self._held and self._draw.random() < 0.4:
            self._release(self._draw.choice(list(self._held)))
        else:
            self._claim()
        if killer is not None:
            killer.join()

    def _trouble(self) -> threading.Timer | None:
        """Have the agent die: at a point that some claim will bring it to, or a little later whatever it does then."""
        self.tally.crashes += 1
        if self._strike():
            return None
        if self._draw.random() < 0.5:
            self._node.kill()
            self._node.start(crash_at=self._draw.choice(self._odds.points))
            return None
        timer = threading.Timer(self._draw.random() * self._odds.moment_s, self._node.kill)
        timer.start()
        return timer

    def _claim(self) -> None:
        claim = self._write(f"claim-{self.tally.steps}")
        found = self._attempt(claim)
        if found.results is None:
            self.tally.refused += 1
            if self._held:
                self._release(self._draw.choice(list(self._held)))
            return
        (results,) = found.results
        ref = self._allocate(claim, results)
        self._held[ref] = results
        answer = self._node.prepare(ref)
        if answer is None and self._draw.random() < 0.3:
            self.tally.abandoned += 1
            self._release(ref)
            return
        if answer is None:
            answer = self._node.prepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} with {spelled(results)} was refused: {answer.message}")
        self._compare(ref, answer)
        self.tally.allocated += 1

    def _release(self, ref: values.ClaimRef) -> None:
        answer = self._node.unprepare(ref)
        if answer is None:
            answer = self._node.unprepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} was not unprepared: {answer.message}")
        self._node.forget(ref)
        del self._held[ref]
        self._ended(ref)

    def _results(self) -> list[upstream.Result]:
        """What all claims have."""
        return [result for results in self._held.values() for result in results]

    def _audit(self) -> None:
        self.tally.audits += 1
        if not self._node.alive():
            self._node.start()
        uids = sorted(ref.uid for ref in self._held)
        self._node.settle(
            lambda: sorted(row.claim.uid for row in self._node.rows()) == uids, "rows of the claims alone"
        )
        files = sorted(f"{values.DRIVER_NAME}_{uid}.json" for uid in uids)
        self._node.settle(lambda: self._node.cdi_files() == files, "CDI files of the claims alone")
        self._node.settle(lambda: _offered(self._node.slices()) == _offered(self._slices), "slices that do not change")
        self._settle()


@dataclass(frozen=True, kw_only=True)
class Game(Generic[N, T]):
    """A judge, as it is called."""

    name: str
    gpus: str
    """What the GPUs are that it gives away."""

    machines: Sequence[str]
    long: Sequence[str]
    """Those of a long run."""

    steps: int
    points: Sequence[str]
    moment_s: float
    table: Mapping[str, Callable[[T], object]]
    """What is told of a run, by the heading of its column."""

    player: Callable[[str, Path, Odds], AbstractContextManager[Player[N, T]]]
    """For a machine, with upstream's program. Raises what `play` says."""


def parser(game: Game[N, T]) -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog=f"hack/oracle {game.name}",
        description="Have an agent that is killed now and then prepare what upstream's allocator gives away of"
        f" {game.gpus} GPUs.",
        allow_abbrev=False,
    )
    made.add_argument(
        "machines",
        nargs="*",
        metavar="MACHINE",
        help=f"machines (default: {', '.join(game.machines)}; from {LONG_STEPS} steps on {', '.join(game.long)})",
    )
    made.add_argument(
        "--steps", type=_steps, default=game.steps, metavar="N", help=f"claims and releases, in all ({game.steps})"
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other claims (0)")
    made.add_argument(
        "--steps-a-crash",
        type=_steps,
        default=STEPS_A_CRASH,
        metavar="N",
        help=f"kill the agent once in so many steps ({STEPS_A_CRASH})",
    )
    return made


def play(game: Game[N, T], given: argparse.Namespace) -> list[T] | None:
    """Play on each machine, and print what was done; None where the agent did something wrong, or could not be judged."""
    machines = given.machines or (game.long if given.steps >= LONG_STEPS else game.machines)
    tallies = []
    try:
        program = upstream.build()
        print(f"| {' | '.join(game.table)} |")
        print("|---" * len(game.table) + "|")
        for machine in machines:
            odds = Odds(
                seed=f"{machine} {given.seed}",
                steps_a_crash=given.steps_a_crash,
                points=game.points,
                moment_s=game.moment_s,
            )
            with game.player(machine, program, odds) as player:
                tally = player.play(-(-given.steps // len(machines)))
            print(f"| {' | '.join(str(told(tally)) for told in game.table.values())} |", flush=True)
            tallies.append(tally)
    except agentnode.NodeError as error:
        print(f"hack/oracle: {machine}, step {player.tally.steps} of seed {given.seed}: {error}", file=sys.stderr)
        return None
    except (ToolError, upstream.UpstreamError, DiscoveryError, DriverError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return None
    return tallies


def spelled(results: Sequence[upstream.Result]) -> str:
    """What a claim has, for a message."""
    return ", ".join(f"{one.device} {dict(one.consumed)}" if one.consumed else one.device for one in results)


def _steps(text: str) -> int:
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least one step is needed")
    return found


def _offered(slices: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What slices offer, whatever their generation."""
    return [{**body["spec"], "pool": None} for body in sorted(slices, key=lambda body: str(body["metadata"]["name"]))]
