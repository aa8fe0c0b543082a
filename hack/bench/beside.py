# SPDX-License-Identifier: Apache-2.0
"""Claims for one kind of device beside claims for a whole GPU of the same agent, turn by turn, and what the former are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from discovery.address import PciAddress
from driver import values
from hack.bench import bench as benchmark
from hack.bench import drivers, report
from hack.bench.errors import BenchError

OF_PARTS = 1.2
"""The most that a call may take, of the sum of what it is made of."""

_COUNTED = slice(benchmark.WARM_UP, None)


class Claims:
    """A claim a turn for a device, or for a share of it. `prepare` and `unprepare`: seconds of each turn."""

    def __init__(
        self, bench: benchmark.Bench, agent: drivers.Ready, device: str, *, share: Mapping[str, str] | None = None
    ) -> None:
        self._bench = bench
        self._client = agent.client
        self.made = bench.server.create_claims(
            (f"{device}-{agent.spec.node}-{index}" for index in range(_rounds(bench))),
            driver=agent.spec.driver_name,
            node=agent.spec.node,
            devices=lambda _: (device,),
            share=share,
        )
        self.prepare: list[float] = []
        self.unprepare: list[float] = []

    def turn(self, index: int) -> None:
        """Prepare one, and unprepare it."""
        self._bench.pause()
        self.prepare.append(self._client.prepare(self.made[index]))
        self._bench.pause()
        self.unprepare.append(self._client.unprepare(self.made[index]))

    def end(self) -> None:
        """They are gone from the server."""
        self._bench.server.delete_claims(self.made)


def play(bench: benchmark.Bench, actors: Sequence[Callable[[int], None]]) -> None:
    """All turns."""
    for index in range(_rounds(bench)):
        for actor in benchmark.rotated(actors, index):
            actor(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What a call is made of beside that for a whole GPU: seconds of each turn, and how a figure calls them."""

    parts: tuple[Sequence[float], ...] = ()
    called: str = ""


def judge(
    kind: str,
    how: str,
    mine: Claims,
    whole: Claims,
    *,
    alone: Iterable[tuple[str, str, Sequence[float]]],
    prepare: More,
    unprepare: More,
) -> tuple[list[report.Series], list[report.Figure]]:
    """What claims for a device of this kind cost. `how`: what this run is, of several. `alone`: name, subject and seconds of each turn
    of what was measured by itself.
    """
    timed = [
        (f"{verb} of {what}", drivers.AGENT, seconds)
        for what, claims in ((kind, mine), ("a whole GPU", whole))
        for verb, seconds in (("prepare", claims.prepare), ("unprepare", claims.unprepare))
    ]
    series = [
        report.milliseconds(f"{what}, {how}", subject, seconds[_COUNTED]) for what, subject, seconds in (*timed, *alone)
    ]
    figures: list[report.Figure] = []
    for verb, took, base, more in (
        ("prepare", mine.prepare, whole.prepare, prepare),
        ("unprepare", mine.unprepare, whole.unprepare, unprepare),
    ):
        parts = [sum(turn) for turn in zip(base, *more.parts, strict=True)]
        ratio = report.ratio(f"{verb} of {kind}, {how}", "agent/its parts", took[_COUNTED], parts[_COUNTED])
        series.append(ratio)
        figures.append(
            report.Figure(
                what=f"{ratio.name}: of a whole GPU's{more.called}",
                limit=OF_PARTS,
                unit=report.Unit.RATIO,
                measured=ratio.summary.p50,
            )
        )
    return series, figures


def address(device: str) -> PciAddress:
    """Where the GPU is that a device is, or is a part of."""
    found = values.address_of(device)
    if found is None:
        raise BenchError(f"{device} is not the name of a GPU.")
    return found


def _rounds(bench: benchmark.Bench) -> int:
    return benchmark.WARM_UP + bench.options.rounds
