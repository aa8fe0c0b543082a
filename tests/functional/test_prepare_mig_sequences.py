# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what happens on a node whose GPUs are divided at need: claims for parts and for whole GPUs, crashes inside the steps
and inside the hardware, hardware that fails for a while, reboots, a driver that is reloaded, an admin with instances of his own.
Whatever the order: no two claims have one slice, an answered claim has its instances, an instance that the agent has made is in the
record, and one of the admin's is never touched.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from discovery import mig, work
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver import values
from driver.prepare import cdidir, ledger, plan, store
from tests.fakes import mighands
from tests.fakes.preparing import ADDRESSES, NAMES, Agent, part_name, ref

CLAIMS = st.integers(0, 4)
PARTS = [
    part_name(gpu, profile, start) for gpu in (0, 1) for profile, starts in mighands.PLACES.items() for start in starts
]
DEVICES = st.lists(st.sampled_from([*PARTS, *NAMES[:2]]), min_size=1, max_size=3, unique=True)
MOMENTS = st.sampled_from(["file", "row", "before work", "half the work", "after work"])
PASSES = st.sampled_from([0, 0, 0, 1, 2])
ADMINS = st.tuples(st.integers(0, 1), st.sampled_from([(19, 0), (19, 6), (14, 2)]))


class Crash(BaseException):
    """The process ends here."""


@dataclass
class _Fate:
    """At which passing of which moment the process ends next; shared by the parts of one agent."""

    moment: str | None = None
    passes: int = 0

    def reach(self, moment: str) -> None:
        if moment == self.moment:
            self.passes -= 1
            if self.passes < 0:
                self.moment = None
                raise Crash


FATE = _Fate()


class MortalDirectory(cdidir.CdiDirectory):
    """CDI files, with moments to die at."""

    def write_claim(self, entry: ledger.Entry, columns: ledger.Columns) -> None:
        FATE.reach("file")
        super().write_claim(entry, columns)
        FATE.reach("file")

    def remove_claim(self, uid: str) -> bool:
        FATE.reach("file")
        return super().remove_claim(uid)


class MortalStore(store.Store):
    """A record, with moments to die at."""

    def put(self, planned: plan.PreparePlan, *, previous: ledger.Entry | None, timeout_s: float) -> None:
        FATE.reach("row")
        super().put(planned, previous=previous, timeout_s=timeout_s)
        FATE.reach("row")

    def remove(self, entry: ledger.Entry, *, timeout_s: float) -> None:
        FATE.reach("row")
        super().remove(entry, timeout_s=timeout_s)
        FATE.reach("row")


class MortalHands(mighands.Hands):
    """Hardware that is left as it is when the process ends: with none, some or all of what was asked for."""

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
        def committed() -> None:
            commit()
            FATE.reach("before work")

        if FATE.moment == "half the work" and len(wanted) > 1:
            super().create(gpu, wanted[:1], begun=begun, toggle=toggle, commit=committed, timeout_s=timeout_s)
            FATE.reach("half the work")
            begun = True
        made = super().create(gpu, wanted, begun=begun, toggle=toggle, commit=committed, timeout_s=timeout_s)
        FATE.reach("after work")
        return made

    def destroy(self, gpu: PciAddress, partitions: Sequence[mig.Partition], *, timeout_s: float) -> None:
        FATE.reach("before work")
        for part in partitions:
            super().destroy(gpu, [part], timeout_s=timeout_s)
            FATE.reach("half the work")
        FATE.reach("after work")


class MortalAgent(Agent):
    """An agent of such parts."""

    directory_type = MortalDirectory
    record_type = MortalStore
    hands_type = MortalHands


class Sequences(RuleBasedStateMachine):
    """`live`: what kubelet was answered and may have running containers for. `admins`: the instances that an admin has made."""

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nearfield-sequences-")
        self.boot = 0
        self.live: dict[values.ClaimUid, values.Prepared] = {}
        self.lost: set[values.ClaimUid] = set()
        self.admins: set[tuple[int, int, int]] = set()
        self.agent = self._start()
        for number in range(5):
            self.agent.api.allocate(ref(number), PARTS[number])

    def teardown(self) -> None:
        if hasattr(self, "agent"):
            FATE.moment = None
            self.agent.stop()
            self._folder.cleanup()

    def _start(self) -> MortalAgent:
        made = MortalAgent(Path(self._folder.name), boot_id=f"boot-{self.boot}", wait_s=0.0)
        made.index.divide()
        made.start()
        return made

    def _restart(self) -> None:
        FATE.moment = None
        self.agent.stop()
        self.agent = self._start()

    def _survive(self, does: Callable[[], Any]) -> Any:
        try:
            return does()
        except Crash:
            self._restart()
            return None

    @rule(number=CLAIMS)
    def prepare(self, number: int) -> None:
        self._take(number, self.agent.prepare(ref(number)))

    def _take(self, number: int, answer: Any) -> None:
        uid = ref(number).uid
        if uid in self.live:
            assert answer in {None, self.live[uid]} or uid in self.lost, "a repeat is the same answer"
            if isinstance(answer, values.Prepared):
                self.lost.discard(uid)
        elif isinstance(answer, values.Prepared):
            self.live[uid] = answer

    @rule(number=CLAIMS, failing=st.booleans())
    def unprepare(self, number: int, failing: bool) -> None:
        self.live.pop(ref(number).uid, None)
        self.lost.discard(ref(number).uid)
        if failing:
            self.agent.hardware.failing["destroy"] = WorkError("busy", kind=work.Kind.IN_USE, retryable=True)
        assert self.agent.unprepare(ref(number)) == values.Unprepared()
        self.agent.hardware.failing.clear()
        entry = self.agent.record.get(ref(number).uid)
        assert entry is None or (failing and entry.state is ledger.ClaimState.RELEASING)

    @rule(number=CLAIMS, kind=st.sampled_from([work.Kind.TIMEOUT, work.Kind.INSUFFICIENT_RESOURCES]))
    def prepare_while_the_hardware_fails(self, number: int, kind: work.Kind) -> None:
        self.agent.hardware.failing["create"] = WorkError("no", kind=kind, retryable=False)
        self._take(number, self.agent.prepare(ref(number)))
        self.agent.hardware.failing.clear()

    @rule(number=CLAIMS, moment=MOMENTS, passes=PASSES, devices=st.none() | DEVICES)
    def crash_while_a_claim_is_prepared(self, number: int, moment: str, passes: int, devices: list[str] | None) -> None:
        FATE.moment, FATE.passes = moment, passes
        self._take(number, self._survive(lambda: self.agent.prepare(ref(number))))
        FATE.moment = None
        if devices is not None and ref(number).uid not in self.live:
            self.agent.api.allocate(ref(number), *devices)
            self._take(number, self.agent.prepare(ref(number)))

    @rule(number=CLAIMS, moment=MOMENTS, passes=PASSES)
    def crash_while_a_claim_is_unprepared(self, number: int, moment: str, passes: int) -> None:
        self.live.pop(ref(number).uid, None)
        self.lost.discard(ref(number).uid)
        FATE.moment, FATE.passes = moment, passes
        self._survive(lambda: self.agent.unprepare(ref(number)))
        FATE.moment = None

    @rule(moment=st.none() | MOMENTS)
    def put_back(self, moment: str | None) -> None:
        FATE.moment, FATE.passes = moment, 0
        self._survive(self.agent.releaser._round)
        FATE.moment = None

    @rule(number=CLAIMS, devices=DEVICES)
    def allocate_anew(self, number: int, devices: list[str]) -> None:
        """The scheduler does not deallocate what is in use; beyond that it may say anything."""
        if ref(number).uid not in self.live:
            self.agent.api.allocate(ref(number), *devices)

    @rule(place=ADMINS)
    def an_admin_makes_one(self, place: tuple[int, tuple[int, int]]) -> None:
        """Where there is room and no claim has begun: what is made at the place of one cannot be told from its own."""
        number, (profile, start) = place
        wanted = mig.MigPlacement(start=start, size=mighands.SIZES[profile])
        here = [
            mig.MigPlacement(start=at, size=mighands.SIZES[of])
            for of, at in self.agent.hardware.instances(ADDRESSES[number])
        ]
        held = [
            device.place
            for holder in self.agent.record.holders([NAMES[number]])
            for device in [holder.device]
            if device.place is not None
        ]
        if not any(wanted.overlaps(other) for other in (*here, *held)):
            self.agent.hardware.admin_makes(ADDRESSES[number], profile, start)
            self.admins.add((number, profile, start))

    @rule(number=st.integers(0, 1))
    def the_driver_is_reloaded(self, number: int) -> None:
        if self.agent.hardware.instances(ADDRESSES[number]):
            self.agent.hardware.admin_removes(ADDRESSES[number])
            self.admins = {admin for admin in self.admins if admin[0] != number}
            for uid in self.live:
                entry = self.agent.record.get(uid)
                if entry is not None and any(part.gpu == ADDRESSES[number] for part in entry.partitions):
                    self.lost.add(uid)

    @rule()
    def restart(self) -> None:
        self._restart()

    @rule()
    def reboot(self) -> None:
        """All containers and instances end; kubelet asks again for those it wants back."""
        self.live.clear()
        self.lost.clear()
        self.admins.clear()
        self.boot += 1
        self.agent.hardware.reboot()
        self._restart()

    @precondition(lambda self: hasattr(self, "agent"))
    @invariant()
    def everything_is_somebodys(self) -> None:
        boot = f"boot-{self.boot}"
        rows = [entry for entry in self.agent.record.rows() if entry.boot_id == boot]
        held = list(itertools.chain.from_iterable(entry.devices_held() for entry in rows))
        assert not any(ledger.overlap(one, other) for one, other in itertools.combinations(held, 2))
        meant = {(part.gpu, part.profile_id, part.start) for entry in rows for part in entry.partitions}
        for number, place in enumerate(ADDRESSES[:2]):
            there = self.agent.hardware.instances(place)
            own = {(place, *where) for where, owner in there.items() if owner == "agent"}
            assert own <= meant, "an instance that no claim knows"
            assert {(number, *where) for where, owner in there.items() if owner == "admin"} == {
                admin for admin in self.admins if admin[0] == number
            }
        for uid, answer in self.live.items():
            entry = self.agent.record.get(uid)
            assert entry is not None, "an answered claim is in the record"
            assert ledger.answer(entry) == answer
            for part in entry.partitions if uid not in self.lost else ():
                assert (part.profile_id, part.start) in self.agent.hardware.instances(part.gpu)


Sequences.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSequences = Sequences.TestCase
