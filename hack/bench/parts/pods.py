# SPDX-License-Identifier: Apache-2.0
"""Pods on a real node, from their creation to Running: with a GPU of either driver, and without; one, and eight at once.

Scheduler, controllers, kubelet and containerd do their part; kubelet calls the driver. What kubelet itself measured of its calls
is told beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from hack.bench import apiserver, drivers, exposition, realnode, report, workloads
from hack.bench import bench as benchmark

NONE = "no driver"
"""A pod without a claim: what the driver has no part in."""

ONE = "one pod, created to Running"
EIGHT = "8 pods at once, created to the last Running"
SINGLES_A_BURST = 3
CALLS = "dra_grpc_operations_duration_seconds"
METHODS = {"NodePrepareResources": "prepare", "NodeUnprepareResources": "unprepare"}


def run(bench: realnode.NodeBench) -> report.Part:
    """Turn by turn. The first turn of each is dropped, and so is a time in which a pod was held up by no driver."""
    with ExitStack() as stack:
        contest = bench.contest_at_kubelet(stack)
        watch = stack.enter_context(bench.server.watch(workloads.pods_path()))
        subjects = [*(driver.subject for driver in contest), NONE]
        before = bench.node.kubelet_metrics()
        turns = {
            ONE: _turns(bench, watch, subjects, count=1, turns=bench.options.pods),
            EIGHT: _turns(bench, watch, subjects, count=8, turns=bench.options.pods // SINGLES_A_BURST),
        }
        after = bench.node.kubelet_metrics()
    series = [
        report.Series(name=what, subject=subject, unit=report.Unit.MILLISECONDS, values=values)
        for what, taken in turns.items()
        for subject in subjects
        if (values := tuple(turn[subject] * 1000 for turn in taken if subject in turn))
    ]
    for what, taken in turns.items():
        pairs = [turn for turn in taken if {drivers.AGENT, drivers.PEER} <= turn.keys()]
        if pairs:
            series.append(
                report.ratio(
                    what, "agent/peer", [turn[drivers.AGENT] for turn in pairs], [turn[drivers.PEER] for turn in pairs]
                )
            )
    for driver in contest:
        series += _seen_by_kubelet(driver, before, after)
    dropped = sum(len(subjects) - len(turn) for taken in turns.values() for turn in taken)
    held_up = f"{dropped} times, in which the API server refused kubelet a claim, as it had not heard of the pod yet"
    return report.Part(
        name="pods", series=tuple(series), left_out=(*bench.left_out(), *((held_up,) if dropped else ()))
    )


def _turns(
    bench: realnode.NodeBench, watch: apiserver.Watch, subjects: Sequence[str], *, count: int, turns: int
) -> list[dict[str, float]]:
    """Seconds by subject of every turn but the first; a time that says nothing is left out."""
    taken = []
    for turn in range(1 + turns):
        seconds = {
            subject: _start(bench, watch, subject, f"{count}-{turn}", count=count)
            for subject in benchmark.rotated(subjects, turn)
        }
        taken.append({subject: took for subject, took in seconds.items() if took is not None})
    return taken[1:]


def _start(bench: realnode.NodeBench, watch: apiserver.Watch, subject: str, name: str, *, count: int) -> float | None:
    """Seconds from the first creation until the last is Running. They are gone when it returns, and so are their claims."""
    template = None if subject == NONE else workloads.class_name(subject)
    names = [f"{subject.replace(' ', '-')}-{name}-{index}" for index in range(count)]
    node = bench.node.cluster.node_name
    watch.take()
    began = time.perf_counter()
    for one in names:
        bench.server.call("POST", workloads.pods_path(), workloads.pod(one, node=node, template=template))
    ended = workloads.await_running(bench, watch, names)
    for one in names:
        bench.server.call("DELETE", f"{workloads.pods_path()}/{one}")
    workloads.await_gone(watch, names)
    workloads.await_no_claims(bench)
    return None if ended is None else ended - began


def _seen_by_kubelet(driver: drivers.Ready, before: str, after: str) -> list[report.Series]:
    """The mean of kubelet's calls between two readings of its metrics."""
    series = []
    for method, called in METHODS.items():
        count, total = (
            sum(
                sign * exposition.total(text, f"{CALLS}_{part}", driver_name=driver.spec.driver_name, method_name=name)
                for sign, text in ((1, after), (-1, before))
                for name in (method, f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}")
            )
            for part in ("count", "sum")
        )
        if count:
            series.append(
                report.Series(
                    name=f"mean of kubelet's {count:.0f} calls of {called}, by its own count",
                    subject=driver.subject,
                    unit=report.Unit.MILLISECONDS,
                    values=(total / count * 1000,),
                )
            )
    return series
