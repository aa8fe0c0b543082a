# SPDX-License-Identifier: Apache-2.0
"""A window in which nothing happens: CPU, and requests to the API server. Kubelet is connected and watches health."""

from __future__ import annotations

from contextlib import ExitStack

from hack.bench import bench as benchmark
from hack.bench import drivers, processes, report

CPU_LIMIT_PERCENT = 0.2


def run(bench: benchmark.Bench) -> report.Part:
    """Both drivers in the same window. The API server counts the requests of all, so the agent has one window alone."""
    series: list[report.Series] = []
    with ExitStack() as stack:
        contest = bench.contest(stack)
        contest[0].client.watch_health()
        bench.pause(bench.options.settle_s)
        before = [processes.cpu_seconds(driver.running.process.tree()) for driver in contest]
        bench.pause(bench.options.idle_s)
        for driver, earlier in zip(contest, before, strict=True):
            used = processes.cpu_seconds(driver.running.process.tree()) - earlier
            series.append(
                report.Series(
                    name=f"CPU in {bench.options.idle_s:.0f} s of idleness",
                    subject=driver.subject,
                    unit=report.Unit.PERCENT_OF_A_CORE,
                    values=(used / bench.options.idle_s * 100,),
                )
            )
    with drivers.Ready(bench.agent(), bench.server) as agent:
        agent.client.watch_health()
        bench.pause(bench.options.settle_s)
        writes = bench.server.writes()
        bench.pause(bench.options.idle_s)
        writes = bench.server.writes() - writes
    return report.Part(
        name="idle",
        series=tuple(series),
        figures=(
            report.Figure(
                what="idle CPU",
                limit=CPU_LIMIT_PERCENT,
                unit=report.Unit.PERCENT_OF_A_CORE,
                measured=series[0].values[0],
            ),
            report.Figure(
                what=f"API writes in {bench.options.idle_s:.0f} s of no change",
                limit=0,
                unit=report.Unit.COUNT,
                measured=writes,
            ),
        ),
        left_out=bench.left_out(),
    )
