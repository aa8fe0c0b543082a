# SPDX-License-Identifier: Apache-2.0
"""How long until hardware that was plugged in, pulled out, bound or unbound is in the slices, by how many writes; and that
NICs which flap and move into pods write nothing. The agent looks by itself once an hour only.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from discovery import address
from discovery.mock import fault, faults, recording
from discovery.mock.fault import Fault, Kind
from hack.bench import apiserver, drivers, exposition, report
from hack.bench import bench as benchmark
from hack.bench.errors import BenchError

LIMIT_MS = 1000
TIMEOUT_S = 30.0
QUIET_S = 2.0
"""How long after a write others are waited for, and between changes."""

INTERVAL = "3600s"
FLAPS = 20
PROBES = "nearfield_probe_duration_seconds_count"


def run(bench: benchmark.Bench) -> report.Part:
    """Each kind of change there and back again, then the NICs."""
    took: dict[str, list[float]] = {}
    most = 0
    with (
        drivers.Ready(bench.agent(f"--probe-interval={INTERVAL}"), bench.server) as agent,
        bench.server.watch_slices(node=agent.spec.node) as watch,
    ):
        machine = agent.spec.directory / "state" / "mock"
        tree = recording.Tree(recording.read(machine / faults.RECORDING_FILE).files)
        for _ in range(bench.options.repairs):
            for there, back, loss in _changes(agent.devices, tree):
                for what, now in ((there, (loss,)), (back, ())):
                    seconds, writes = _measure(bench, watch, machine, what, now)
                    took.setdefault(what, []).append(seconds * 1000)
                    most = max(most, writes)
        probes = _probes(agent)
        watch.take()
        _flap(machine, tree)
        bench.pause(QUIET_S)
        flapped = (len(watch.take()), _probes(agent) - probes)
    return report.Part(
        name="change",
        series=tuple(
            report.Series(
                name=f"{what}, from the last uevent to the slice",
                subject=drivers.AGENT,
                unit=report.Unit.MILLISECONDS,
                values=tuple(values),
            )
            for what, values in took.items()
        ),
        figures=(
            report.Figure(
                what="change of the hardware in the slices",
                limit=LIMIT_MS,
                unit=report.Unit.MILLISECONDS,
                measured=max(max(values) for values in took.values()),
                note="the longest",
            ),
            report.Figure(what="slice writes for one change", limit=1, unit=report.Unit.COUNT, measured=most),
            report.Figure(
                what=f"slice writes for {FLAPS} flaps of all NICs", limit=0, unit=report.Unit.COUNT, measured=flapped[0]
            ),
            report.Figure(
                what=f"full probes for {FLAPS} flaps of all NICs", limit=0, unit=report.Unit.COUNT, measured=flapped[1]
            ),
        ),
    )


def _changes(devices: Sequence[str], tree: recording.Tree) -> Iterator[tuple[str, str, Fault]]:
    """What happens, what undoes it, and the fault."""
    gpu = _address(devices[0])
    yield "GPU pulled out", "GPU plugged in", Fault(kind=Kind.FALLEN_OFF, target=gpu)
    yield "GPU unbound from its driver", "GPU bound to its driver", Fault(kind=Kind.NO_DRIVER, target=gpu)
    yield "GPU bound to vfio-pci", "GPU bound to its driver again", Fault(kind=Kind.VFIO_BOUND, target=gpu)
    port = address.parse((tree.function(gpu) or "").split("/")[3])
    yield "switch pulled out", "switch plugged in", Fault(kind=Kind.FALLEN_OFF, target=port)


def _measure(
    bench: benchmark.Bench, watch: apiserver.Watch, machine: Path, what: str, now: Sequence[fault.Fault]
) -> tuple[float, int]:
    """Seconds from the end of a change to the first write, and how many writes there were."""
    bench.pause(QUIET_S)
    watch.take()
    faults.apply(machine, now)
    ended = time.perf_counter()
    first = watch.wait(lambda _: True, timeout_s=TIMEOUT_S)
    if first is None:
        raise BenchError(f"{what}: no slice was written in {TIMEOUT_S:.0f} s")
    bench.pause(QUIET_S)
    return first.at - ended, 1 + len(watch.take())


def _flap(machine: Path, tree: recording.Tree) -> None:
    """All NICs lose their links, and their interfaces and RDMA devices move away and come back."""
    drivers_of_nics = "sys/bus/pci/drivers/mlx5_core/"
    nics = [
        address.parse(path.removeprefix(drivers_of_nics)) for path in tree.files if path.startswith(drivers_of_nics)
    ]
    kinds: Mapping[int, tuple[Kind, ...]] = {0: (Kind.LINK_DOWN,), 1: (Kind.NETDEV_MOVED, Kind.RDMA_MOVED)}
    for turn in range(FLAPS):
        faults.apply(machine, [Fault(kind=kind, target=nic) for kind in kinds[turn % 2] for nic in nics])
        faults.apply(machine, ())


def _probes(agent: drivers.Ready) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.spec.http_port}/metrics", timeout=10) as answer:
        return int(exposition.total(answer.read().decode(), PROBES))


def _address(device: str) -> address.PciAddress:
    """The PCI address in the name of a device: gpu-0000-1b-00-0."""
    domain, bus, slot, function = device.removeprefix("gpu-").split("-")
    return address.parse(f"{domain}:{bus}:{slot}.{function}")
