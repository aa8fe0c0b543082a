# SPDX-License-Identifier: Apache-2.0
"""The agent ends and comes back while pods come and go.

- it is killed
- a rolling update of the DaemonSet: no pod fails, no Prepare fails; the gap in serving is measured and shown at the end of the run
- a rolling update while a Prepare waits for a GPU that is still being released
- it is gone for longer than kubelet waits before it wipes the slices (30 s), and back
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc

from proto.dra.v1 import api_pb2, api_pb2_grpc
from tests.e2e.kit import agent as agents
from tests.e2e.kit import load, make, signs, waiting
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

WORKERS = 3
GONE_S = 30.0
"""Kubelet's wiping delay."""

_POLL_S = 0.03


class Gaps:
    """Asks whoever serves on the sockets of the driver, as kubelet would, and remembers for how long nobody answered."""

    def __init__(self, site: Site) -> None:
        self._plugin_dir = site.disk.plugin_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gaps", daemon=True)
        self.longest_s = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[Gaps]:
        """Look during the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_POLL_S):
            if any(_serves(path) for path in sorted(self._plugin_dir.glob("dra*.sock"))):
                last = time.monotonic()
            self.longest_s = max(self.longest_s, time.monotonic() - last)


def _serves(path: Path) -> bool:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            api_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(
                api_pb2.NodePrepareResourcesRequest(), timeout=1, wait_for_ready=False
            )
        except grpc.RpcError:
            return False
    return True


class Calls:
    """How often kubelet called the driver, since this was made."""

    def __init__(self, site: Site) -> None:
        self._kubelet = site.kubelet
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        metrics = self._kubelet.metrics()
        lines = metrics.matching("dra_grpc_operations_duration_seconds_count", driver_name=make.CLASS)
        counted: dict[str, int] = {}
        for line in lines:
            method = line.labels["method_name"].rpartition("/")[2]
            outcome = "OK" if line.labels["grpc_status_code"] == "OK" else "failed"
            counted[f"{method} {outcome}"] = counted.get(f"{method} {outcome}", 0) + int(line.value)
        return counted

    def seen(self) -> dict[str, int]:
        """`NodePrepareResources OK` -> how many."""
        now = self._now()
        return {key: value - self._before.get(key, 0) for key, value in now.items() if value != self._before.get(key)}


def test_killed_under_load(site: Site, space: Space, record_property: Callable[[str, object], None]) -> None:
    before = site.agent.restarts()
    with Gaps(site).measured() as gaps, load.running(space, workers=WORKERS) as pods:
        pods.more(2 * WORKERS)
        site.agent.kill()
        site.agent.wait_restarted(before)
        pods.more(3 * WORKERS)
        told = pods.finish()
    assert told.wrong == []
    record_property("longest time without an answer", f"{gaps.longest_s:.1f} s; {told.line()}")


def test_rolling_update_under_load(site: Site, space: Space, record_property: Callable[[str, object], None]) -> None:
    old = site.agent.pod()["metadata"]["uid"]
    calls = Calls(site)
    with Gaps(site).measured() as gaps, load.running(space, workers=WORKERS) as pods:
        pods.more(WORKERS)
        site.agent.roll()
        site.agent.wait_ready()
        pods.more(2 * WORKERS)
        told = pods.finish()
    assert site.agent.pod()["metadata"]["uid"] != old
    assert told.wrong == []
    assert told.retried == []
    # The claim is kubelet's until it has counted the call.
    waiting.until(lambda: site.kubelet.claims_in_use(make.CLASS) == 0, "every claim unprepared")
    assert site.disk.record() == ()
    seen = calls.seen()
    record_property("longest time without an answer", f"{gaps.longest_s:.2f} s; {told.line()}; kubelet's calls {seen}")
    # Every claim was prepared once and unprepared once.
    assert seen == {"NodePrepareResources OK": told.pods, "NodeUnprepareResources OK": told.pods}


def test_rolling_update_while_a_prepare_waits(site: Site, space: Space) -> None:
    layout = site.cluster.layout
    signs.take_back(layout, "old")
    uuid = site.disk.gpu(site.agent.devices()[0]["name"]).uuid
    that = make.request(where=f'device.attributes["{make.CLASS}"].uuid == "{uuid}"')
    space.create(
        make.template("that", that),
        signs.pod("old", claims={"gpu": "template:that"}, ignores_term=True, grace_s=120),
    )
    space.running("old")
    first, waited = site.agent.pod(), site.agent.logs().count("Waiting: ")
    space.delete("Pod", "old", force=True)
    space.create(make.pod("new", claims={"gpu": "template:that"}))
    waiting.until(lambda: site.agent.logs().count("Waiting: ") > waited, "the Prepare waits")

    site.agent.roll()
    site.api.wait(
        *("Pod", first["metadata"]["name"], agents.NAMESPACE),
        until=lambda pod: "deletionTimestamp" in pod["metadata"],
        what="being deleted, as the next one is ready",
    )
    signs.give(layout, "old")

    space.running("new")
    assert load.failures(space, "new") == []
    assert space.look("new").gpu_uuids == (uuid,)
    site.agent.wait_ready()


def test_gone_and_back(site: Site, space: Space, record_property: Callable[[str, object], None]) -> None:
    space.create(
        make.template("one"), *(make.pod(name, claims={"gpu": "template:one"}) for name in ("stays", "leaves"))
    )
    before = {name: space.running(name) for name in ("stays", "leaves")}
    offered = _told(site)

    site.agent.remove()
    gone = time.monotonic()
    assert site.disk.sockets() == frozenset()
    space.delete("Pod", "leaves", wait=False)
    waiting.until(lambda: not site.agent.slices(), "kubelet has wiped the slices", timeout_s=GONE_S + waiting.USUAL_S)
    record_property("slices wiped after the agent's pod had gone", f"{time.monotonic() - gone:.1f} s")
    # Its containers have ended, but a GPU that was not unprepared is not let go of.
    assert space.api.find("Pod", "leaves", space.name) is not None
    assert len(site.disk.record()) == 2

    site.agent.apply()

    assert _told(site) == offered
    space.gone("Pod", "leaves")
    stayed = space.get("Pod", "stays")
    assert stayed["status"]["containerStatuses"] == before["stays"]["status"]["containerStatuses"]
    (entry,) = site.disk.record()
    assert entry.claim.uid == space.claim_of("stays", "gpu")["metadata"]["uid"]
    assert site.kubelet.claims_in_use(make.CLASS) == 1
    assert _given(site, space, "stays") == space.devices("stays")
    space.delete("Pod", "stays")
    waiting.until(lambda: not site.disk.record(), "the claim is unprepared")


def _told(site: Site) -> Sequence[object]:
    return [(device["name"], device["attributes"], device["capacity"]) for device in site.agent.devices()]


def _given(site: Site, space: Space, pod: str) -> tuple[str, ...]:
    (devices,) = site.kubelet.pod_resources(space.name, pod).values()
    return tuple(device.device for device in devices)
