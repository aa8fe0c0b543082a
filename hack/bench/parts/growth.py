# SPDX-License-Identifier: Apache-2.0
"""What many prepared claims cost the next one: two agents side by side, one with a claim prepared, one with a thousand."""

from __future__ import annotations

from hack.bench import bench as benchmark
from hack.bench import drivers, report

FEW = 1
LIMIT = 1.1
"""The most that Prepare may cost with many claims, of what it costs with few."""


def run(bench: benchmark.Bench) -> report.Part:
    """Turn by turn, so that the machine is the same for both."""
    many = max(bench.options.levels)
    rounds = benchmark.WARM_UP + bench.options.rounds
    with drivers.Ready(bench.agent(), bench.server) as light, drivers.Ready(bench.agent(), bench.server) as laden:
        light.fill(FEW)
        laden.fill(many)
        both = (light, laden)
        made = [driver.make_claims("growth", rounds) for driver in both]
        seconds: tuple[list[float], list[float]] = ([], [])
        for index in range(rounds):
            for side in benchmark.rotated((0, 1), index):
                bench.pause()
                seconds[side].append(both[side].client.prepare(made[side][index]))
                bench.pause()
                both[side].client.unprepare(made[side][index])
    few, lots = (values[benchmark.WARM_UP :] for values in seconds)
    ratios = report.ratio("prepare", f"{many} prepared / {FEW} prepared", lots, few)
    return report.Part(
        name="growth",
        series=(
            report.milliseconds(f"prepare, {FEW} prepared", drivers.AGENT, few),
            report.milliseconds(f"prepare, {many} prepared", drivers.AGENT, lots),
            ratios,
        ),
        figures=(
            report.Figure(
                what=f"prepare with {many} claims prepared, against {FEW}",
                limit=LIMIT,
                unit=report.Unit.RATIO,
                measured=ratios.summary.p50,
            ),
        ),
    )
