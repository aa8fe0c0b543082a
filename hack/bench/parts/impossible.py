# SPDX-License-Identifier: Apache-2.0
"""What a claim that cannot be met costs the scheduler of a real node whose GPUs are all divided: how long until it says so, and how long
another pod waits for its place meanwhile, which asks for nothing and is created when the search has begun.

`hack/oracle impossible` counts the steps of the allocator alone; here are scheduler, API server and all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hack.bench import apiserver, claims, drivers, realnode, report, workloads
from hack.bench.errors import BenchError
from hack.judges import migclaims

MACHINES: Mapping[str, int] = {"dgx-h100": 8, "h100-16-pcie": 16}
"""Machine of the zoo: its GPUs."""

TURNS = 3
BEGUN_S = 0.1
"""From the creation of a pod until its claim was made from the template, and the scheduler is looking for devices."""

TIMEOUT_S = 90.0
"""An attempt is given up by the scheduler after 10 s, and others may come before it."""

_RESOURCE = "/apis/resource.k8s.io/v1"
_CLASSES = f"{_RESOURCE}/deviceclasses"
_TEMPLATES = f"{_RESOURCE}/namespaces/{claims.NAMESPACE}/resourceclaimtemplates"
_NAME = "impossible"
_CONFIG = """\
apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing: [{mode: mig-dynamic}]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A claim that a machine with so many GPUs cannot meet; None for a pod without a claim, beside which nothing is impossible."""

    name: str
    devices: Mapping[str, Any] | None


def cases(gpus: int) -> tuple[Case, ...]:
    """From what costs nothing to what the scheduler gives up."""
    return (
        Case(name="nothing impossible", devices=None),
        Case(name="a profile that does not exist", devices=_some("9g.90gb", 1)),
        Case(name="more memory than a slice has", devices=_devices(migclaims.asked(migclaims.of_memory(1 << 20)))),
        Case(name=f"{gpus + 1} whole GPUs", devices=_devices(migclaims.asked(of=migclaims.GPU_CLASS, count=gpus + 1))),
        Case(name="8 x 1g.10gb of one GPU", devices=_some("1g.10gb", 8, match=migclaims.PARENT)),
        Case(name=f"{gpus + 1} x 7g.80gb", devices=_some("7g.80gb", gpus + 1)),
        # A request asks for 32 devices at most, so only the smaller machine can have too few of these.
        *((Case(name="17 x 3g.40gb", devices=_some("3g.40gb", 17)),) if gpus == 8 else ()),
        *((Case(name="25 x 2g.20gb", devices=_some("2g.20gb", 25)),) if gpus == 8 else ()),
    )


def _devices(what: Mapping[str, Any], *, match: str | None = None) -> Mapping[str, Any]:
    body: Mapping[str, Any] = migclaims.claim(_NAME, migclaims.exactly("parts", what), match=match)["spec"]["devices"]
    return body


def _some(profile: str, count: int, *, match: str | None = None) -> Mapping[str, Any]:
    return _devices(migclaims.asked(migclaims.of_profile(profile), count=count), match=match)


def run(bench: realnode.NodeBench) -> report.Part:
    """Both machines."""
    series: list[report.Series] = []
    for machine, gpus in MACHINES.items():
        series += _machine(bench, machine, gpus)
    return report.Part(name="impossible", series=tuple(series))


def _machine(bench: realnode.NodeBench, machine: str, gpus: int) -> list[report.Series]:
    config = bench.fresh_directory(f"config-{machine}")
    config.mkdir()
    (config / "agent.yaml").write_text(_CONFIG)
    found: list[report.Series] = []
    with ExitStack() as stack:
        bench.agent_at_kubelet(stack, f"--mock={machine}", f"--config={config / 'agent.yaml'}")
        for body in migclaims.CLASSES:
            bench.server.call("POST", _CLASSES, body)
            stack.callback(bench.server.call, "DELETE", f"{_CLASSES}/{body['metadata']['name']}")
        watch = stack.enter_context(bench.server.watch(workloads.pods_path()))
        for case in cases(gpus):
            taken = [_turn(bench, watch, case, turn) for turn in range(TURNS)]
            name = f"{gpus} GPUs, {case.name}"
            said = tuple(refused for refused, _ in taken if refused is not None)
            for what, values in (
                (", until it is refused", said),
                (", another pod is placed", tuple(t for _, t in taken)),
            ):
                if values:
                    found.append(
                        report.Series(
                            name=name + what, subject=drivers.AGENT, unit=report.Unit.MILLISECONDS, values=values
                        )
                    )
    return found


def _turn(bench: realnode.NodeBench, watch: apiserver.Watch, case: Case, turn: int) -> tuple[float | None, float]:
    """Milliseconds until the scheduler says that the claim cannot be met, and until the other pod has its place."""
    node = bench.node.cluster.node_name
    other, asks = f"other-{turn}", f"asks-{turn}"
    waiting = {other}
    if case.devices is not None:
        body = {"metadata": {"name": _NAME}, "spec": {"spec": {"devices": case.devices}}}
        bench.server.call("POST", _TEMPLATES, body)
        waiting.add(asks)
    watch.take()
    began = time.perf_counter()
    if case.devices is not None:
        bench.server.call("POST", workloads.pods_path(), workloads.pod(asks, node=node, template=_NAME))
        bench.pause(BEGUN_S)
    other_began = time.perf_counter()
    bench.server.call("POST", workloads.pods_path(), workloads.pod(other, node=node, template=None))
    at: dict[str, float] = {}

    def judged(event: apiserver.Event) -> bool:
        name = event.object["metadata"]["name"]
        if name in waiting and _judged(event.object, asks if name == asks else None):
            at.setdefault(name, event.at)
        return at.keys() == waiting

    if watch.wait(judged, timeout_s=TIMEOUT_S) is None:
        raise BenchError(f"{case.name}: the scheduler did not come to an end in {TIMEOUT_S:.0f} s")
    for name in sorted(waiting):
        bench.server.call("DELETE", f"{workloads.pods_path()}/{name}")
    workloads.remove_pods(bench)
    if case.devices is not None:
        bench.server.call("DELETE", f"{_TEMPLATES}/{_NAME}")
    return (at[asks] - began) * 1000 if asks in at else None, (at[other] - other_began) * 1000


def _judged(pod: Mapping[str, Any], asks: str | None) -> bool:
    """Whether the scheduler has placed a pod, or found no place for one that asks for the impossible."""
    if asks is None:
        return bool(pod["spec"].get("nodeName"))
    return any(
        condition["type"] == "PodScheduled" and condition["status"] == "False"
        for condition in pod.get("status", {}).get("conditions", ())
    )
