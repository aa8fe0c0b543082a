# SPDX-License-Identifier: Apache-2.0
"""What every part of the benchmark is given: the options of the run, the API server, and specs of fresh drivers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hack.bench import apiserver, drivers, peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured. The defaults give figures to publish; `QUICK` shows that everything works."""

    rounds: int = 200
    """Turns of each latency, at each number of prepared claims."""

    gap_s: float = 0.02
    """The pause before everything that is timed: kubelet never calls back to back, and caches and CPUs cool meanwhile."""

    levels: tuple[int, ...] = (0, 1, 10, 100, 1000)
    """Numbers of claims that are prepared beside the measured ones."""

    bursts: int = 40
    """Turns of the measurements with eight claims or devices."""

    throughput_s: float = 8.0
    """Seconds of back-to-back work for each driver at each level."""

    starts: int = 15
    """Fresh starts and restarts of each driver."""

    settle_s: float = 5.0
    """From a start until memory is read."""

    idle_s: float = 60.0
    """The window in which nothing happens."""

    repairs: int = 6
    """Slices edited, slices deleted, and deleted again: within what the agent writes at once (20) against somebody who undoes
    its writes; beyond that it slows down on purpose.
    """

    probes: int = 30
    """Warm probes of each machine."""

    pods: int = 15
    """Pods of each kind, one after the other; on a real node only."""

    rest_s: float = 600.0
    """The window in which writes to the API server are counted; on a real node only."""


QUICK = Options(
    rounds=20,
    levels=(0, 100),
    bursts=5,
    throughput_s=2.0,
    starts=3,
    settle_s=3.0,
    idle_s=10.0,
    repairs=3,
    probes=5,
    pods=3,
    rest_s=20.0,
)

REAL = Options(rounds=150, levels=(0, 1, 100, 1000), bursts=30, starts=8)
"""The defaults on a real node: a run of 25 minutes, ten of them rest."""

WARM_UP = 5
"""Turns before the first that counts."""


T = TypeVar("T")


class Environment(Protocol):
    """What a run is made in: between stand-ins, or on a real node."""

    @property
    def server(self) -> apiserver.ApiServer:
        """The API server."""

    @property
    def address(self) -> apiserver.Address:
        """The same server, as drivers know it."""

    @property
    def place(self) -> drivers.Place:
        """Where drivers run."""

    def writes(self) -> int:
        """How many writes of the drivers it has taken since its start; dry ones are none."""

    def claim_reads(self) -> int:
        """How often a claim was read since its start."""


class Bench:
    """One part of a run. `directory` is empty and short enough for sockets."""

    def __init__(self, options: Options, directory: Path, environment: Environment, yardstick: peer.Peer) -> None:
        self.options = options
        self.directory = directory
        self.environment = environment
        self.server = environment.server
        self.peer = yardstick
        self._nodes = 0
        self._never = threading.Event()

    def pause(self, seconds: float | None = None) -> None:
        """Let the time pass; the gap of the options unless told otherwise."""
        self._never.wait(self.options.gap_s if seconds is None else seconds)

    def fresh_directory(self, name: str) -> Path:
        """A path for something of which there may be several in a run."""
        self._nodes += 1
        return self.directory / f"{name}-{self._nodes}"

    def agent(self, *arguments: str) -> drivers.Spec:
        """An agent that never ran, on a node of its own."""
        directory = self.fresh_directory("agent")
        return drivers.agent(directory, *arguments, node=self._node(directory), place=self.environment.place)

    def yardstick(self, subject: str = drivers.PEER) -> drivers.Spec | None:
        """A Go driver that never ran, on a node of its own; None where there is none."""
        if self.peer.binary is None:
            return None
        directory = self.fresh_directory("peer")
        return drivers.peer(
            directory,
            subject=subject,
            node=self._node(directory),
            place=self.environment.place,
            binary=self.peer.binary,
        )

    def contest(self, stack: ExitStack, *peers: str) -> list[drivers.Ready]:
        """The agent and, where there are any, the Go drivers (PEER alone unless others are named), all ready."""
        specs = [self.agent(), *(self.yardstick(subject) for subject in peers or (drivers.PEER,))]
        return [stack.enter_context(drivers.Ready(spec, self.server)) for spec in specs if spec is not None]

    def left_out(self) -> tuple[str, ...]:
        """Why the Go driver is missing, if it is."""
        return (self.peer.missing,) if self.peer.binary is None else ()

    def _node(self, directory: Path) -> str:
        """A Node for what runs in this directory. Its name is of this part: a real server has the nodes of all."""
        name = f"{self.directory.name}-{directory.name}"
        self.server.create_node(name)
        return name


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items in another order each turn, so that none always runs in the wake of the same other."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]
