# SPDX-License-Identifier: Apache-2.0
"""The judge of divided GPUs: whatever upstream's own allocator gives away of them, the agent prepares, whenever it is killed.

Claims for parts and for whole GPUs come and go at random. Each allocation is prepared by a real agent on a mock machine, and it must
not refuse one. The mock must never have two instances in one place, nor one more or less than the claims have; the slices
must never change. Now and then the agent dies, at a named point of its work or at any moment, and is started again. When all
claims are gone, nothing may be left: no instance, no row in the record, no file. The same seed gives the same claims.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discovery.errors import DiscoveryError
from driver import values
from driver.errors import DriverError
from driver.prepare import crashpoints
from hack.judges import agentnode, migclaims, mignode, nodes, upstream
from hack.tools.errors import ToolError

MACHINES = ("dgx-h100", "a30-4-mig")
LONG = ("dgx-h100", "h100-16-pcie", "dgx-a100-divided", "a30-4-mig", "rtx-pro-4")
"""Those of a run of so many steps or more."""

LONG_STEPS = 1000
OWN_MACHINES = Path(__file__).parent / "machines"
"""Those that are not in the zoo."""

STEPS = 120
STEPS_A_CRASH = 40
AUDIT_EVERY = 20

POINTS = tuple(name for name in crashpoints.NAMES if not name.startswith("recover."))
_MOMENT_S = 0.06
"""A claim is prepared or unprepared in about this time, so that a kill within it falls into the middle of it."""


@dataclass
class Tally:
    """What was done, and how it went."""

    machine: str
    steps: int = 0
    allocated: int = 0
    refused: int = 0
    """Claims that did not fit."""
    devices: int = 0
    parts: int = 0
    most_instances: int = 0
    crashes: int = 0
    abandoned: int = 0
    """Claims given up after the agent had died while it prepared them."""
    audits: int = 0
    seconds: float = 0.0
    record: list[dict[str, Any]] = field(default_factory=list)


class Player:
    """One sequence on one node."""

    def __init__(
        self,
        machine: str,
        node: mignode.DividedNode,
        allocator: upstream.Allocator,
        *,
        author: migclaims.Author,
        seed: int,
        steps_a_crash: int,
    ) -> None:
        self.tally = Tally(machine)
        self._node = node
        self._allocator = allocator
        self._author = author
        self._draw = random.Random(f"{machine} {seed}")
        self._steps_a_crash = steps_a_crash
        self._held: dict[values.ClaimRef, tuple[int, tuple[upstream.Result, ...]]] = {}
        self._slices: list[dict[str, Any]] = []
        self._foreign: frozenset[mignode.Place] = frozenset()

    def play(self, steps: int) -> Tally:
        """So many claims and releases, and the end of all claims. Raises NodeError."""
        began = time.monotonic()
        self._node.start()
        self._slices = self._node.slices()
        self._foreign = self._node.places()
        self._allocator.load(self._slices, migclaims.CLASSES)
        for step in range(1, steps + 1):
            self.tally.steps = step
            self._step()
            self._no_overlap()
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

    def _step(self) -> None:
        killer = self._trouble() if self._draw.random() < 1 / self._steps_a_crash else None
        if self._held and self._draw.random() < 0.4:
            self._release(self._draw.choice(list(self._held)))
        else:
            self._claim()
        if killer is not None:
            killer.join()

    def _trouble(self) -> threading.Timer | None:
        """Have the agent die: at a point that some claim will bring it to, or a little later whatever it does then."""
        self.tally.crashes += 1
        if self._draw.random() < 0.5:
            self._node.kill()
            self._node.start(crash_at=self._draw.choice(POINTS))
            return None
        timer = threading.Timer(self._draw.random() * _MOMENT_S, self._node.kill)
        timer.start()
        return timer

    def _claim(self) -> None:
        claim = self._author.claim(f"claim-{self.tally.steps}")
        held = [result.device for _, results in self._held.values() for result in results]
        found = self._allocator.attempt([claim], held)
        if found.results is None:
            self.tally.refused += 1
            if self._held:
                self._release(self._draw.choice(list(self._held)))
            return
        (results,) = found.results
        self.tally.record.append(
            {"asks": claim["spec"]["devices"], "gets": [[result.request, result.device] for result in results]}
        )
        ref = self._node.allocate(claim, results)
        answer = self._node.prepare(ref)
        self._held[ref] = len(self.tally.record) - 1, results
        if answer is None and self._draw.random() < 0.3:
            self.tally.abandoned += 1
            self._release(ref)
            return
        if answer is None:
            answer = self._node.prepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} with {', '.join(_names(results))} was refused: {answer.message}")
        if (given := sorted(device.device for device in answer.devices)) != sorted(_names(results)):
            raise agentnode.NodeError(f"{ref} has {', '.join(_names(results))} and was answered {', '.join(given)}")
        self.tally.allocated += 1
        self.tally.devices += len(results)
        self.tally.parts += sum(_is_part(name) for name in _names(results))

    def _release(self, ref: values.ClaimRef) -> None:
        answer = self._node.unprepare(ref)
        if answer is None:
            answer = self._node.unprepare_again(ref)
        if isinstance(answer, values.Failed):
            raise agentnode.NodeError(f"{ref} was not unprepared: {answer.message}")
        self._node.forget(ref)
        number, _ = self._held.pop(ref)
        self.tally.record.append({"ends": number})

    def _no_overlap(self) -> None:
        instances = self._node.instances()
        for gpu, listed in instances.items():
            taken = [number for one in listed for number in range(one.start, one.start + one.size)]
            if len(taken) != len(set(taken)):
                raise agentnode.NodeError(f"{gpu} has instances that overlap: {listed}")
        self.tally.most_instances = max(self.tally.most_instances, sum(map(len, instances.values())))

    def _audit(self) -> None:
        """What is there is what the claims have, as soon as what is done behind answers is done."""
        self.tally.audits += 1
        if not self._node.alive():
            self._node.start()
        wanted = self._foreign | {
            mignode.Place.of(name) for _, results in self._held.values() for name in filter(_is_part, _names(results))
        }
        self._node.settle(lambda: self._node.places() == wanted, f"exactly {len(wanted)} instances")
        uids = sorted(ref.uid for ref in self._held)
        self._node.settle(
            lambda: sorted(row.claim.uid for row in self._node.rows()) == uids, "rows of the claims alone"
        )
        files = sorted(f"{values.DRIVER_NAME}_{uid}.json" for uid in uids)
        self._node.settle(lambda: self._node.cdi_files() == files, "CDI files of the claims alone")
        self._node.settle(lambda: _offered(self._node.slices()) == _offered(self._slices), "slices that do not change")


def main(argv: Sequence[str]) -> int:
    """Plays, and prints what was done. 0: the agent refused nothing and left nothing, 1: it did, or could not be judged."""
    parser = argparse.ArgumentParser(
        prog="hack/oracle mig",
        description="Have an agent that is killed now and then prepare what upstream's allocator gives away of divided GPUs.",
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
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the allocations there, for the tests")
    given = parser.parse_args(argv)
    if given.steps < 1 or given.steps_a_crash < 1:
        parser.error("at least one step is needed")
    machines = given.machines or (LONG if given.steps >= LONG_STEPS else MACHINES)
    try:
        program = upstream.build()
        print(
            "| machine | steps | allocated | parts | did not fit | most instances | crashes | given up | audits | seconds |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        tallies = []
        for machine in machines:
            offered = nodes.read(place(machine), sharing=nodes.DIVIDED).devices
            author = migclaims.Author(f"{machine} {given.seed}", offered)
            with upstream.started(program) as allocator, mignode.divided(place(machine)) as node:
                player = Player(
                    machine, node, allocator, author=author, seed=given.seed, steps_a_crash=given.steps_a_crash
                )
                tallies.append(player.play(-(-given.steps // len(machines))))
            print(_row(tallies[-1]), flush=True)
    except agentnode.NodeError as error:
        print(f"hack/oracle: {machine}, step {player.tally.steps} of seed {given.seed}: {error}", file=sys.stderr)
        return 1
    except (ToolError, upstream.UpstreamError, DiscoveryError, DriverError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    if given.record is not None:
        given.record.write_text(recorded(tallies), encoding="utf-8")
    return 0


def place(machine: str) -> str:
    """Where a machine is: the zoo's by its name, else the file."""
    own = OWN_MACHINES / f"{machine}.yaml"
    return str(own) if own.exists() else machine


def recorded(tallies: Sequence[Tally]) -> str:
    """The allocations as a document of JSON, a line a step."""
    return "".join(_lines({tally.machine: tally.record for tally in tallies}))


def _lines(machines: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    yield '{"apiVersion": "oracle.nearfield.dev/v1alpha1", "kind": "Allocations", "machines": {\n'
    for number, (machine, steps) in enumerate(machines.items()):
        yield f"{',' if number else ''}{json.dumps(machine)}: [\n"
        yield ",\n".join(json.dumps(step, separators=(",", ":")) for step in steps)
        yield "\n]\n"
    yield "}}\n"


def _row(tally: Tally) -> str:
    return (
        f"| {tally.machine} | {tally.steps} | {tally.allocated} | {tally.parts} | {tally.refused} | {tally.most_instances}"
        f" | {tally.crashes} | {tally.abandoned} | {tally.audits} | {tally.seconds:.0f} |"
    )


def _names(results: Sequence[upstream.Result]) -> list[str]:
    return [result.device for result in results]


def _is_part(device: str) -> bool:
    return values.gpu_of(device) != device


def _offered(slices: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What slices offer, whatever their generation."""
    return [{**body["spec"], "pool": None} for body in sorted(slices, key=lambda body: str(body["metadata"]["name"]))]
