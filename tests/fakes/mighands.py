# SPDX-License-Identifier: Apache-2.0
"""GPUs that are divided by MIG, in a file, so that they outlive the processes that change them; with an admin who makes instances of
his own, and with faults. The room of `preparing.Agent` works with it as with real hardware.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discovery import mig, work
from discovery.address import PciAddress
from discovery.errors import WorkError

SIZES = {19: 1, 14: 2, 9: 4, 5: 4, 0: 8}
"""Memory slices of the profiles: 1g, 2g, 3g, 4g, 7g of a part with eight."""

NAMES = {19: "1g.10gb", 14: "2g.20gb", 9: "3g.40gb", 5: "4g.40gb", 0: "7g.80gb"}
PLACES = {19: tuple(range(7)), 14: (0, 2, 4), 9: (0, 4), 5: (0,), 0: (0,)}
_LEAST_S = 0.05


@dataclass
class Hands:
    """A Work. `calls`: what was asked of this one. Faults are set by a test, for this process."""

    path: Path
    calls: list[tuple[str, PciAddress]] = field(default_factory=list)
    hung: set[str] = field(default_factory=set)
    """Calls that give no answer until their time is over."""
    failing: dict[str, WorkError] = field(default_factory=dict)
    """Calls that fail with this, creations after the commit."""
    before_commit: Callable[[PciAddress], None] = lambda _: None
    closed: threading.Event = field(default_factory=threading.Event)

    def create(
        self,
        gpu: PciAddress,
        wanted: Sequence[mig.Partition],
        *,
        begun: bool,
        toggle: bool,
        commit: Callable[[], None],
        timeout_s: float,
    ) -> tuple[mig.MigInstance, ...]:
        """As work.Work."""
        self.calls.append(("create", gpu))
        with self._turn(gpu):
            self._look(gpu, wanted, begun=begun)
            self.before_commit(gpu)
            commit()
            self._fault("create", timeout_s)
            with self._state() as state:
                here = state.setdefault(str(gpu), {"mig": False, "instances": {}})
                if not here["mig"] and not toggle:
                    raise WorkError(f"GPU {gpu}: MIG is off", kind=work.Kind.NOT_SUPPORTED, retryable=False)
                here["mig"] = True
                made = []
                for part in wanted:
                    instance = here["instances"].setdefault(_key(part), {"owner": "agent"})
                    instance.setdefault("number", 7 + part.start)
                    state["made"] = state.get("made", 0) + 1
                    made.append(_instance(gpu, part, instance["number"], here.get("generation", 0)))
            return tuple(made)

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:
        """As work.Work."""
        self.calls.append(("destroy", gpu))
        with self._turn(gpu):
            self._fault("destroy", timeout_s)
            with self._state() as state:
                for part in partitions:
                    state.get(str(gpu), {"instances": {}})["instances"].pop(_key(part), None)

    def whole(self, gpu: PciAddress, *, toggle: bool, timeout_s: float) -> None:
        """As work.Work."""
        self.calls.append(("whole", gpu))
        self._fault("whole", timeout_s)
        with self._state() as state:
            here = state.setdefault(str(gpu), {"mig": False, "instances": {}})
            if here["instances"]:
                raise WorkError(f"GPU {gpu}: an instance is there", kind=work.Kind.OCCUPIED, retryable=False)
            if here["mig"] and not toggle:
                raise WorkError(f"GPU {gpu}: MIG is on", kind=work.Kind.NOT_SUPPORTED, retryable=False)
            here["mig"] = False

    def close(self) -> None:
        """As work.Work."""
        self.closed.set()

    def instances(self, gpu: PciAddress) -> dict[tuple[int, int], str]:
        """(profile, start) of what is on a GPU, and whose it is."""
        with self._state() as state:
            found = state.get(str(gpu), {"instances": {}})["instances"]
            return {(int(key.split("@")[0]), int(key.split("@")[1])): value["owner"] for key, value in found.items()}

    def seen(self, gpu: PciAddress, part: mig.Partition) -> mig.MigInstance | None:
        """The instance at a place."""
        with self._state() as state:
            here = state.get(str(gpu), {"instances": {}})
            found = here["instances"].get(_key(part))
            return None if found is None else _instance(gpu, part, found["number"], here.get("generation", 0))

    def divided(self, gpu: PciAddress) -> bool:
        """Whether MIG is on."""
        with self._state() as state:
            return bool(state.get(str(gpu), {"mig": False})["mig"])

    def admin_makes(self, gpu: PciAddress, profile_id: int, start: int) -> None:
        """`nvidia-smi mig -cgi`."""
        with self._state() as state:
            here = state.setdefault(str(gpu), {"mig": True, "instances": {}})
            here["mig"] = True
            here["instances"][f"{profile_id}@{start}"] = {"owner": "admin", "number": 7 + start}

    def admin_removes(self, gpu: PciAddress) -> None:
        """`nvidia-smi mig -dgi`, or a reload of the driver."""
        with self._state() as state:
            here = state[str(gpu)]
            here["instances"] = {}
            here["generation"] = here.get("generation", 0) + 1

    def reboot(self) -> None:
        """All instances are gone."""
        with self._state() as state:
            state.clear()

    def _look(self, gpu: PciAddress, wanted: Sequence[mig.Partition], *, begun: bool) -> None:
        with self._state() as state:
            for key in state.get(str(gpu), {"instances": {}})["instances"]:
                profile, start = (int(word) for word in key.split("@"))
                there = mig.MigPlacement(start=start, size=SIZES[profile])
                for part in wanted:
                    mine = begun and _key(part) == key
                    if not mine and there.overlaps(mig.MigPlacement(start=part.start, size=SIZES[part.profile_id])):
                        raise WorkError(
                            f"GPU {gpu}: GPU instance {7 + start} of profile {profile} is on slice {start}",
                            kind=work.Kind.OCCUPIED,
                            retryable=False,
                        )

    def _fault(self, call: str, timeout_s: float) -> None:
        if call in self.failing:
            raise self.failing[call]
        if call in self.hung:
            end = time.monotonic() + timeout_s
            while call in self.hung and (left := end - time.monotonic()) > 0:
                if self.closed.wait(min(left, _LEAST_S)):
                    break
            if call in self.hung:
                raise WorkError(f"{call}: no answer in {timeout_s:.0f} s", kind=work.Kind.TIMEOUT, retryable=True)

    @contextlib.contextmanager
    def _turn(self, gpu: PciAddress) -> Iterator[None]:
        with Path(f"{self.path}.{gpu.label}").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with Path(f"{self.path}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else "{}"
            state: dict[str, Any] = json.loads(text)
            yield state
            # By a rename: whoever is killed in the middle leaves the GPUs as they were, as hardware would be.
            if (after := json.dumps(state)) != text:
                written = Path(f"{self.path}.new")
                written.write_text(after, encoding="utf-8")
                written.replace(self.path)


def _key(part: mig.Partition) -> str:
    return f"{part.profile_id}@{part.start}"


def _instance(gpu: PciAddress, part: mig.Partition, number: int, generation: int) -> mig.MigInstance:
    return mig.MigInstance(
        gpu_instance=number,
        profile_id=part.profile_id,
        placement=mig.MigPlacement(start=part.start, size=SIZES[part.profile_id]),
        compute_instance=0,
        uuid=f"MIG-{gpu.label}-{number}-{part.profile_id}-{generation}",
        nodes=tuple(
            mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{minor}", major=237, minor=minor)
            for minor in (number * 9 + 3, number * 9 + 4)
        ),
    )
