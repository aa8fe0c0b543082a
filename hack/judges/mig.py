# SPDX-License-Identifier: Apache-2.0
"""The judge of divided GPUs: whatever upstream's own allocator gives away of them, the agent prepares, whenever it is killed.

Claims for parts and for whole GPUs come and go at random. Each allocation is prepared by a real agent on a mock machine, and it must
not refuse one. The mock must never have two instances in one place, nor one more or less than the claims have; the slices
must never change. Now and then the agent dies, at a named point of its work or at any moment, and is started again. When all
claims are gone, nothing may be left: no instance, no row in the record, no file. The same seed gives the same claims.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver import values
from driver.prepare import crashpoints
from hack.judges import agentnode, migclaims, mignode, nodes, playing, upstream

OWN_MACHINES = Path(__file__).parent / "machines"
"""Those that are not in the zoo."""

POINTS = tuple(name for name in crashpoints.NAMES if not name.startswith("recover."))


@dataclass
class Tally(playing.Tally):
    """What was done, and how it went."""

    devices: int = 0
    parts: int = 0
    most_instances: int = 0
    record: list[dict[str, Any]] = field(default_factory=list)


class Player(playing.Player[mignode.DividedNode, Tally]):
    """One sequence on one node."""

    def __init__(
        self,
        machine: str,
        node: mignode.DividedNode,
        allocator: upstream.Allocator,
        odds: playing.Odds,
        *,
        author: migclaims.Author,
    ) -> None:
        super().__init__(Tally(machine), node, allocator, odds)
        self._author = author
        self._numbers: dict[values.ClaimRef, int] = {}
        """Where the record has the claims."""

        self._foreign: frozenset[mignode.Place] = frozenset()

    def _begin(self) -> Sequence[upstream.Body]:
        self._foreign = self._node.places()
        return migclaims.CLASSES

    def _write(self, name: str) -> upstream.Body:
        return self._author.claim(name)

    def _attempt(self, claim: upstream.Body) -> upstream.Attempt:
        return self._allocator.attempt([claim], _names(self._results()))

    def _allocate(self, claim: upstream.Body, results: Sequence[upstream.Result]) -> values.ClaimRef:
        ref = self._node.allocate(claim, results)
        self._numbers[ref] = len(self.tally.record)
        self.tally.record.append(
            {"asks": claim["spec"]["devices"], "gets": [[result.request, result.device] for result in results]}
        )
        return ref

    def _compare(self, ref: values.ClaimRef, answer: values.Prepared) -> None:
        names = _names(self._held[ref])
        if (given := sorted(device.device for device in answer.devices)) != sorted(names):
            raise agentnode.NodeError(f"{ref} has {', '.join(names)} and was answered {', '.join(given)}")
        self.tally.devices += len(names)
        self.tally.parts += sum(map(_is_part, names))

    def _ended(self, ref: values.ClaimRef) -> None:
        self.tally.record.append({"ends": self._numbers.pop(ref)})

    def _look(self) -> None:
        """No two instances overlap."""
        instances = self._node.instances()
        for gpu, listed in instances.items():
            taken = [number for one in listed for number in range(one.start, one.start + one.size)]
            if len(taken) != len(set(taken)):
                raise agentnode.NodeError(f"{gpu} has instances that overlap: {listed}")
        self.tally.most_instances = max(self.tally.most_instances, sum(map(len, instances.values())))

    def _settle(self) -> None:
        wanted = self._foreign | {mignode.Place.of(name) for name in filter(_is_part, _names(self._results()))}
        self._node.settle(lambda: self._node.places() == wanted, f"exactly {len(wanted)} instances")


@contextlib.contextmanager
def _player(machine: str, program: Path, odds: playing.Odds) -> Iterator[Player]:
    offered = nodes.read(place(machine), sharing=nodes.DIVIDED).devices
    author = migclaims.Author(odds.seed, offered)
    with upstream.started(program) as allocator, mignode.divided(place(machine)) as node:
        yield Player(machine, node, allocator, odds, author=author)


GAME: playing.Game[mignode.DividedNode, Tally] = playing.Game(
    name="mig",
    gpus="divided",
    machines=("dgx-h100", "a30-4-mig"),
    long=("dgx-h100", "h100-16-pcie", "dgx-a100-divided", "a30-4-mig", "rtx-pro-4"),
    steps=120,
    points=POINTS,
    moment_s=0.06,
    table={
        "machine": lambda tally: tally.machine,
        "steps": lambda tally: tally.steps,
        "allocated": lambda tally: tally.allocated,
        "parts": lambda tally: tally.parts,
        "did not fit": lambda tally: tally.refused,
        "most instances": lambda tally: tally.most_instances,
        "crashes": lambda tally: tally.crashes,
        "given up": lambda tally: tally.abandoned,
        "audits": lambda tally: tally.audits,
        "seconds": lambda tally: f"{tally.seconds:.0f}",
    },
    player=_player,
)


def main(argv: Sequence[str]) -> int:
    """Plays, and prints what was done. 0: the agent refused nothing and left nothing, 1: it did, or could not be judged."""
    parser = playing.parser(GAME)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the allocations there, for the tests")
    given = parser.parse_args(argv)
    tallies = playing.play(GAME, given)
    if tallies is None:
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


def _names(results: Sequence[upstream.Result]) -> list[str]:
    return [result.device for result in results]


def _is_part(device: str) -> bool:
    return values.gpu_of(device) != device
