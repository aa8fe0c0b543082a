# SPDX-License-Identifier: Apache-2.0
"""What stands behind the kubelet room in its tests: a preparer, a source of health, an observer."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from driver import context as log_context
from driver import values


def claim(number: int) -> values.ClaimRef:
    """A well-formed claim; each number is another one."""
    uid = values.ClaimUid(f"00000000-0000-4000-8000-{number:012x}")
    return values.ClaimRef(uid=uid, namespace="team-a", name=f"claim-{number}")


def prepared(ref: values.ClaimRef, *, share_id: str | None = None) -> values.Prepared:
    """What the fake answers for a claim: two devices, in an order that is not that of their names."""
    return values.Prepared(
        devices=tuple(
            values.PreparedDevice(
                request_names=("gpus",),
                pool="node-1",
                device=device,
                cdi_device_ids=(f"gpu.nearfield.dev/claim={ref.uid}-{device}", "gpu.nearfield.dev/node=driver"),
                share_id=share_id,
            )
            for device in ("gpu-0000-3b-00-0", "gpu-0000-1b-00-0")
        )
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """One call that reached the preparer."""

    operation: str
    refs: tuple[values.ClaimRef, ...]
    remaining_s: float
    context: Mapping[str, str]


@dataclass(slots=True)
class FakePreparer:
    """Answers every claim with success, or as `answers` says for its UID; `work` runs within each call.

    `forgotten` UIDs get no answer, and `unasked` is answered always: both are faults of a preparer.
    """

    answers: dict[str, values.Prepared | values.Failed] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    unasked: dict[values.ClaimUid, values.Prepared] = field(default_factory=dict)
    work: Callable[[Sequence[values.ClaimRef], values.Call], None] | None = None
    seen: list[Seen] = field(default_factory=list)

    def prepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Prepared | values.Failed]:
        self._see("prepare", refs, call)
        answers = {ref.uid: self.answers.get(ref.uid, prepared(ref)) for ref in refs if ref.uid not in self.forgotten}
        return answers | self.unasked

    def unprepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Unprepared | values.Failed]:
        self._see("unprepare", refs, call)
        answers: dict[values.ClaimUid, values.Unprepared | values.Failed] = {}
        for ref in refs:
            answer = self.answers.get(ref.uid)
            answers[ref.uid] = answer if isinstance(answer, values.Failed) else values.Unprepared()
        return answers

    def _see(self, operation: str, refs: Sequence[values.ClaimRef], call: values.Call) -> None:
        assert not call.over()
        self.seen.append(Seen(operation, tuple(refs), call.remaining_s(), dict(log_context.fields())))
        if self.work is not None:
            self.work(refs, call)


class FakeHealth:
    """Devices that a test sets."""

    def __init__(self, *devices: values.DeviceHealth) -> None:
        self._changed = threading.Condition()
        self._devices = devices
        self._count = 0
        self.broken: Exception | None = None

    def set(self, *devices: values.DeviceHealth) -> None:
        with self._changed:
            self._devices = devices
            self._count += 1
            self._changed.notify_all()

    def silent(self, *devices: values.DeviceHealth) -> None:
        """Other devices, of which nobody is told."""
        with self._changed:
            self._devices = devices

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        with self._changed:
            if self.broken is not None:
                raise self.broken
            return self._devices

    def wait(self, seen: int, timeout_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen, timeout_s)
            return self._count


def healthy(device: str = "gpu-0000-1b-00-0", *, checked_at: int = 1_000) -> values.DeviceHealth:
    """One device that is well."""
    return values.DeviceHealth(
        pool="node-1", device=device, status=values.HealthStatus.HEALTHY, checked_at=checked_at, message=""
    )


@dataclass(slots=True)
class Calls:
    """An observer that keeps what it is told."""

    rpcs: list[tuple[str, bool]] = field(default_factory=list)

    def rpc(self, method: str, *, seconds: float, ok: bool) -> None:
        assert seconds >= 0
        self.rpcs.append((method, ok))


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets; pytest's own are too deep for 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="nf", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    """A socket at `path` that somebody serves; it stays behind, as after a kill."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield
