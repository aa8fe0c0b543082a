# SPDX-License-Identifier: Apache-2.0
"""Memory of all processes of a driver, after its start and with many claims prepared."""

from __future__ import annotations

from contextlib import ExitStack

from hack.bench import bench as benchmark
from hack.bench import drivers, processes, report

LIMIT_MB = 100
MEGA = 1e6


def run(bench: benchmark.Bench) -> report.Part:
    """The agent and the Go driver at the same times."""
    many = max(bench.options.levels)
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    with ExitStack() as stack:
        contest = bench.contest(stack)
        for moment, count in (("at start", 0), (f"with {many} claims", many)):
            for driver in contest:
                driver.fill(count)
            bench.pause(bench.options.settle_s)
            for driver in contest:
                used = processes.memory(driver.running.process.tree())
                series += [
                    _megabytes(f"summed PSS {moment}", driver.subject, used.pss),
                    _megabytes(f"as if alone on its node, {moment}", driver.subject, used.alone),
                ]
                if driver.subject == drivers.AGENT:
                    figures += [
                        _figure(f"memory, summed PSS {moment}", used.pss, ""),
                        _figure(
                            f"memory as if alone, {moment}", used.alone, "pages shared with the benchmark counted whole"
                        ),
                    ]
    return report.Part(name="memory", series=tuple(series), figures=tuple(figures), left_out=bench.left_out())


def _megabytes(name: str, subject: str, size: int) -> report.Series:
    return report.Series(name=name, subject=subject, unit=report.Unit.MEGABYTES, values=(size / MEGA,))


def _figure(what: str, size: int, note: str) -> report.Figure:
    return report.Figure(what=what, limit=LIMIT_MB, unit=report.Unit.MEGABYTES, measured=size / MEGA, note=note)
