# SPDX-License-Identifier: Apache-2.0
"""The judge of the order of devices: upstream's own allocator serves the same random claims under our order and under others.

The verdict. Our order must be one that breaks one pair, one quad and one island at a time (`nodes.Node.orderly`). An order that first
fit cannot tell from ours (`nodes.Node.shape`) must fare exactly alike: there is nothing to win, and a difference would be a fault of
this judge. Ours must be worse than no other order in anything; than one that breaks more at a time it must be clearly better in
something, and than a random one in everything that there is a choice of. Sequences are the same in every run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from discovery.errors import DiscoveryError
from hack.judges import contest, nodes, search, upstream, workload
from hack.tools.errors import ToolError

MACHINES = ("dgx-1-v100", "dgx-2-v100", "dgx-h100", "h100-16-pcie", "single-root-10", "a30-4-pcie")
CLAIMS = 300
SEQUENCES = 6

STARTS = 3
"""Random orders from which a search climbs, besides ours and that by address."""

T = TypeVar("T")

OURS, ADDRESS, MINOR, RANDOM = "as published", "by address", "by minor number", "random"

CLEARLY = 0.10
TOLERATED = 0.02
"""Parts of the other order's figure, averaged over all kinds of claims, by which ours is clearly better, and may be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one order fared on one machine. `alike`: first fit cannot tell it from ours. `orderly`: it breaks one group at a time."""

    machine: str
    order: str
    alike: bool
    orderly: bool
    kinds: Mapping[str, contest.Outcome]
    choices: tuple[str, ...]
    """Measures that an order can change here: those of groups of which the machine has several."""

    @property
    def total(self) -> contest.Outcome:
        """The mean over all kinds of claims."""
        return contest.mean(self.kinds.values())


def main(argv: Sequence[str]) -> int:
    """Runs the contest and prints what came of it. 0: ours wins where it must, 1: it does not, or there was no contest."""
    parser = argparse.ArgumentParser(
        prog="hack/oracle allocator",
        description="Count what random claims break under several orders of the same devices, with upstream's allocator.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "machines", nargs="*", metavar="MACHINE", help=f"machines of the zoo (default: {', '.join(MACHINES)})"
    )
    parser.add_argument("--claims", type=int, default=CLAIMS, metavar="N", help=f"claims of a sequence ({CLAIMS})")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, metavar="N", help=f"sequences ({SEQUENCES})")
    parser.add_argument("--kinds", action="store_true", help="print each kind of claims too")
    parser.add_argument(
        "--search",
        action="store_true",
        help="look for better orders instead; ten minutes a machine of 8 GPUs, hours with 16",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if given.claims < 1 or given.sequences < 1:
        parser.error("at least one claim and one sequence are needed")
    try:
        if given.search:
            for line in _side_by_side(_search, given.machines or MACHINES, given.claims, given.sequences):
                print(line, flush=True)
            return 0
        results = run(given.machines or MACHINES, claims=given.claims, sequences=given.sequences)
    except (ToolError, upstream.UpstreamError, DiscoveryError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    for line in table(results, kinds=given.kinds):
        print(line)
    if given.claims * given.sequences < CLAIMS * SEQUENCES:
        print("hack/oracle: figures only; so few claims are no ground for a verdict", file=sys.stderr)
        return 0
    failures = list(verdict(results))
    for failure in failures:
        print(f"hack/oracle: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run(machines: Sequence[str], *, claims: int, sequences: int) -> list[Result]:
    """The contest, machines side by side. Raises ToolError, UpstreamError, DiscoveryError."""
    return [result for listed in _side_by_side(_compete, machines, claims, sequences) for result in listed]


def _side_by_side(
    task: Callable[[Path, str, int, int], T], machines: Sequence[str], claims: int, sequences: int
) -> Iterator[T]:
    program = upstream.build()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda name: task(program, name, claims, sequences), machines)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A machine with all that is asked of it."""

    node: nodes.Node
    kinds: list[workload.Kind]
    sequences: list[list[workload.Arrival]]
    choices: tuple[str, ...]

    @classmethod
    def of(cls, name: str, *, claims: int, sequences: int) -> _Setting:
        node = nodes.read(name)
        groups = {attribute: node.groups(attribute) for attribute in contest.MATCHED}
        largest = workload.largest_groups(groups)
        choices = [level for level, attribute in contest.LEVELS.items() if len(groups[attribute]) > 1]
        return cls(
            node=node,
            kinds=[found for kind in workload.KINDS if (found := workload.applicable(kind, largest)) is not None],
            sequences=[
                workload.sequence(str(number), gpus=len(node.devices), claims=claims) for number in range(sequences)
            ],
            choices=(*choices, *(("aligned",) if "quads" in choices else ())),
        )


def _compete(program: Path, name: str, claims: int, sequences: int) -> list[Result]:
    setting = _Setting.of(name, claims=claims, sequences=sequences)
    node = setting.node
    orders = {
        OURS: [node.published()] * sequences,
        ADDRESS: [node.by_address()] * sequences,
        MINOR: [node.by_minor()] * sequences,
        RANDOM: [node.shuffled(number) for number in range(sequences)],
    }
    outcomes: dict[str, dict[str, list[contest.Outcome]]] = {order: {} for order in orders}
    with upstream.started(program) as allocator:
        played: dict[nodes.Order, contest.Offered] = {}
        for order, permutations in orders.items():
            for arrivals, permutation in zip(setting.sequences, permutations, strict=True):
                offered = played.setdefault(permutation, contest.Offered(node, permutation, allocator))
                offered.open()
                for kind in setting.kinds:
                    outcomes[order].setdefault(kind.name, []).append(contest.play(offered, kind, arrivals))
    shape = node.shape(node.published(), contest.MATCHED)
    return [
        Result(
            machine=name,
            order=order,
            alike=all(node.shape(permutation, contest.MATCHED) == shape for permutation in permutations),
            orderly=all(node.orderly(permutation, tuple(contest.LEVELS.values())) for permutation in permutations),
            kinds={kind: contest.mean(listed) for kind, listed in outcomes[order].items()},
            choices=setting.choices,
        )
        for order, permutations in orders.items()
    ]


def _search(program: Path, name: str, claims: int, sequences: int) -> str:
    setting = _Setting.of(name, claims=claims, sequences=sequences)
    if not setting.choices:
        return f"{name}: there is nothing to choose"
    with upstream.started(program) as allocator:
        found = search.search(
            setting.node,
            allocator,
            kinds=setting.kinds,
            sequences=setting.sequences,
            measures=setting.choices,
            starts=STARTS,
        )
    return (
        f"{name}: of {found.tried} orders that first fit can tell apart, the best is {100 * found.gain:.1f} % better than ours"
        f" in the mean of {', '.join(setting.choices)}: {', '.join(str(place) for place in found.order)}"
    )


def verdict(results: Iterable[Result]) -> Iterator[str]:
    """What is wrong with our order, a sentence each."""
    ours: dict[str, Result] = {}
    for result in results:
        ours.setdefault(result.machine, result)
        best = ours[result.machine]
        if result is best:
            if not result.orderly:
                yield f"{result.machine}: our order breaks more than one group at a time"
            continue
        if result.alike:
            if result.kinds != best.kinds:
                yield f"{result.machine}: the order {result.order} cannot be told from ours, and fared otherwise"
            continue
        gains = {measure: contest.gain(best.total, result.total, measure) for measure in result.choices}
        worse = [measure for measure, by in gains.items() if by < -TOLERATED]
        short = [measure for measure, by in gains.items() if by < CLEARLY]
        if worse:
            yield f"{result.machine}: worse than {result.order} in {_said(worse, best, result)}"
        elif not result.orderly and gains and (len(short) == len(gains) or (short and result.order == RANDOM)):
            yield f"{result.machine}: not clearly better than {result.order} in {_said(short, best, result)}"


def table(results: Sequence[Result], *, kinds: bool) -> Iterator[str]:
    """Markdown, a row an order of each machine, and before it one of each kind of claims if they are wanted."""
    yield "| machine | order | broken pairs | broken quads | broken islands | aligned 4-GPU claims that fit | refused |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        like = " (alike)" if result.alike and result.order != OURS else ""
        rows = {**({f", {kind}": outcome for kind, outcome in result.kinds.items()} if kinds else {}), "": result.total}
        for kind, outcome in rows.items():
            cells = [
                f"{getattr(outcome, level):.2f}" if level in result.choices else "-"
                for level in (*contest.LEVELS, "aligned")
            ]
            yield (
                f"| {result.machine} | {result.order}{like}{kind} | {' | '.join(cells)} | {100 * outcome.refused:.1f} % |"
            )


def _said(measures: Sequence[str], ours: Result, other: Result) -> str:
    return ", ".join(
        f"{measure} ({getattr(ours.total, measure):.3f} against {getattr(other.total, measure):.3f})"
        for measure in measures
    )
