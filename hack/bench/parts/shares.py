# SPDX-License-Identifier: Apache-2.0
"""Latency of a claim for a share of a GPU, beside a claim for a whole GPU of the same agent.

A share that nothing enforces costs what a whole GPU costs. One whose memory the driver counts by cgroup costs one call to a worker more,
at Prepare and at Unprepare: that call is made from here too, in turn, by a worker of the benchmark's own on the same machine.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from discovery import limits, options, workers
from discovery.mock import podcgroups
from hack.bench import bench as benchmark
from hack.bench import beside, claims, drivers, report

MACHINES = (("advisory", "dgx-h100"), ("cgroup", "dgx-h100-shares"))
"""How memory is held on them: a driver too old for limits, and one that has them."""

_SHARE = {"memory": "10Gi", "compute": "10", "shares": "1"}
_LIMIT = 10 << 30
_CALL_S = 30.0


def run(bench: benchmark.Bench) -> report.Part:
    """Both machines."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for how, machine in MACHINES:
        more, verdicts = _measure(bench, how, machine, by_cgroup=how == "cgroup")
        series += more
        figures += verdicts
    return report.Part(name="shares", series=tuple(series), figures=tuple(figures))


def _measure(
    bench: benchmark.Bench, how: str, machine: str, *, by_cgroup: bool
) -> tuple[list[report.Series], list[report.Figure]]:
    home = bench.fresh_directory("shares")
    home.mkdir()
    config = home / "config.yaml"
    config.write_text(_CONFIG)
    limited: list[float] = []
    freed: list[float] = []
    with ExitStack() as stack:
        spec = bench.agent(f"--mock={machine}", f"--config={config}")
        agent = stack.enter_context(drivers.Ready(spec, bench.server))
        mock = spec.directory / "state" / "mock"
        pods = mock / "sys" / "fs" / "cgroup"
        pod = str(podcgroups.make(pods, claims.NOBODY.uid, qos="burstable", driver="cgroupfs")) if by_cgroup else ""
        hands = workers.Workers(source=options.Source.rendered(mock), locks=spec.directory / "state" / "locks")
        stack.callback(hands.close)
        of_shares, exclusive = _devices(bench, agent)
        share = beside.Claims(bench, agent, of_shares, share=_SHARE)
        whole = beside.Claims(bench, agent, exclusive)
        gpu = beside.address(exclusive)

        def alone(_: int) -> None:
            for limit, seconds in (
                (limits.MemoryLimit(soft=_LIMIT, hard=_LIMIT), limited),
                (limits.NO_LIMIT, freed),
            ):
                bench.pause()
                began = time.perf_counter()
                hands.limit_memory(gpu, {pod: limit}, timeout_s=_CALL_S)
                seconds.append(time.perf_counter() - began)

        beside.play(bench, [share.turn, whole.turn, *([alone] if by_cgroup else [])])
        share.end()
        whole.end()
    return beside.judge(
        "a share",
        how,
        share,
        whole,
        alone=(
            ("one call that limits a cgroup", "worker", limited),
            ("one call that takes the limit away", "worker", freed),
        )
        if by_cgroup
        else (),
        prepare=beside.More(parts=(limited,), called=" and the call") if by_cgroup else beside.More(),
        unprepare=beside.More(parts=(freed,), called=" and the call") if by_cgroup else beside.More(),
    )


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
