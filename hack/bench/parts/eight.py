# SPDX-License-Identifier: Apache-2.0
"""A node full of work at once: eight claims in eight RPCs, eight in one, and one claim with eight devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from hack.bench import bench as benchmark
from hack.bench import claims, drivers, report

OF_PEER = 0.8
"""The most of the Go driver's time that eight claims at once may take."""

EIGHT_RPCS = "8 claims at once, 8 RPCs, until the last"
ONE_RPC = "8 claims at once, one RPC"
ONE_CLAIM = "one claim with 8 devices"


def run(bench: benchmark.Bench) -> report.Part:
    """The three shapes, turn by turn."""
    with ExitStack() as stack:
        contest = bench.contest(stack, *drivers.PEERS)
        taken = {driver.subject: _Shapes(bench, driver) for driver in contest}
        for index in range(benchmark.WARM_UP + bench.options.bursts):
            for driver in benchmark.rotated(contest, index):
                taken[driver.subject].turn()
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for shape in (EIGHT_RPCS, ONE_RPC, ONE_CLAIM):
        seconds = {subject: shapes.seconds[shape][benchmark.WARM_UP :] for subject, shapes in taken.items()}
        series += [report.milliseconds(shape, subject, values) for subject, values in seconds.items()]
        for peer, called in drivers.PEERS.items():
            if peer not in seconds:
                continue
            ratios = report.ratio(shape, f"agent/{peer}", seconds[drivers.AGENT], seconds[peer])
            series.append(ratios)
            if shape != ONE_CLAIM:
                figures.append(
                    report.Figure(
                        what=f"{shape}, of {called}",
                        limit=OF_PEER,
                        unit=report.Unit.RATIO,
                        measured=ratios.summary.p50,
                    )
                )
    return report.Part(name="eight", series=tuple(series), figures=tuple(figures), left_out=bench.left_out())


class _Shapes:
    """The shapes of work for one driver, and the seconds that they took."""

    def __init__(self, bench: benchmark.Bench, driver: drivers.Ready) -> None:
        self._bench = bench
        self._client = driver.client
        self._eight = driver.make_claims("eight", 8)
        self._one = driver.make_claims("whole", 1, devices=8)
        self.seconds: dict[str, list[float]] = {EIGHT_RPCS: [], ONE_RPC: [], ONE_CLAIM: []}

    def turn(self) -> None:
        """Every shape once."""
        self._measure(EIGHT_RPCS, self._eight, lambda: self._client.prepare_side_by_side(self._eight))
        self._measure(ONE_RPC, self._eight, lambda: self._client.prepare(*self._eight))
        self._measure(ONE_CLAIM, self._one, lambda: self._client.prepare(*self._one))

    def _measure(self, shape: str, wanted: list[claims.Claim], prepare: Callable[[], float]) -> None:
        self._bench.pause()
        self.seconds[shape].append(prepare())
        self._bench.pause()
        self._client.unprepare(*wanted)
