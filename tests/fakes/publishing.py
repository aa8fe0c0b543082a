# SPDX-License-Identifier: Apache-2.0
"""Snapshots of made-up nodes, what the publisher asks of the rest of the agent, and a publisher that runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from discovery import model
from discovery.address import HostBridge, PciAddress
from driver import errors
from driver.kube import access, client
from driver.publish import aim, devices, publisher, wanted
from driver.standin import apiserver

DRIVER = "gpu.nearfield.dev"
NODE = "node-1"
OPTIONS = devices.PublishOptions(driver_name=DRIVER)


def at(bus: int, *, domain: int = 0) -> PciAddress:
    return PciAddress(domain, bus, 0, 0)


def gpu(bus: int, **changes: Any) -> model.Gpu:
    """A READY GPU that says everything of itself."""
    pci = model.PciFunction(
        address=at(bus),
        vendor_id=0x10DE,
        device_id=0x2330,
        class_code=0x030200,
        host_bridge=HostBridge("pci0000:00"),
        pcie_root=HostBridge("pci0000:00"),
        numa_node=0,
        driver="nvidia",
    )
    pci = replace(pci, **changes.pop("pci", {}))
    ready = model.Gpu(
        pci=pci,
        state=model.GpuState.READY,
        uuid=f"GPU-{bus:08x}-0000-0000-0000-000000000000",
        minor=bus,
        product="NVIDIA H100 80GB HBM3",
        architecture="Hopper",
        compute_capability=(9, 0),
        memory_bytes=81559 << 20,
        multiprocessors=132,
    )
    return replace(ready, **changes)


def snapshot(*gpus: model.Gpu, **changes: Any) -> model.Snapshot:
    whole = model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(),
        nvidia_driver=model.NvidiaDriver(version="580.65.06", cuda_version=(13, 0)),
        gpus=gpus,
    )
    return replace(whole, **changes)


def offering(*gpus: model.Gpu) -> wanted.Wanted:
    return wanted.from_snapshot(snapshot(*gpus), options=OPTIONS)


class Store:
    """The record's part that belongs to  `fault` makes both calls raise it."""

    def __init__(self) -> None:
        self.published: dict[str, Any] = {}
        self.saves = 0
        self.fault: errors.RecordError | None = None
        self.saving: Callable[[], None] = lambda: None

    def load_published(self) -> Mapping[str, Any]:
        if self.fault is not None:
            raise self.fault
        return copy.deepcopy(self.published)

    def save_published(self, published: Mapping[str, Any]) -> None:
        if self.fault is not None:
            raise self.fault
        self.saving()
        self.saves += 1
        self.published = copy.deepcopy(dict(published))


class Told:
    """Events on the Node, and counted writes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.writes: list[tuple[str, str]] = []

    def node(self, *, reason: str, message: str, warning: bool = True) -> None:
        assert warning
        self.events.append((reason, message))

    def slice_write(self, verb: str, *, result: str) -> None:
        self.writes.append((verb, result))


class Agent:
    """What the publisher asks: settable from the test."""

    def __init__(self, now: wanted.Wanted) -> None:
        self.now = now
        self.leads = True
        self.held: Collection[str] = ()
        self.asked = 0

    def wanted_now(self, _held: aim.Holders) -> wanted.Wanted:
        self.asked += 1
        return self.now

    def may_write(self) -> bool:
        return self.leads

    def holders(self) -> Collection[str]:
        return self.held


def until(condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Wait for something that another thread brings about."""
    never = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        never.wait(0.01)
    raise AssertionError("it did not happen")


def names(offered: Sequence[devices.Device]) -> list[str]:
    return [device.name for device in offered]


class Running:
    """A publisher, its client and its server."""

    def __init__(self, server: apiserver.ApiServer, now: wanted.Wanted) -> None:
        self.server = server
        self.agent = Agent(now)
        self.store = Store()
        self.told = Told()
        self.kube = client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="tests/0")
        self.publisher = self.make()

    def make(self, **more: Any) -> publisher.Publisher:
        return publisher.Publisher(
            driver_name=DRIVER,
            node_name=NODE,
            wanted_now=self.agent.wanted_now,
            may_write=self.agent.may_write,
            holders=self.agent.holders,
            store=self.store,
            events=self.told,
            observer=self.told,
            **more,
        )

    def start(self) -> None:
        self.publisher.start(self.kube)

    def restart(self, **more: Any) -> None:
        """The agent ends and starts again; the record stays."""
        self.publisher.stop(timeout_s=30)
        self.publisher = self.make(**more)
        self.start()

    def close(self) -> None:
        self.publisher.stop(timeout_s=30)
        self.kube.close()

    def change(self, *gpus: model.Gpu) -> None:
        self.want(offering(*gpus))

    def want(self, now: wanted.Wanted) -> None:
        self.agent.now = now
        self.publisher.notify()

    def hold(self, device: str, name: str = "c", **more: str) -> None:
        """A claim has it; `more` of its result."""
        result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device, **more}
        self.server.seed(
            "resourceclaims", {"metadata": {"name": name}, "status": {"allocation": {"devices": {"results": [result]}}}}
        )

    def turn(self, gate: str, *, on: bool) -> None:
        """The server ends and starts again with or without it."""
        self.server.stop()
        self.server.turn(gate, on=on)
        self.server.start()

    def reconnect(self) -> None:
        """The watch is cut, and made again."""
        watches = self.server.count("watch", "resourceslices")
        self.server.cut()
        until(lambda: self.server.count("watch", "resourceslices") > watches)
        self.settled()

    def codes(self) -> list[str]:
        return [finding.code for finding in self.publisher.state().findings]

    def settled(self) -> None:
        """Everything that has happened so far is looked at, and all stands as it should."""
        until(lambda: self.publisher.state().ok)
        self.looks()
        until(lambda: self.publisher.state().ok)

    def slices(self) -> list[dict[str, Any]]:
        return self.server.objects("resourceslices")

    def listed(self) -> list[str]:
        return [
            device["name"] + ("!" if device.get("taints") else "")
            for body in self.slices()
            for device in body["spec"].get("devices", [])
        ]

    def only_name(self) -> str:
        (body,) = self.slices()
        return str(body["metadata"]["name"])

    def spec(self) -> dict[str, Any]:
        (body,) = self.slices()
        return dict(body["spec"])

    def writes(self) -> int:
        return self.server.writes("resourceslices")

    def looks(self) -> None:
        """Let it look at everything once more, and finish."""
        for _ in range(2):
            enough = self.agent.asked + 1
            self.publisher.notify()
            until(functools.partial(self.asked, enough))

    def asked(self, times: int) -> bool:
        return self.agent.asked >= times


@contextlib.contextmanager
def running(now: wanted.Wanted, **options: Any) -> Iterator[Running]:
    """A publisher for the block; `options` are those of its server."""
    with apiserver.ApiServer(**options) as server:
        server.seed("nodes", {"metadata": {"name": NODE}})
        made = Running(server, now)
        made.start()
        try:
            yield made
        finally:
            made.close()
