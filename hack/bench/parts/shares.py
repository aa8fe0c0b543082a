# SPDX-License-Identifier: Apache-2.0
"""Latency of a claim for a share of a GPU, beside a claim for a whole GPU of the same agent.

A share that nothing enforces costs what a whole GPU costs. One whose memory the driver counts by cgroup costs one call to a worker more,
at Prepare and at Unprepare: that call is made from here too, in turn, by a worker of the benchmark's own on the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from discovery import limits, options, workers
from discovery.address import PciAddress, parse
from discovery.mock import podcgroups
from hack.bench import bench as benchmark
from hack.bench import claims, drivers, report

MACHINES = (("advisory", "dgx-h100"), ("cgroup", "dgx-h100-shares"))
"""How memory is held on them: a driver too old for limits, and one that has them."""

OF_PARTS = 1.2
"""The most that a Prepare may take, of the sum of what it is made of."""

_SHARE = {"memory": "10Gi", "compute": "10", "shares": "1"}
_LIMIT = 10 << 30
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class _Turns:
    """Seconds of each turn; of the calls only where memory is held by cgroup."""

    share: list[float] = field(default_factory=list)
    share_back: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    whole_back: list[float] = field(default_factory=list)
    limited: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)


def run(bench: benchmark.Bench) -> report.Part:
    """Both machines."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for how, machine in MACHINES:
        more, verdicts = _judge(how, _measure(bench, machine, limited=how == "cgroup"))
        series += more
        figures += verdicts
    return report.Part(name="shares", series=tuple(series), figures=tuple(figures))


def _measure(bench: benchmark.Bench, machine: str, *, limited: bool) -> _Turns:
    home = bench.fresh_directory("shares")
    home.mkdir()
    config = home / "config.yaml"
    config.write_text(_CONFIG)
    turns = _Turns()
    rounds = benchmark.WARM_UP + bench.options.rounds
    with ExitStack() as stack:
        spec = bench.agent(f"--mock={machine}", f"--config={config}")
        agent = stack.enter_context(drivers.Ready(spec, bench.server))
        mock = spec.directory / "state" / "mock"
        pods = mock / "sys" / "fs" / "cgroup"
        pod = str(podcgroups.make(pods, claims.NOBODY.uid, qos="burstable", driver="cgroupfs")) if limited else ""
        hands = workers.Workers(source=options.Source.rendered(mock), locks=spec.directory / "state" / "locks")
        stack.callback(hands.close)
        shared, whole = _devices(bench, agent)
        made = {
            "share": _claims(bench, agent, shared, rounds, share=_SHARE),
            "whole": _claims(bench, agent, whole, rounds, share=None),
        }

        def claim(kind: str, prepare: list[float], unprepare: list[float], index: int) -> None:
            wanted = made[kind][index]
            bench.pause()
            prepare.append(agent.client.prepare(wanted))
            bench.pause()
            unprepare.append(agent.client.unprepare(wanted))

        def alone(_: int) -> None:
            for limit, seconds in (
                (limits.MemoryLimit(soft=_LIMIT, hard=_LIMIT), turns.limited),
                (limits.NO_LIMIT, turns.freed),
            ):
                bench.pause()
                began = time.perf_counter()
                hands.limit_memory(_address(whole), {pod: limit}, timeout_s=_CALL_S)
                seconds.append(time.perf_counter() - began)

        actors: list[Callable[[int], None]] = [
            partial(claim, "share", turns.share, turns.share_back),
            partial(claim, "whole", turns.whole, turns.whole_back),
            *([alone] if limited else []),
        ]
        for index in range(rounds):
            for actor in benchmark.rotated(actors, index):
                actor(index)
        for kind in made.values():
            bench.server.delete_claims(kind)
    return turns


def _judge(how: str, turns: _Turns) -> tuple[list[report.Series], list[report.Figure]]:
    counted = slice(benchmark.WARM_UP, None)
    nothing = [0.0] * len(turns.share)
    calls = {"prepare": turns.limited or nothing, "unprepare": turns.freed or nothing}
    series = [
        report.Series(
            name=f"{what}, {how}",
            subject=subject,
            unit=report.Unit.MILLISECONDS,
            values=tuple(value * 1000 for value in seconds[counted]),
        )
        for what, subject, seconds in (
            ("prepare of a share", drivers.AGENT, turns.share),
            ("unprepare of a share", drivers.AGENT, turns.share_back),
            ("prepare of a whole GPU", drivers.AGENT, turns.whole),
            ("unprepare of a whole GPU", drivers.AGENT, turns.whole_back),
            ("one call that limits a cgroup", "worker", turns.limited),
            ("one call that takes the limit away", "worker", turns.freed),
        )
        if seconds
    ]
    figures: list[report.Figure] = []
    for verb, mine, whole in (
        ("prepare", turns.share, turns.whole),
        ("unprepare", turns.share_back, turns.whole_back),
    ):
        parts = [sum(both) for both in zip(whole[counted], calls[verb][counted], strict=True)]
        ratio = report.ratio(f"{verb} of a share, {how}", "agent/its parts", mine[counted], parts)
        series.append(ratio)
        figures.append(
            report.Figure(
                what=f"{ratio.name}: of a whole GPU's{' and the call' if turns.limited else ''}",
                limit=OF_PARTS,
                unit=report.Unit.RATIO,
                measured=ratio.summary.p50,
            )
        )
    return series, figures


_CONFIG = """\
apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing:
- match: {count: 1}
  mode: shares
  shares: {memory: none, compute: none}
"""


def _devices(bench: benchmark.Bench, agent: drivers.Ready) -> tuple[str, str]:
    """A GPU that is shared, and one that is not."""
    listed = [
        device for body in bench.server.slices(node=agent.spec.node) for device in body["spec"].get("devices") or []
    ]
    shared = next(device["name"] for device in listed if device.get("allowMultipleAllocations"))
    return shared, next(device["name"] for device in listed if not device.get("allowMultipleAllocations"))


def _address(gpu: str) -> PciAddress:
    domain, bus, device, function = gpu.split("-")[1:]
    return parse(f"{domain}:{bus}:{device}.{function}")


def _claims(
    bench: benchmark.Bench, agent: drivers.Ready, device: str, count: int, *, share: dict[str, str] | None
) -> list[claims.Claim]:
    return bench.server.create_claims(
        (f"{device}-{agent.spec.node}-{index}" for index in range(count)),
        driver=agent.spec.driver_name,
        node=agent.spec.node,
        devices=lambda _: (device,),
        share=share,
    )
