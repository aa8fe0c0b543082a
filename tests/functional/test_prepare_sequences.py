# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what happens on a node: claims prepared, repeated and unprepared, allocations that contradict each other,
crashes inside the steps, restarts, reboots, lost and edited CDI files, a lost record. Whatever the order: no device is in the
hands of two claims, a repeated claim gets the same answer, and a file is there for every claim that kubelet was answered.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from driver import values
from driver.prepare import cdidir, ledger, plan, store
from tests.fakes import preparing
from tests.fakes.preparing import NAMES, Agent, ref

CLAIMS = st.integers(0, 4)
DEVICES = st.lists(st.sampled_from(NAMES[:4]), min_size=1, max_size=2, unique=True)
MOMENTS = st.sampled_from(["before file", "after file", "before row", "after row"])


class Crash(BaseException):
    """The process ends here."""


class _Fate:
    """At which moment the process ends next; shared by the parts of one agent."""

    moment: str | None = None

    def reach(self, moment: str) -> None:
        if moment == self.moment:
            raise Crash


class MortalDirectory(cdidir.CdiDirectory):
    """CDI files, with moments to die at."""

    fate = _Fate()

    def write_claim(self, entry: ledger.Entry, columns: ledger.Columns) -> None:
        self.fate.reach("before file")
        super().write_claim(entry, columns)
        self.fate.reach("after file")

    def remove_claim(self, uid: str) -> bool:
        self.fate.reach("before file")
        removed = super().remove_claim(uid)
        self.fate.reach("after file")
        return removed


class MortalStore(store.Store):
    """A record, with moments to die at."""

    def put(self, planned: plan.PreparePlan, *, previous: ledger.Entry | None, timeout_s: float) -> None:
        MortalDirectory.fate.reach("before row")
        super().put(planned, previous=previous, timeout_s=timeout_s)
        MortalDirectory.fate.reach("after row")

    def remove(self, entry: ledger.Entry, *, timeout_s: float) -> None:
        MortalDirectory.fate.reach("before row")
        super().remove(entry, timeout_s=timeout_s)
        MortalDirectory.fate.reach("after row")


class MortalAgent(Agent):
    """An agent of such parts."""

    directory_type = MortalDirectory
    record_type = MortalStore


class Sequences(RuleBasedStateMachine):
    """`live`: what kubelet was answered and may have running containers for."""

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nearfield-sequences-")
        self.boot = 0
        self.live: dict[values.ClaimUid, values.Prepared] = {}
        self.agent = self._start()
        for number in range(5):
            self.agent.api.allocate(ref(number), NAMES[number % 4])

    def teardown(self) -> None:
        if hasattr(self, "agent"):
            MortalDirectory.fate.moment = None
            self.agent.stop()
            self._folder.cleanup()

    def _start(self) -> MortalAgent:
        made = MortalAgent(Path(self._folder.name), boot_id=f"boot-{self.boot}", wait_s=0.0)
        made.start()
        return made

    def _restart(self) -> None:
        MortalDirectory.fate.moment = None
        self.agent.stop()
        self.agent = self._start()

    @rule(number=CLAIMS)
    def prepare(self, number: int) -> None:
        self._take(number, self.agent.prepare(ref(number)))

    @rule(numbers=st.lists(CLAIMS, min_size=2, max_size=5))
    def prepare_side_by_side(self, numbers: list[int]) -> None:
        answers = self.agent.executor.prepare([ref(number) for number in numbers], preparing.Rpc())
        assert answers.keys() == {ref(number).uid for number in numbers}
        for number in set(numbers):
            self._take(number, answers[ref(number).uid])

    def _take(self, number: int, answer: Any) -> None:
        uid = ref(number).uid
        if uid in self.live:
            assert answer == self.live[uid], "a repeat is the same answer"
        elif isinstance(answer, values.Prepared):
            self.live[uid] = answer

    @rule(number=CLAIMS)
    def unprepare(self, number: int) -> None:
        self.live.pop(ref(number).uid, None)
        assert self.agent.unprepare(ref(number)) == values.Unprepared()
        assert ref(number).uid not in self.agent.prepared_uids()

    @rule(number=CLAIMS, moment=MOMENTS)
    def crash_while_a_claim_is_prepared(self, number: int, moment: str) -> None:
        MortalDirectory.fate.moment = moment
        try:
            self._take(number, self.agent.prepare(ref(number)))
        except Crash:
            self._restart()
        MortalDirectory.fate.moment = None

    @rule(number=CLAIMS, moment=MOMENTS)
    def crash_while_a_claim_is_unprepared(self, number: int, moment: str) -> None:
        self.live.pop(ref(number).uid, None)
        MortalDirectory.fate.moment = moment
        try:
            self.agent.unprepare(ref(number))
        except Crash:
            self._restart()
        MortalDirectory.fate.moment = None

    @rule(number=CLAIMS, devices=DEVICES, admin=st.booleans())
    def allocate_anew(self, number: int, devices: list[str], admin: bool) -> None:
        """The scheduler does not deallocate what is in use; beyond that it may say anything."""
        if ref(number).uid not in self.live:
            results = [preparing.result(device, adminAccess=admin) for device in devices]
            self.agent.api.put(ref(number), preparing.claim(ref(number), results))

    @rule()
    def restart(self) -> None:
        self._restart()

    @rule(lost_files=st.booleans())
    def reboot(self, lost_files: bool) -> None:
        """All containers end; kubelet asks again for those it wants back."""
        self.live.clear()
        self.boot += 1
        if lost_files:
            for path in self.agent.directory.path.iterdir():
                path.unlink()
        self._restart()

    @rule(number=CLAIMS, edited=st.booleans())
    def lose_a_file(self, number: int, edited: bool) -> None:
        path = self.agent.directory.path / self.agent.dialect.claim_file(ref(number).uid)
        if path.exists():
            path.write_text("{}") if edited else path.unlink()
        self.agent.collector.look_after()

    @rule()
    def lose_the_record(self) -> None:
        MortalDirectory.fate.moment = None
        self.agent.stop()
        self.agent.record.path.write_bytes(b"garbage" * 2000)
        self.agent = self._start()

    @precondition(lambda self: hasattr(self, "agent"))
    @invariant()
    def no_device_is_in_two_hands(self) -> None:
        holds: list[str] = []
        for uid, answer in self.live.items():
            entry = self.agent.record.get(uid)
            assert entry is not None, "an answered claim is in the record"
            assert ledger.answer(entry) == answer
            holds += entry.holds
            assert (self.agent.directory.path / self.agent.dialect.claim_file(uid)).exists()
        assert len(holds) == len(set(holds))


Sequences.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSequences = Sequences.TestCase
