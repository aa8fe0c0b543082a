# SPDX-License-Identifier: Apache-2.0
"""A window in which nothing happens on a real node: writes to the API server, and CPU. Kubelet is connected, a pod has a GPU."""

from __future__ import annotations

from contextlib import ExitStack

from hack.bench import apiserver, processes, realnode, report, workloads
from hack.bench import bench as benchmark
from hack.bench.parts import idle


def run(bench: realnode.NodeBench) -> report.Part:
    """Both drivers in one window."""
    window = f"{bench.options.rest_s:.0f} s"
    with ExitStack() as stack:
        contest = bench.contest_at_kubelet(stack)
        watch = stack.enter_context(bench.server.watch(workloads.pods_path()))
        names = {driver.subject: f"rest-{driver.subject}" for driver in contest}
        node = bench.node.cluster.node_name
        for subject, name in names.items():
            body = workloads.pod(name, node=node, template=workloads.class_name(subject))
            bench.server.call("POST", workloads.pods_path(), body)
        workloads.await_running(bench, watch, list(names.values()))
        bench.pause(bench.options.settle_s)
        writes, slice_writes = bench.node.writes(), bench.node.slice_writes()
        versions = _versions(bench)
        before = [processes.cpu_seconds(driver.running.process.tree()) for driver in contest]
        bench.pause(bench.options.rest_s)
        used = [
            processes.cpu_seconds(driver.running.process.tree()) - earlier
            for driver, earlier in zip(contest, before, strict=True)
        ]
        writes, slice_writes = bench.node.writes() - writes, bench.node.slice_writes() - slice_writes
        changed = len(versions.items() ^ _versions(bench).items())
        for name in names.values():
            bench.server.call("DELETE", f"{workloads.pods_path()}/{name}")
        workloads.await_gone(watch, list(names.values()))
        workloads.await_no_claims(bench)
    cpu = tuple(
        report.Series(
            name=f"CPU in {window} of rest",
            subject=driver.subject,
            unit=report.Unit.PERCENT_OF_A_CORE,
            values=(seconds / bench.options.rest_s * 100,),
        )
        for driver, seconds in zip(contest, used, strict=True)
    )
    return report.Part(
        name="rest",
        series=cpu,
        figures=(
            report.Figure(
                what=f"idle CPU, over {window}",
                limit=idle.CPU_LIMIT_PERCENT,
                unit=report.Unit.PERCENT_OF_A_CORE,
                measured=cpu[0].values[0],
            ),
            _count(f"API writes of the drivers in {window} of rest", writes, "by user agent, in the audit log"),
            _count(f"slice writes of anybody in {window} of rest", slice_writes, "apiserver_request_total"),
            _count(f"slices changed in {window} of rest", changed, "resourceVersion"),
        ),
        left_out=bench.left_out(),
    )


def _versions(bench: benchmark.Bench) -> dict[str, str]:
    items = bench.server.call("GET", apiserver.SLICES)["items"]
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in items}


def _count(what: str, measured: int, note: str) -> report.Figure:
    return report.Figure(what=what, limit=0, unit=report.Unit.COUNT, measured=measured, note=note)
