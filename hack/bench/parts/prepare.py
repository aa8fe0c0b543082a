# SPDX-License-Identifier: Apache-2.0
"""Latency of one Prepare, its repeat and its Unprepare, beside the floor and the Go driver, with few and many claims
prepared; what it costs in CPU, and what a repeat asks of the API server.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from hack.bench import bench as benchmark
from hack.bench import claims, drivers, floor, processes, report, stats

ADMIN_NOTE = "prepared beside it: claims with admin access"
OF_PEER = {0: 0.8, 100: 0.5, 1000: 0.33}
"""The most of the Go driver's time that Prepare may take, by the number of claims prepared."""

REPEATS_COUNTED = 10


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of each turn of one driver."""

    prepare: list[float] = field(default_factory=list)
    repeat: list[float] = field(default_factory=list)
    unprepare: list[float] = field(default_factory=list)


def run(bench: benchmark.Bench) -> report.Part:
    """All levels, from few claims to many."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    with ExitStack() as stack:
        contest = bench.contest(stack, *drivers.PEERS)
        the_floor = stack.enter_context(floor.Floor(bench.fresh_directory("floor"), bench.environment.address))
        for level in bench.options.levels:
            more, verdicts = _level(bench, contest, the_floor, level)
            series += more
            figures += verdicts
        figures.append(_repeat_asks_nothing(bench, contest[0]))
    return report.Part(name="prepare", series=tuple(series), figures=tuple(figures), left_out=bench.left_out())


def _level(
    bench: benchmark.Bench, contest: list[drivers.Ready], the_floor: floor.Floor, level: int
) -> tuple[list[report.Series], list[report.Figure]]:
    for driver in contest:
        driver.fill(level)
    rounds = benchmark.WARM_UP + bench.options.rounds
    made = {driver.subject: driver.make_claims(f"turn-{level}", rounds) for driver in contest}
    turns = {driver.subject: Turns() for driver in contest}
    steps: list[floor.Steps] = []

    def floor_turn(index: int) -> None:
        bench.pause()
        steps.append(the_floor.run(made[drivers.AGENT][index].path))

    def driver_turn(driver: drivers.Ready, index: int) -> None:
        _turn(bench, driver, made[driver.subject][index], turns[driver.subject])

    actors: list[Callable[[int], None]] = [partial(driver_turn, driver) for driver in contest]
    actors.insert(1, floor_turn)
    cpu_before: dict[str, float] = {}
    for index in range(rounds):
        if index == benchmark.WARM_UP:
            cpu_before = {driver.subject: processes.cpu_seconds(driver.running.process.tree()) for driver in contest}
        for actor in benchmark.rotated(actors, index):
            actor(index)
    cpu = {
        driver.subject: processes.cpu_seconds(driver.running.process.tree()) - cpu_before[driver.subject]
        for driver in contest
    }
    for driver in contest:
        bench.server.delete_claims(made[driver.subject])
    counted = slice(benchmark.WARM_UP, None)
    return _judge(
        level,
        {
            name: Turns(turn.prepare[counted], turn.repeat[counted], turn.unprepare[counted])
            for name, turn in turns.items()
        },
        steps[counted],
        {name: seconds / bench.options.rounds for name, seconds in cpu.items()},
    )


def _turn(bench: benchmark.Bench, driver: drivers.Ready, claim: claims.Claim, turns: Turns) -> None:
    bench.pause()
    turns.prepare.append(driver.client.prepare(claim))
    bench.pause()
    turns.repeat.append(driver.client.prepare(claim))
    bench.pause()
    turns.unprepare.append(driver.client.unprepare(claim))


def _judge(
    level: int, turns: dict[str, Turns], steps: list[floor.Steps], cpu: dict[str, float]
) -> tuple[list[report.Series], list[report.Figure]]:
    beside = f"{level} prepared"
    agent = turns[drivers.AGENT]
    floors = [step.total for step in steps]
    empty_rpcs = [step.rpc for step in steps]
    series = [
        report.milliseconds(f"{what}, {beside}", subject, values)
        for subject, turn in turns.items()
        for what, values in (("prepare", turn.prepare), ("repeat", turn.repeat), ("unprepare", turn.unprepare))
    ]
    series += [
        report.milliseconds(f"floor, {beside}", "floor", floors),
        report.milliseconds(f"floor: empty RPC, {beside}", "floor", empty_rpcs),
        report.milliseconds(f"floor: GET, {beside}", "floor", [step.get for step in steps]),
        report.milliseconds(f"floor: commit, {beside}", "floor", [step.commit for step in steps]),
        report.milliseconds(f"floor: file, {beside}", "floor", [step.file for step in steps]),
    ]
    series += [
        report.milliseconds(f"CPU of prepare + repeat + unprepare, {beside}", subject, [seconds])
        for subject, seconds in cpu.items()
    ]
    to_floor = report.ratio(f"prepare, {beside}", "agent/floor", agent.prepare, floors)
    to_empty = report.ratio(f"repeat, {beside}", "agent/empty RPC", agent.repeat, empty_rpcs)
    series += [to_floor, to_empty]
    note = ADMIN_NOTE if level else ""
    figures = [
        _ratio_figure(f"prepare against its floor, {beside}", 1.3, to_floor, note),
        _ratio_figure(f"repeat against an empty RPC, {beside}", 2, to_empty, note),
    ]
    for subject, called in drivers.PEERS.items():
        peer = turns.get(subject)
        if peer is None:
            continue
        sides = f"agent/{subject}"
        to_peer = report.ratio(f"prepare, {beside}", sides, agent.prepare, peer.prepare)
        series += [
            to_peer,
            report.ratio(f"repeat, {beside}", sides, agent.repeat, peer.repeat),
            report.ratio(f"unprepare, {beside}", sides, agent.unprepare, peer.unprepare),
        ]
        if level in OF_PEER:
            figures.append(_ratio_figure(f"prepare of {called}, {beside}", OF_PEER[level], to_peer, note))
        figures.append(
            report.Figure(
                what=f"prepare p99 of {called}, {beside}",
                limit=1,
                unit=report.Unit.RATIO,
                measured=stats.percentile(agent.prepare, 99) / stats.percentile(peer.prepare, 99),
                note=note,
            )
        )
    return series, figures


def _repeat_asks_nothing(bench: benchmark.Bench, driver: drivers.Ready) -> report.Figure:
    """Whether repeats of a completed claim reach the API server."""
    (claim,) = driver.make_claims("repeated", 1)
    driver.client.prepare(claim)
    before = bench.environment.claim_reads()
    for _ in range(REPEATS_COUNTED):
        driver.client.prepare(claim)
    asked = bench.environment.claim_reads() - before
    driver.client.unprepare(claim)
    return report.Figure(
        what=f"API calls of {REPEATS_COUNTED} repeats of a completed claim",
        limit=0,
        unit=report.Unit.COUNT,
        measured=asked,
    )


def _ratio_figure(what: str, limit: float, ratios: report.Series, note: str) -> report.Figure:
    return report.Figure(what=what, limit=limit, unit=report.Unit.RATIO, measured=ratios.summary.p50, note=note)
