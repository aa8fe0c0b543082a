# SPDX-License-Identifier: Apache-2.0
"""The judge of the order of devices: upstream's own allocator serves the same random claims under our order and under others.

The verdict. An order that first fit cannot tell from ours (`nodes.Node.shape`) must fare exactly alike: there is nothing to win,
and a difference would be a fault of this judge. Against any other order ours must be clearly better in something, and worse in
nothing; against a random one, better in everything that there is a choice of. Sequences are the same in every run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from discovery.errors import DiscoveryError
from hack.judges import contest, nodes, upstream, workload
from hack.tools.errors import ToolError

MACHINES = ("dgx-1-v100", "dgx-2-v100", "dgx-h100", "h100-16-pcie", "single-root-10", "a30-4-pcie")
CLAIMS = 300
SEQUENCES = 6

OURS, ADDRESS, MINOR, RANDOM = "as published", "by address", "by minor number", "random"
ORDERS = (OURS, ADDRESS, MINOR, RANDOM)

CLEARLY = 0.10
TOLERATED = 0.02
"""Parts of the other order's figure, averaged over all kinds of claims, by which ours is clearly better, and may be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one order fared on one machine. `alike`: first fit cannot tell it from ours."""

    machine: str
    order: str
    alike: bool
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if given.claims < 1 or given.sequences < 1:
        parser.error("at least one claim and one sequence are needed")
    try:
        results = run(given.machines or MACHINES, claims=given.claims, sequences=given.sequences)
    except (ToolError, upstream.UpstreamError, DiscoveryError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    for line in table(results, kinds=given.kinds):
        print(line)
    failures = list(verdict(results))
    for failure in failures:
        print(f"hack/oracle: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run(machines: Sequence[str], *, claims: int, sequences: int) -> list[Result]:
    """The contest, machines side by side. Raises ToolError, UpstreamError, DiscoveryError."""
    program = upstream.build()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(_compete, program, name, claims, sequences) for name in machines]
        return [result for task in tasks for result in task.result()]


def _compete(program: Path, name: str, claims: int, sequences: int) -> list[Result]:
    node = nodes.read(name)
    groups = {attribute: node.groups(attribute) for attribute in contest.MATCHED}
    largest = workload.largest_groups(groups)
    kinds = [found for kind in workload.KINDS if (found := workload.applicable(kind, largest)) is not None]
    arrivals = [workload.sequence(str(number), gpus=len(node.devices), claims=claims) for number in range(sequences)]
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
            for number, permutation in enumerate(permutations):
                offered = played.setdefault(permutation, contest.Offered(node, permutation, allocator))
                offered.open()
                for kind in kinds:
                    outcomes[order].setdefault(kind.name, []).append(contest.play(offered, kind, arrivals[number]))
    shape = node.shape(node.published(), contest.MATCHED)
    choices = tuple(level for level, attribute in contest.LEVELS.items() if len(groups[attribute]) > 1)
    return [
        Result(
            machine=name,
            order=order,
            alike=all(node.shape(permutation, contest.MATCHED) == shape for permutation in permutations),
            kinds={kind: contest.mean(listed) for kind, listed in outcomes[order].items()},
            choices=(*choices, *(("aligned",) if "quads" in choices else ())),
        )
        for order, permutations in orders.items()
    ]


def verdict(results: Iterable[Result]) -> Iterator[str]:
    """What is wrong with our order, a sentence each."""
    ours: dict[str, Result] = {}
    for result in results:
        ours.setdefault(result.machine, result)
        best = ours[result.machine]
        if result is best:
            continue
        if result.alike:
            if result.kinds != best.kinds:
                yield f"{result.machine}: the order {result.order} cannot be told from ours, and fared otherwise"
            continue
        gains = {measure: gain(best.total, result.total, measure) for measure in result.choices}
        worse = [measure for measure, by in gains.items() if by < -TOLERATED]
        short = [measure for measure, by in gains.items() if by < CLEARLY]
        if worse:
            yield f"{result.machine}: worse than {result.order} in {_said(worse, best, result)}"
        elif gains and (len(short) == len(gains) or (short and result.order == RANDOM)):
            yield f"{result.machine}: not clearly better than {result.order} in {_said(short, best, result)}"


def gain(ours: contest.Outcome, other: contest.Outcome, measure: str) -> float:
    """By which part of the other's figure ours is better; fewer broken groups are, and more claims that fit."""
    mine, theirs = float(getattr(ours, measure)), float(getattr(other, measure))
    difference = mine - theirs if measure == "aligned" else theirs - mine
    if difference == 0:
        return 0.0
    return difference / theirs if theirs else float("inf") if difference > 0 else float("-inf")


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
