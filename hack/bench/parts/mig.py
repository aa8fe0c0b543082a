# SPDX-License-Identifier: Apache-2.0
"""Latency of a claim for a MIG instance that is made for it, beside a claim for a whole GPU and beside the work at the hardware alone,
with hardware that takes no time and with hardware that takes its time.

A Prepare with a partition is a whole GPU's, one commit more (the row that says that it has begun) and one call to a worker, which the
hardware's own time is part of: that call is made from here too, in turn, by workers of the benchmark's own on the same machine.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from discovery import mig, options, workers
from discovery.mock import zoo
from driver import values
from hack.bench import bench as benchmark
from hack.bench import beside, drivers, floor, report

TIMES_S = (0.0, 0.2)
"""How long the hardware takes to make an instance, and to remove it."""

_PROFILE, _PROFILE_ID = "1g.10gb", 19
_CLAIMED, _ALONE = 0, 5
"""The places of the claims, and of the work alone."""

_CALL_S = 30.0


def run(bench: benchmark.Bench) -> report.Part:
    """Both machines."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for seconds in TIMES_S:
        more, verdicts = _measure(bench, seconds)
        series += more
        figures += verdicts
    return report.Part(name="mig", series=tuple(series), figures=tuple(figures))


def _measure(bench: benchmark.Bench, seconds: float) -> tuple[list[report.Series], list[report.Figure]]:
    home = bench.fresh_directory("mig")
    home.mkdir()
    machine, config = home / "machine.yaml", home / "config.yaml"
    machine.write_text(_machine(seconds))
    config.write_text(_CONFIG)
    made: list[float] = []
    removed: list[float] = []
    commit: list[float] = []
    with ExitStack() as stack:
        agent = stack.enter_context(drivers.Ready(bench.agent(f"--mock={machine}", f"--config={config}"), bench.server))
        the_floor = stack.enter_context(floor.Floor(bench.fresh_directory("floor"), bench.environment.address))
        state = agent.spec.directory / "state"
        hands = workers.Workers(source=options.Source.rendered(state / "mock"), locks=state / "locks")
        stack.callback(hands.close)
        name = next(name for name in agent.devices if name.endswith(f"-{_PROFILE_ID}-{_CLAIMED}"))
        divided = values.gpu_of(name)
        part = beside.Claims(bench, agent, name)
        whole = beside.Claims(
            bench, agent, next(name for name in agent.devices if values.gpu_of(name) == name and name != divided)
        )
        gpu = beside.address(divided)

        def alone(index: int) -> None:
            wanted = (mig.Partition(gpu=gpu, profile_id=_PROFILE_ID, start=_ALONE),)
            bench.pause()
            began = time.perf_counter()
            hands.create(gpu, wanted, begun=False, toggle=True, commit=lambda: None, timeout_s=_CALL_S)
            made.append(time.perf_counter() - began)
            bench.pause()
            began = time.perf_counter()
            hands.destroy(gpu, wanted, timeout_s=_CALL_S)
            removed.append(time.perf_counter() - began)
            bench.pause()
            commit.append(the_floor.run(whole.made[index].path).commit)

        beside.play(bench, [part.turn, alone, whole.turn])
        part.end()
        whole.end()
    return beside.judge(
        "a partition",
        f"hardware takes {seconds:g} s",
        part,
        whole,
        alone=(
            ("one call that makes an instance", "worker", made),
            ("one call that removes an instance", "worker", removed),
            ("commit", "floor", commit),
        ),
        prepare=beside.More(parts=(made, commit), called=", the call and a commit"),
        unprepare=beside.More(parts=(removed,), called=", the call"),
    )


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
