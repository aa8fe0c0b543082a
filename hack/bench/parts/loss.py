# SPDX-License-Identifier: Apache-2.0
"""What the loss of a GPU writes: one write of one ResourceSlice, whether NVML loses the GPU or the bus does."""

from __future__ import annotations

import time
from pathlib import Path

from discovery import address
from discovery.mock import faults
from discovery.mock.fault import Fault, Kind
from hack.bench import bench as benchmark
from hack.bench import drivers, report
from hack.bench.errors import BenchError

INTERVAL = "1s"
QUIET_S = 5.0
"""How long after the first write others are waited for: several probes."""

TIMEOUT_S = 30.0
KINDS = {Kind.GPU_LOST: "a GPU lost to NVML", Kind.FALLEN_OFF: "a GPU fallen off the bus"}


def run(bench: benchmark.Bench) -> report.Part:
    """Each kind of loss on an agent that looks at its hardware every second."""
    series: list[report.Series] = []
    figures: list[report.Figure] = []
    for kind, name in KINDS.items():
        with (
            drivers.Ready(bench.agent(f"--probe-interval={INTERVAL}"), bench.server) as agent,
            bench.server.watch_slices(node=agent.spec.node) as watch,
        ):
            bench.pause(QUIET_S)
            watch.take()
            began = time.perf_counter()
            faults.apply(_machine(agent), [Fault(kind=kind, target=_address(agent.devices[0]))])
            first = watch.wait(lambda _: True, timeout_s=TIMEOUT_S)
            if first is None:
                raise BenchError(f"{name}: no slice was written in {TIMEOUT_S:.0f} s")
            bench.pause(QUIET_S)
            writes = 1 + len(watch.take())
        series.append(
            report.Series(
                name=f"{name} to the slice that says so, looked for every {INTERVAL}",
                subject=drivers.AGENT,
                unit=report.Unit.MILLISECONDS,
                values=((first.at - began) * 1000,),
            )
        )
        figures.append(report.Figure(what=f"slice writes for {name}", limit=1, unit=report.Unit.COUNT, measured=writes))
    return report.Part(name="loss", series=tuple(series), figures=tuple(figures))


def _machine(agent: drivers.Ready) -> Path:
    """Where the agent has put up its mock machine."""
    return agent.spec.directory / "state" / "mock"


def _address(device: str) -> address.PciAddress:
    """The PCI address in the name of a device: gpu-0000-1b-00-0."""
    domain, bus, slot, function = device.removeprefix("gpu-").split("-")
    return address.parse(f"{domain}:{bus}:{slot}.{function}")
