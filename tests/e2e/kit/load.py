# SPDX-License-Identifier: Apache-2.0
"""Pods that come and go, whose containers find out by themselves whether a GPU is with another container too: those with a whole
GPU want it alone, those with a MIG instance want the instance alone and the GPU with other instances, those with a share of a GPU
want it with other shares.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.e2e.kit import make
from tests.e2e.kit.api import Json
from tests.e2e.kit.space import UNREGISTERED, UNRELATED, Space

HELD = "/run/nearfield-e2e"
"""A folder of the node in which containers lock the GPUs that they have: the kernel drops a lock when its holder is dead."""

_LOCK = """
import fcntl, os, re, signal, sys, time
if {ignores_term}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
uuids = sorted({{value for value in os.environ.values() if re.fullmatch("(GPU|MIG)-[0-9a-f-]+", value)}})
if not uuids:
    sys.exit("no GPU")
alone = fcntl.LOCK_SH if {shared} else fcntl.LOCK_EX
shared = alone if any(uuid.startswith("GPU-") for uuid in uuids) else fcntl.LOCK_SH
nodes = [name for name in os.listdir("/dev") if re.fullmatch("nvidia[0-9]+", name)]
kept = []
for name, lock in [(uuid, alone) for uuid in uuids] + [(name, shared) for name in nodes]:
    kept.append(open("/held/" + name, "w"))
    try:
        fcntl.flock(kept[-1], lock | fcntl.LOCK_NB)
    except OSError:
        sys.exit(name + " is with another container")
print("mine:", *uuids, flush=True)
time.sleep({seconds})
"""

_LOOK_S = 2.0
PATIENCE_S = 240.0


def exclusive_pod(
    name: str,
    *,
    claims: Mapping[str, str],
    seconds: float = 3600,
    ignores_term: bool = False,
    grace_s: int = 1,
    shared: bool = False,
) -> Json:
    """A pod that fails when one of its GPUs is with another such container, and else stays for `seconds`. `shared`: it has shares, and
    others with shares may be there.
    """
    script = _LOCK.format(ignores_term=ignores_term, seconds=seconds, shared=shared)
    container = make.container(
        image=make.AGENT_IMAGE,
        command=["python3", "-c", script],
        claims=tuple(claims),
        volumeMounts=[{"name": "held", "mountPath": "/held"}],
    )
    volume = {"name": "held", "hostPath": {"path": HELD, "type": "DirectoryOrCreate"}}
    return make.pod(name, claims=claims, containers=[container], grace_s=grace_s, volumes=[volume])


def failures(space: Space, pod: str) -> list[str]:
    """What Events say of Prepares of a pod that failed, where the driver has a part in it."""
    return [
        event["message"]
        for event in space.api.events("Pod", pod, space.name)
        if event["reason"] == "FailedPrepareDynamicResources" and UNRELATED not in event["message"]
    ]


def refused(space: Space, *pods: str, timeout_s: float = PATIENCE_S) -> str:
    """What the driver says of the first Prepare of one of some pods that failed, once there is one."""

    def look() -> list[str]:
        return [text for pod in pods for text in failures(space, pod) if UNREGISTERED not in text]

    return space.until(look, f"a Prepare of {' or '.join(pods)} has failed", pods=pods, timeout_s=timeout_s)[0]


@dataclass(slots=True)
class Told:
    """What came of the pods of a load."""

    pods: int = 0
    seconds: list[float] = field(default_factory=list)
    """From the creation to the end of the container, of each pod."""
    retried: list[str] = field(default_factory=list)
    """Why a Prepare failed at first."""
    wrong: list[str] = field(default_factory=list)
    """Pods that did not end well."""

    def line(self) -> str:
        """For a person."""
        spans = sorted(self.seconds) or [0.0]
        return (
            f"{self.pods} pods, from creation to end {spans[len(spans) // 2]:.1f} s (median), {spans[-1]:.1f} s (worst);"
            f" Prepares that failed at first: {len(self.retried)}"
        )


class Load:
    """Some workers, each of which makes a pod with a GPU, waits for its end and deletes it, again and again."""

    def __init__(
        self,
        space: Space,
        *,
        workers: int,
        seconds: float = 0.3,
        asks: Sequence[Json] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`seconds`: how long a container keeps its GPU. `asks`: the requests of which each pod has the next one; one GPU. `patience_s`:
        how long a pod may wait; the scheduler is fair to none that wants much while others want little.
        """
        self.told = Told()
        self._space = space
        self._seconds = seconds
        self._patience_s = patience_s
        self._asks = tuple(asks) or (make.request(),)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(workers)
        ]

    def start(self) -> None:
        """Begin."""
        for number, ask in enumerate(self._asks):
            self._space.create(make.template(f"load-{number}", ask))
        for thread in self._threads:
            thread.start()

    def more(self, pods: int, *, timeout_s: float = PATIENCE_S) -> None:
        """Return when so many more pods have ended."""
        aim = self.told.pods + pods
        deadline = time.monotonic() + timeout_s
        while self.told.pods < aim:
            assert not self.told.wrong, self.told.wrong
            assert time.monotonic() < deadline, f"after {timeout_s:g} s: {self.told.line()}"
            time.sleep(0.1)

    def finish(self) -> Told:
        """Let the pods that there are come to their end, and say how it went."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._patience_s + 30)
        assert not any(thread.is_alive() for thread in self._threads), "a worker of the load does not end"
        return self.told

    def _work(self, worker: int) -> None:
        number = 0
        while not self._stop.is_set():
            name = f"load-{worker}-{number}"
            number += 1
            began = time.monotonic()
            try:
                self._one(name, (worker + number) % len(self._asks))
            except Exception as error:  # noqa: BLE001 - the scenario fails by it
                with self._lock:
                    self.told.wrong.append(f"{name}: {error}")
                return
            with self._lock:
                self.told.pods += 1
                self.told.seconds.append(time.monotonic() - began)
            self._space.delete("Pod", name, wait=False)

    def _one(self, name: str, ask: int) -> None:
        shared = "capacity" in self._asks[ask]["exactly"]
        claims = {"gpu": f"template:load-{ask}"}
        self._space.create(exclusive_pod(name, claims=claims, seconds=self._seconds, shared=shared))
        known = 0
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            pod = self._space.get("Pod", name)
            for items in self._space.api.watch(
                "Pod", self._space.name, fields=f"metadata.name={name}", timeout_s=_LOOK_S
            ):
                pod = items[0]
                if pod["status"].get("phase") == "Succeeded":
                    return
                assert pod["status"].get("phase") != "Failed", self._space.logs(name)
            failed = self._failed(name)
            if len(failed) > known:
                # Kubelet would come back to it after more than a minute; now it does at once.
                self._space.retry(name)
                with self._lock:
                    self.told.retried += [text for text in failed[known:] if UNRELATED not in text]
                known = len(failed)
        raise AssertionError(f"it did not end within {self._patience_s:g} s: {self._failed(name)}")

    def _failed(self, name: str) -> list[str]:
        """What Events say of each Prepare that failed; kubelet counts like ones in one Event."""
        return [
            event["message"]
            for event in self._space.api.events("Pod", name, self._space.name)
            if event["reason"] == "FailedPrepareDynamicResources"
            for _ in range(event.get("count", 1))
        ]


@contextlib.contextmanager
def running(
    space: Space, *, workers: int, seconds: float = 0.3, asks: Sequence[Json] = (), patience_s: float = PATIENCE_S
) -> Iterator[Load]:
    """A load for the block; it is finished at its end."""
    load = Load(space, workers=workers, seconds=seconds, asks=asks, patience_s=patience_s)
    load.start()
    try:
        yield load
    finally:
        load.finish()
