# SPDX-License-Identifier: Apache-2.0
"""What a look at a machine costs, through the child process that does it: the first, which starts the child and loads NVML,
later ones, and the cheap rescan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from discovery import child
from discovery.errors import ProbeError
from discovery.mock import render, zoo
from hack.bench import bench as benchmark
from hack.bench import drivers, report
from hack.bench.errors import BenchError

LARGE = Path(__file__).parent.parent / "machines" / "sixteen-gpus.yaml"
LARGE_NAME = "16 GPUs, 32 NICs"
MACHINES = {"dgx-h100": "dgx-h100", LARGE_NAME: str(LARGE)}
LIMIT_MS = 100
TIMEOUT_S = 60.0


def run(bench: benchmark.Bench) -> report.Part:
    """Both machines. The mock library is part of what is measured; the real one takes times of its own."""
    series: list[report.Series] = []
    warm: dict[str, report.Series] = {}
    for name, machine in MACHINES.items():
        tree = render.render(zoo.load(machine), bench.fresh_directory("machine"))
        source = child.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
        first: list[float] = []
        for _ in range(max(3, bench.options.probes // 10)):
            prober = child.ProbeChild(source=source, options=child.ProbeOptions())
            first.append(timed(bench, prober.probe))
            prober.close()
        prober = child.ProbeChild(source=source, options=child.ProbeOptions())
        try:
            timed(bench, prober.probe)
            later = [timed(bench, prober.probe) for _ in range(bench.options.probes)]
            rescans = [timed(bench, prober.rescan) for _ in range(bench.options.probes)]
        finally:
            prober.close()
        warm[name] = report.milliseconds(f"probe of {name}, warm", drivers.AGENT, later)
        series += [
            report.milliseconds(f"probe of {name}, first, with the start of the child", drivers.AGENT, first),
            warm[name],
            report.milliseconds(f"rescan of {name}", drivers.AGENT, rescans),
        ]
    return report.Part(
        name="probe",
        series=tuple(series),
        figures=(
            report.Figure(
                what=f"probe of {LARGE_NAME}, warm",
                limit=LIMIT_MS,
                unit=report.Unit.MILLISECONDS,
                measured=warm[LARGE_NAME].summary.p50,
            ),
        ),
    )


def timed(bench: benchmark.Bench, look: Callable[..., object]) -> float:
    """The seconds of one look, after a pause. Raises BenchError when it gives nothing."""
    bench.pause()
    began = time.perf_counter()
    try:
        look(timeout_s=TIMEOUT_S)
    except ProbeError as error:
        raise BenchError(f"A mock machine could not be read: {error}") from error
    return time.perf_counter() - began
