# SPDX-License-Identifier: Apache-2.0
"""How long until a slice that somebody edited or deleted is back, also when that happens again right after a repair."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from hack.bench import apiserver, drivers, report
from hack.bench import bench as benchmark
from hack.bench.errors import BenchError

LIMIT_MS = 2000
TIMEOUT_S = 60.0
QUIET_S = 2.5
"""Between harms that are not meant to follow upon each other."""

EDITED = "edited slice back"
DELETED = "deleted slice back"
DELETED_AGAIN = "deleted right after a repair, back"


def run(bench: benchmark.Bench) -> report.Part:
    """The agent only: the Go helper needs half a minute for each, by its design."""
    seconds: dict[str, list[float]] = {EDITED: [], DELETED: [], DELETED_AGAIN: []}
    with (
        drivers.Ready(bench.agent(), bench.server) as agent,
        bench.server.watch_slices(node=agent.spec.node) as watch,
    ):
        node = agent.spec.node
        for _ in range(bench.options.repairs):
            bench.pause(QUIET_S)
            seconds[EDITED].append(_edit(bench.server, watch, node))
            bench.pause(QUIET_S)
            seconds[DELETED].append(_delete(bench.server, watch, node))
            seconds[DELETED_AGAIN].append(_delete(bench.server, watch, node))
    series = tuple(report.milliseconds(what, drivers.AGENT, values) for what, values in seconds.items())
    return report.Part(
        name="repair",
        series=series,
        figures=tuple(
            report.Figure(
                what=one.name,
                limit=LIMIT_MS,
                unit=report.Unit.MILLISECONDS,
                measured=one.summary.max,
                note="the longest",
            )
            for one in series
        ),
    )


def _first_slice(server: apiserver.ApiServer, node: str) -> dict[str, Any]:
    return next(item for item in server.slices(node=node) if item["spec"].get("devices"))


def _edit(server: apiserver.ApiServer, watch: apiserver.Watch, node: str) -> float:
    right = _first_slice(server, node)
    wrong = copy.deepcopy(right)
    wrong["spec"]["devices"][0]["attributes"]["type"] = {"string": "edited"}
    watch.take()
    began = time.perf_counter()
    server.call("PUT", f"{apiserver.SLICES}/{right['metadata']['name']}", wrong)
    return _await(watch, right["spec"]["devices"], began)


def _delete(server: apiserver.ApiServer, watch: apiserver.Watch, node: str) -> float:
    right = _first_slice(server, node)
    watch.take()
    began = time.perf_counter()
    server.call("DELETE", f"{apiserver.SLICES}/{right['metadata']['name']}")
    return _await(watch, right["spec"]["devices"], began)


def _await(watch: apiserver.Watch, devices: list[Mapping[str, Any]], began: float) -> float:
    event = watch.wait(
        lambda event: event.kind != "DELETED" and event.object["spec"].get("devices") == devices, timeout_s=TIMEOUT_S
    )
    if event is None:
        raise BenchError(f"A harmed slice was not back in {TIMEOUT_S:.0f} s")
    return event.at - began
