# SPDX-License-Identifier: Apache-2.0
"""Latency of a claim for a MIG instance that is made for it, beside a claim for a whole GPU and beside the work at the hardware alone,
with hardware that takes no time and with hardware that takes its time.

A Prepare with a partition is a whole GPU's, one commit more (the row that says that it has begun) and one call to a worker, which the
hardware's own time is part of: that call is made from here too, in turn, by workers of the benchmark's own on the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from discovery import mig, options, workers
from discovery.address import PciAddress, parse
from discovery.mock import zoo
from driver import values
from hack.bench import bench as benchmark
from hack.bench import claims, drivers, floor, report

TIMES_S = (0.0, 0.2)
"""How long the hardware takes to make an instance, and to remove it."""

OF_PARTS = 1.2
"""The most that a Prepare with a partition may take, of the sum of what it is made of."""

_PROFILE, _PROFILE_ID = "1g.10gb", 19
_CLAIMED, _ALONE = 0, 5
"""The places of the claims, and of the work alone."""

_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class _Turns:
    """Seconds of each turn."""

    part: list[float] = field(default_factory=list)
    part_back: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    whole_back: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)
    removed: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)


def run(bench: benchmark.Bench) -> report.Part:
    """Both machines."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for seconds in TIMES_S:
        turns = _measure(bench, seconds)
        more, verdicts = _judge(f"hardware takes {seconds:g} s", turns)
        series += more
        figures += verdicts
    return report.Part(name="mig", series=tuple(series), figures=tuple(figures))


def _measure(bench: benchmark.Bench, seconds: float) -> _Turns:
    home = bench.fresh_directory("mig")
    home.mkdir()
    machine, config = home / "machine.yaml", home / "config.yaml"
    machine.write_text(_machine(seconds))
    config.write_text(_CONFIG)
    turns = _Turns()
    rounds = benchmark.WARM_UP + bench.options.rounds
    with ExitStack() as stack:
        agent = stack.enter_context(drivers.Ready(bench.agent(f"--mock={machine}", f"--config={config}"), bench.server))
        the_floor = stack.enter_context(floor.Floor(bench.fresh_directory("floor"), bench.environment.address))
        state = agent.spec.directory / "state"
        hands = workers.Workers(source=options.Source.rendered(state / "mock"), locks=state / "locks")
        stack.callback(hands.close)
        part = next(name for name in agent.devices if name.endswith(f"-{_PROFILE_ID}-{_CLAIMED}"))
        divided = values.gpu_of(part)
        whole = next(name for name in agent.devices if values.gpu_of(name) == name and name != divided)
        gpu = _address(divided)
        made = {name: _claims(bench, agent, device, rounds) for name, device in (("part", part), ("whole", whole))}

        def claim(kind: str, prepare: list[float], unprepare: list[float], index: int) -> None:
            wanted = made[kind][index]
            bench.pause()
            prepare.append(agent.client.prepare(wanted))
            bench.pause()
            unprepare.append(agent.client.unprepare(wanted))

        def alone(index: int) -> None:
            wanted = (mig.Partition(gpu=gpu, profile_id=_PROFILE_ID, start=_ALONE),)
            bench.pause()
            began = time.perf_counter()
            hands.create(gpu, wanted, begun=False, toggle=True, commit=lambda: None, timeout_s=_CALL_S)
            turns.made.append(time.perf_counter() - began)
            bench.pause()
            began = time.perf_counter()
            hands.destroy(gpu, wanted, timeout_s=_CALL_S)
            turns.removed.append(time.perf_counter() - began)
            bench.pause()
            turns.commit.append(the_floor.run(made["whole"][index].path).commit)

        actors: list[Callable[[int], None]] = [
            partial(claim, "part", turns.part, turns.part_back),
            alone,
            partial(claim, "whole", turns.whole, turns.whole_back),
        ]
        for index in range(rounds):
            for actor in benchmark.rotated(actors, index):
                actor(index)
        for kind in made.values():
            bench.server.delete_claims(kind)
    return turns


def _judge(how: str, turns: _Turns) -> tuple[list[report.Series], list[report.Figure]]:
    counted = slice(benchmark.WARM_UP, None)
    made_of = [
        sum(parts) for parts in zip(turns.whole[counted], turns.made[counted], turns.commit[counted], strict=True)
    ]
    back_of = [sum(parts) for parts in zip(turns.whole_back[counted], turns.removed[counted], strict=True)]
    series = [
        report.Series(
            name=f"{what}, {how}",
            subject=subject,
            unit=report.Unit.MILLISECONDS,
            values=tuple(value * 1000 for value in seconds[counted]),
        )
        for what, subject, seconds in (
            ("prepare of a partition", drivers.AGENT, turns.part),
            ("unprepare of a partition", drivers.AGENT, turns.part_back),
            ("prepare of a whole GPU", drivers.AGENT, turns.whole),
            ("unprepare of a whole GPU", drivers.AGENT, turns.whole_back),
            ("one call that makes an instance", "worker", turns.made),
            ("one call that removes an instance", "worker", turns.removed),
            ("commit", "floor", turns.commit),
        )
    ]
    ratios = (
        report.ratio(f"prepare of a partition, {how}", "agent/its parts", turns.part[counted], made_of),
        report.ratio(f"unprepare of a partition, {how}", "agent/its parts", turns.part_back[counted], back_of),
    )
    figures = [
        report.Figure(
            what=f"{ratio.name}: of a whole GPU's, the call{' and a commit' if ratio is ratios[0] else ''}",
            limit=OF_PARTS,
            unit=report.Unit.RATIO,
            measured=ratio.summary.p50,
        )
        for ratio in ratios
    ]
    return [*series, *ratios], figures


_CONFIG = f"""\
apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing: [{{match: {{count: 1}}, mode: mig-dynamic, profiles: [{_PROFILE}]}}]
"""


def _machine(seconds: float) -> str:
    """The machine of the other parts, whose hardware takes this long."""
    before, driver, after = zoo.text(drivers.MACHINE).partition("\ndriver: {")
    assert driver, "a machine has a driver"
    return f"{before}{driver}migTimes: {{create: {seconds}, destroy: {seconds}}}, {after}"


def _address(gpu: str) -> PciAddress:
    domain, bus, device, function = gpu.split("-")[1:]
    return parse(f"{domain}:{bus}:{device}.{function}")


def _claims(bench: benchmark.Bench, agent: drivers.Ready, device: str, count: int) -> list[claims.Claim]:
    return bench.server.create_claims(
        (f"{device}-{agent.spec.node}-{index}" for index in range(count)),
        driver=agent.spec.driver_name,
        node=agent.spec.node,
        devices=lambda _: (device,),
    )
