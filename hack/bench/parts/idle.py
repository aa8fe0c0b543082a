# SPDX-License-Identifier: Apache-2.0
"""A window in which nothing happens: CPU, and writes to the API server. Kubelet is connected and watches health."""

from __future__ import annotations

from contextlib import ExitStack

from hack.bench import bench as benchmark
from hack.bench import processes, report

CPU_LIMIT_PERCENT = 0.2


def run(bench: benchmark.Bench) -> report.Part:
    """Both drivers in one window. The API server does not tell their writes apart, so none must come from either."""
    window = f"{bench.options.idle_s:.0f} s"
    with ExitStack() as stack:
        contest = bench.contest(stack)
        contest[0].client.watch_health()
        bench.pause(bench.options.settle_s)
        writes = bench.environment.writes()
        before = [processes.cpu_seconds(driver.running.process.tree()) for driver in contest]
        bench.pause(bench.options.idle_s)
        used = [
            processes.cpu_seconds(driver.running.process.tree()) - earlier
            for driver, earlier in zip(contest, before, strict=True)
        ]
        writes = bench.environment.writes() - writes
    series = tuple(
        report.Series(
            name=f"CPU in {window} of idleness",
            subject=driver.subject,
            unit=report.Unit.PERCENT_OF_A_CORE,
            values=(seconds / bench.options.idle_s * 100,),
        )
        for driver, seconds in zip(contest, used, strict=True)
    )
    return report.Part(
        name="idle",
        series=series,
        figures=(
            report.Figure(
                what="idle CPU",
                limit=CPU_LIMIT_PERCENT,
                unit=report.Unit.PERCENT_OF_A_CORE,
                measured=series[0].values[0],
            ),
            report.Figure(
                what=f"API writes in {window} of no change", limit=0, unit=report.Unit.COUNT, measured=writes
            ),
        ),
        left_out=bench.left_out(),
    )
