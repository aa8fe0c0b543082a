# SPDX-License-Identifier: Apache-2.0
"""From exec to serving, to the registration socket and to the first slice; a restart with nothing changed; the end.

A machine is there before its agent starts. A mock machine is put up by the first start of its agent, some thousand files of
it, so a first start is made that does not count, and the slices that it left are deleted.
"""

from __future__ import annotations

from collections import defaultdict

from hack.bench import apiserver, dra, drivers, report
from hack.bench import bench as benchmark

SERVING = "exec to sockets serving"
REGISTRATION = "exec to registration socket"
FIRST_SLICE = "exec to first slice accepted"
RESTART = "restart with nothing changed, exec to sockets serving"
WRITES = "restart with nothing changed, slice writes"
END = "SIGTERM to the end"

SERVING_LIMIT_MS = 450
SETTLED_S = 4.0
"""How long a restarted driver is watched for writes: over three times what the Go helper waits before its first."""


def run(bench: benchmark.Bench) -> report.Part:
    """Starts of fresh drivers and restarts of the same, turn by turn. The first turn warms the page cache and is dropped."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    writes: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.options.starts + 1):
        specs = [spec for spec in (bench.agent(), bench.yardstick()) if spec is not None]
        for spec in benchmark.rotated(specs, turn):
            bench.pause()
            found, written = _start(bench, spec)
            if turn:
                for what, took in found.items():
                    seconds[what, spec.subject].append(took)
                writes[spec.subject].append(written)
    series = [report.milliseconds(what, subject, values) for (what, subject), values in sorted(seconds.items())]
    series += [
        report.Series(name=WRITES, subject=subject, unit=report.Unit.COUNT, values=tuple(values))
        for subject, values in writes.items()
    ]
    by_name = {(one.name, one.subject): one for one in series}
    figures = [
        report.Figure(
            what=SERVING,
            limit=SERVING_LIMIT_MS,
            unit=report.Unit.MILLISECONDS,
            measured=by_name[SERVING, drivers.AGENT].summary.p50,
        ),
        report.Figure(
            what=WRITES, limit=0, unit=report.Unit.COUNT, measured=by_name[WRITES, drivers.AGENT].summary.max
        ),
    ]
    if (FIRST_SLICE, drivers.PEER) in seconds:
        ratios = report.ratio(
            FIRST_SLICE, "agent/peer", seconds[FIRST_SLICE, drivers.AGENT], seconds[FIRST_SLICE, drivers.PEER]
        )
        series.append(ratios)
        figures.append(
            report.Figure(
                what=f"{FIRST_SLICE}, of the Go driver's",
                limit=1,
                unit=report.Unit.RATIO,
                measured=ratios.summary.p50,
            )
        )
    return report.Part(name="startup", series=tuple(series), figures=tuple(figures), left_out=bench.left_out())


def _start(bench: benchmark.Bench, spec: drivers.Spec) -> tuple[dict[str, float], int]:
    with drivers.Ready(spec, bench.server):
        pass
    for item in bench.server.slices(node=spec.node):
        bench.server.call("DELETE", f"{apiserver.SLICES}/{item['metadata']['name']}")
    with bench.server.watch_slices(node=spec.node) as watch:
        with drivers.Running(spec) as driver:
            found = {
                REGISTRATION: driver.await_registration_socket(),
                SERVING: driver.await_serving(),
                FIRST_SLICE: driver.await_slice(watch),
            }
            dra.register(spec.registration_socket)
            found[END] = driver.stop()
        watch.take()
        with drivers.Running(spec) as driver:
            found[RESTART] = driver.await_serving()
            dra.register(spec.registration_socket)
            bench.pause(SETTLED_S)
        written = len(watch.take())
    return found, written
