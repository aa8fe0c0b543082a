# SPDX-License-Identifier: Apache-2.0
"""Claims prepared and unprepared in a second, without pauses: by one caller, and by eight with a GPU each."""

from __future__ import annotations

import time
from concurrent import futures
from contextlib import ExitStack

from hack.bench import bench as benchmark
from hack.bench import claims, drivers, report

BLOCKS = 4
"""The time of a driver is cut into blocks, taken turn by turn with the other's."""


def run(bench: benchmark.Bench) -> report.Part:
    """All levels."""
    series: list[report.Series] = []
    with ExitStack() as stack:
        contest = bench.contest(stack)
        made = {driver.subject: driver.make_claims("stream", 8) for driver in contest}
        for level in bench.options.levels:
            for driver in contest:
                driver.fill(level)
            for callers in (1, 8):
                rates: dict[str, list[float]] = {driver.subject: [] for driver in contest}
                for block in range(BLOCKS):
                    for driver in benchmark.rotated(contest, block):
                        bench.pause()
                        rates[driver.subject].append(
                            _block(driver, made[driver.subject][:callers], bench.options.throughput_s / BLOCKS / 2)
                        )
                series += [
                    report.Series(
                        name=f"prepare + unprepare, callers: {callers}, {level} prepared",
                        subject=subject,
                        unit=report.Unit.PER_SECOND,
                        values=tuple(values),
                    )
                    for subject, values in rates.items()
                ]
    return report.Part(name="throughput", series=tuple(series), left_out=bench.left_out())


def _block(driver: drivers.Ready, wanted: list[claims.Claim], seconds: float) -> float:
    """Claims a second, each claim prepared and unprepared over and over by a caller of its own."""
    began = time.perf_counter()
    deadline = began + seconds

    def call(claim: claims.Claim) -> int:
        count = 0
        while time.perf_counter() < deadline:
            driver.client.prepare(claim)
            driver.client.unprepare(claim)
            count += 1
        return count

    with futures.ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        total = sum(pool.map(call, wanted))
    return total / (time.perf_counter() - began)
