# SPDX-License-Identifier: Apache-2.0
"""The session behind the mock's NVML functions: initialisation, handles, event sets, and the faults that hit calls.

One instance stands for one loaded library in one process. Thread-safe, as NVML is; nothing is locked while a call hangs.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from discovery.address import PciAddress
from discovery.mock import abi, fault, live, mighardware, state
from discovery.mock import view as viewing
from discovery.mock.status import StatusError

_POLL_S = 0.05
"""How often a call that waits looks whether the state changed: another process may have changed it."""

_FIRST_HANDLE = 0x4E56_4D4C_0000
_HANDLE_STEP = 0x100


@dataclass(slots=True, eq=False)
class EventSet:
    """An nvmlEventSet_t: which events of which GPUs are wanted since when, and which were handed out."""

    registered: dict[PciAddress, tuple[int, float]] = field(default_factory=dict)
    delivered: set[tuple[float, fault.Fault]] = field(default_factory=set)


class Driver:
    """The library's memory."""

    def __init__(self, file: live.LiveFile, *, hand: mighardware.Hand, clock: Callable[[], float]) -> None:
        self.hand = hand
        self._file = file
        self._clock = clock
        self._mutex = threading.Lock()
        self._references = 0
        self._fresh = itertools.count(_FIRST_HANDLE, _HANDLE_STEP)
        self._handles: dict[object, int] = {}
        self._objects: dict[int, object] = {}
        self._cached: tuple[live.Live, tuple[bool, ...], viewing.View] | None = None
        self._enumerated: frozenset[PciAddress] = frozenset()
        """The GPUs of the session that has begun: one that came later, or was away meanwhile, shows in the next one only, which
        is why programs that keep a session begin it anew when GPUs are bound (NVIDIA/dcgm-exporter, pull request 716).
        """
        self._shown: tuple[viewing.View, viewing.View] | None = None
        self._idle = threading.Event()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def view(self) -> viewing.View:
        """What there is at this moment, as far as the session knows it."""
        return self._of_session(self._now())

    def _now(self) -> viewing.View:
        current, now = self._file.read(), self._clock()
        on = tuple(placed.on(now) for placed in current.faults)
        cached = self._cached
        if cached is None or cached[0] is not current or cached[1] != on:
            cached = self._cached = (current, on, viewing.view(current, now=now))
        return cached[2]

    def initialise(self) -> None:
        """nvmlInit: counts users."""
        current = self._now()
        self.system("nvmlInitWithFlags", current)
        with self._mutex:
            if not self._references:
                self._enumerated, self._shown = frozenset(gpu.pci for gpu in current.gpus), None
            self._references += 1

    def shut_down(self) -> None:
        """nvmlShutdown: the last user ends the session; handles keep their value."""
        with self._mutex:
            if not self._references:
                raise StatusError(abi.UNINITIALIZED)
            self._references -= 1

    def enter(self, function: str, pci: PciAddress | None) -> viewing.View:
        """Lets a call happen, or not: session, driver and faults in the order in which they would matter."""
        with self._mutex:
            if not self._references:
                raise StatusError(abi.UNINITIALIZED)
        current = self.suffer(function, pci)
        self.system(function, current)
        return self._of_session(current)

    def _of_session(self, current: viewing.View) -> viewing.View:
        with self._mutex:
            if self._shown is None or self._shown[0] is not current:
                self._enumerated &= {gpu.pci for gpu in current.gpus}
                self._shown = (current, current.of(self._enumerated))
            return self._shown[1]

    def system(self, function: str, current: viewing.View | None = None) -> state.System:
        """The loaded driver, for one call that it answers. `current`: what there is, if the caller has looked."""
        system = (current or self._now()).system
        if system is None:
            raise StatusError(abi.DRIVER_NOT_LOADED)
        status = system.errors.get(function)
        if status is not None:
            raise StatusError(status)
        return system

    def suffer(self, function: str, pci: PciAddress | None, *, after: bool = False) -> viewing.View:
        """The hangs, crashes and errors that are on for a call; what there is once none is. `after`: those that let it take
        effect first.
        """
        while True:
            current = self._now()
            hits = current.faults_of(function, pci, after=after)
            if not hits:
                return current
            for hit in hits:
                if hit.kind is fault.Kind.NVML_CRASH:
                    os.kill(os.getpid(), hit.signal or signal.SIGABRT)
                if hit.kind is fault.Kind.NVML_ERROR:
                    raise StatusError(hit.error or abi.UNKNOWN)
            self._idle.wait(_POLL_S)

    def handle(self, key: object) -> int:
        """The handle of an object, the same for as long as the process lives."""
        with self._mutex:
            handle = self._handles.get(key)
            if handle is None:
                handle = next(self._fresh)
                self._handles[key] = handle
                self._objects[handle] = key
            return handle

    def key(self, handle: int | None) -> object:
        """What a handle stands for, None for one that nobody gave."""
        return self._objects.get(handle or 0)

    def address_of(self, handle: int | None) -> PciAddress:
        """The GPU that a handle stands for."""
        key = self.key(handle)
        if not isinstance(key, PciAddress):
            raise StatusError(abi.INVALID_ARGUMENT)
        return key

    def device(self, current: viewing.View, pci: PciAddress, function: str) -> state.Gpu:
        """The GPU at an address for one call, if it answers that call."""
        gpu = current.gpu(pci)
        if gpu is None or pci in current.lost:
            raise StatusError(abi.GPU_IS_LOST)
        status = gpu.errors.get(function)
        if status is not None:
            raise StatusError(status)
        return gpu

    def create_event_set(self) -> int:
        """A handle for a new event set."""
        return self.handle(EventSet())

    def event_set(self, handle: int | None) -> EventSet:
        """The event set that a handle stands for."""
        events = self._objects.get(handle or 0)
        if not isinstance(events, EventSet):
            raise StatusError(abi.INVALID_ARGUMENT)
        return events

    def free_event_set(self, handle: int | None) -> None:
        """Forgets an event set."""
        events = self.event_set(handle)
        with self._mutex:
            self._objects.pop(self._handles.pop(events, 0), None)

    def next_event(self, events: EventSet) -> tuple[PciAddress, int, int] | None:
        """An event that has happened since it was registered for and was not handed out: GPU, type, data."""
        now = self._clock()
        for placed in self._file.read().faults:
            item = placed.fault
            if item.target is None or not placed.begins <= now:
                continue
            kind, data = _event_of(item)
            wanted, since = events.registered.get(item.target, (0, 0.0))
            key = (placed.since, item)
            if kind & wanted and placed.begins >= since and key not in events.delivered:
                events.delivered.add(key)
                return item.target, kind, data
        return None

    def wait_event(self, events: EventSet, *, timeout_s: float) -> tuple[PciAddress, int, int]:
        """nvmlEventSetWait: the next event, or NVML_ERROR_TIMEOUT; a lost GPU among those watched ends the wait."""
        ends = self._clock() + timeout_s
        while (event := self.next_event(events)) is None:
            if not self.view().lost.isdisjoint(events.registered):
                raise StatusError(abi.GPU_IS_LOST)
            rest = ends - self._clock()
            if rest <= 0:
                raise StatusError(abi.TIMEOUT)
            self._idle.wait(min(rest, _POLL_S))
        return event


def _event_of(item: fault.Fault) -> tuple[int, int]:
    match item.kind:
        case fault.Kind.XID:
            return abi.EVENT_XID, item.xid or 0
        case fault.Kind.ECC:
            return abi.EVENT_DOUBLE_BIT_ECC, 0
        case _:
            return 0, 0
