# SPDX-License-Identifier: Apache-2.0
"""The drivers that are measured, the agent and the Go yardstick, behind one interface: started by exec, reached by sockets."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.bench import apiserver, claims, dra, processes
from hack.bench.errors import BenchError

AGENT = "agent"
PEER = "peer"
"""The Go driver that does the least that is correct."""

PUBLIC = "public"
"""The same with the CDI library, as public drivers have it."""

PEERS: Mapping[str, str] = {PEER: "the Go driver's", PUBLIC: "the Go driver's with the CDI library"}
"""Subject: what a figure calls it."""

AGENT_DRIVER = "gpu.nearfield.dev"
MACHINE = "dgx-h100"
PEER_DRIVER = "peer.nearfield.dev"
START_TIMEOUT_S = 60.0
POLL_S = 0.001
"""How often something that a starting process makes is looked for: the error of a start-up figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where drivers run, and how they reach the API server there. `kubeconfig`: None where they do it as pods do.
    `enter`: what stands before their commands; it ends in exec, so that its process is the driver's.
    """

    kubeconfig: Path | None = None
    enter: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    peer_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubelet:
    """Kubelet's folder and that of CDI specs, as a driver sees them; `seen` is the former as the benchmark does.
    `real`: whether a kubelet is there, which registers drivers.
    """

    folder: Path
    cdi: Path
    seen: Path
    real: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """How to start a driver, and where its sockets will be. The same spec started twice is a restart."""

    subject: str
    driver_name: str
    node: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    kubelet: Kubelet
    http_port: int | None = None

    @property
    def registration_socket(self) -> Path:
        """Where kubelet finds the driver."""
        return self.kubelet.seen / "plugins_registry" / f"{self.driver_name}-reg.sock"

    @property
    def dra_socket(self) -> Path:
        """Where kubelet calls it."""
        return self.kubelet.seen / "plugins" / self.driver_name / "dra.sock"


def agent(directory: Path, *arguments: str, node: str, place: Place, kubelet: Kubelet | None = None) -> Spec:
    """The agent as a node runs it, on a mock machine. `directory` is made; it is kubelet's too where none is given."""
    port = free_port()
    home = kubelet or _kubelet(directory)
    directory.mkdir(exist_ok=True)
    return Spec(
        subject=AGENT,
        driver_name=AGENT_DRIVER,
        node=node,
        directory=directory,
        kubelet=home,
        environment=place.environment,
        http_port=port,
        command=(
            *place.enter,
            str(Path(sys.executable).with_name("nearfield")),
            "run",
            f"--node-name={node}",
            f"--mock={MACHINE}",
            *(() if place.kubeconfig is None else (f"--kubeconfig={place.kubeconfig}",)),
            f"--kubelet-dir={home.folder}",
            f"--cdi-dir={home.cdi}",
            f"--state-dir={directory / 'state'}",
            f"--http=127.0.0.1:{port}",
            "--inspect=",
            *arguments,
        ),
    )


def peer(
    directory: Path, *, subject: str, node: str, place: Place, binary: Path, kubelet: Kubelet | None = None
) -> Spec:
    """The Go driver, PEER or PUBLIC."""
    home = kubelet or _kubelet(directory)
    directory.mkdir(exist_ok=True)
    return Spec(
        subject=subject,
        driver_name=PEER_DRIVER,
        node=node,
        directory=directory,
        kubelet=home,
        environment=place.environment,
        command=(
            *place.enter,
            str(binary),
            f"-driver-name={PEER_DRIVER}",
            f"-node-name={node}",
            *(() if place.kubeconfig is None else (f"-kubeconfig={place.kubeconfig}",)),
            f"-kubelet-dir={home.folder}",
            f"-cdi-dir={home.cdi}",
            f"-cdi-library={'true' if subject == PUBLIC else 'false'}",
            *place.peer_arguments,
        ),
    )


def _kubelet(directory: Path) -> Kubelet:
    """A folder without a kubelet."""
    for name in ("plugins_registry", "plugins", "cdi"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    return Kubelet(folder=directory, cdi=directory / "cdi", seen=directory, real=False)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Running:
    """A driver that was just started. A context manager: it is ended at the end."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.process = processes.Process(spec.command, log=spec.directory / "log", environment=spec.environment)
        self._client: dra.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> float:
        """SIGTERM; the seconds until it has ended."""
        if self._client is not None:
            self._client.close()
            self._client = None
        return self.process.stop()

    @property
    def client(self) -> dra.Client:
        """Calls on its DRA socket, once that is there."""
        if self._client is None:
            self._client = dra.Client(self.spec.dra_socket)
        return self._client

    def await_registration_socket(self) -> float:
        """Seconds from exec until the registration socket takes connections."""
        return self._await(lambda: dra.answers(self.spec.registration_socket), "registration socket")

    def await_serving(self) -> float:
        """Seconds from exec until a call on the DRA socket is answered."""
        self._await(lambda: dra.answers(self.spec.dra_socket), "DRA socket")
        self.client.prepare()
        return time.perf_counter() - self.process.started

    def await_slice(self, watch: apiserver.Watch) -> float:
        """Seconds from exec until the watch of its node, which was opened before, shows a slice of this driver."""
        while (waited := time.perf_counter() - self.process.started) < START_TIMEOUT_S:
            self.process.check()
            event = watch.wait(lambda event: event.object["spec"]["driver"] == self.spec.driver_name, timeout_s=1.0)
            if event is not None:
                return event.at - self.process.started
        raise BenchError(f"{self.spec.subject}: no slice in {waited:.0f} s; see its log")

    def _await(self, there: Callable[[], bool], what: str) -> float:
        pause = threading.Event()
        while not there():
            self.process.check()
            if time.perf_counter() - self.process.started > START_TIMEOUT_S:
                raise BenchError(f"{self.spec.subject}: no {what} in {START_TIMEOUT_S:.0f} s")
            pause.wait(POLL_S)
        return time.perf_counter() - self.process.started


class Ready:
    """A driver that serves, is registered and has published, with the names of its devices. A context manager."""

    def __init__(self, spec: Spec, server: apiserver.ApiServer) -> None:
        self.running = Running(spec)
        self.spec = spec
        self._server = server
        self._fill: list[claims.Claim] = []
        try:
            with server.watch_slices(node=spec.node) as watch:
                self.running.await_registration_socket()
                if not spec.kubelet.real:
                    dra.register(spec.registration_socket)
                self.running.await_serving()
                if not _slices(server, spec):
                    self.running.await_slice(watch)
            self.devices = _device_names(server, spec)
        except BaseException:
            self.running.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.running.stop()

    @property
    def client(self) -> dra.Client:
        """Calls on its DRA socket."""
        return self.running.client

    @property
    def subject(self) -> str:
        """The agent or the peer."""
        return self.spec.subject

    def make_claims(self, prefix: str, count: int, *, devices: int = 1) -> list[claims.Claim]:
        """Claims with `devices` GPUs each; the next claim has the next GPUs, from the first again after the last."""
        return self._server.create_claims(
            (f"{prefix}-{self.spec.node}-{index}" for index in range(count)),
            driver=self.spec.driver_name,
            node=self.spec.node,
            devices=lambda index: tuple(
                self.devices[(index * devices + offset) % len(self.devices)] for offset in range(devices)
            ),
        )

    def fill(self, count: int) -> None:
        """Prepare claims with admin access until `count` of them are prepared: eight GPUs can be held by any number of these.
        Never fewer than there are already.
        """
        first = len(self._fill)
        made = self._server.create_claims(
            (f"fill-{self.spec.node}-{index}" for index in range(first, count)),
            driver=self.spec.driver_name,
            node=self.spec.node,
            devices=lambda index: (self.devices[index % len(self.devices)],),
            admin=True,
        )
        for claim in made:
            self.client.prepare(claim)
        self._fill += made


def _device_names(server: apiserver.ApiServer, spec: Spec) -> Sequence[str]:
    names = [device["name"] for item in _slices(server, spec) for device in item["spec"].get("devices", ())]
    if len(names) < 8:
        raise BenchError(f"{spec.subject} published {len(names)} devices, not 8: see {spec.directory / 'log'}")
    return tuple(names)


def _slices(server: apiserver.ApiServer, spec: Spec) -> list[dict[str, Any]]:
    return [item for item in server.slices(node=spec.node) if item["spec"]["driver"] == spec.driver_name]
