# SPDX-License-Identifier: Apache-2.0
"""A node on which agents are killed (SIGKILL) at named points, with a claim whose hardware is worked on; the next agent runs here."""

from __future__ import annotations

import threading
from pathlib import Path

from driver import values
from driver.prepare import ledger
from tests.fakes import cdi_rules, prepare_process, preparing
from tests.fakes.preparing import Agent


class Node:
    """The folders of a node, and the processes on it. `divided` and `shared` are those of PrepareProcess."""

    claim: values.ClaimRef
    """The one that agents die of."""

    def __init__(self, path: Path, *, divided: bool = False, shared: bool = False) -> None:
        self.path = path
        self.api = preparing.ClaimFolder(path / "claims")
        self._divided, self._shared = divided, shared
        self._processes: list[prepare_process.PrepareProcess] = []

    def process(self, *, crash_at: str | None = None, starts: bool = True) -> prepare_process.PrepareProcess:
        """One more agent."""
        made = prepare_process.PrepareProcess(self.path, crash_at=crash_at, divided=self._divided, shared=self._shared)
        self._processes.append(made)
        assert made.started() is starts
        return made

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def dies_preparing(self, point: str) -> None:
        crashing = self.process(crash_at=point)
        assert crashing.ask("prepare", self.claim) is None
        assert crashing.died()

    def dies_unpreparing(self, point: str, *, left: bool = False) -> None:
        """`left`: with nothing undone by the call itself."""
        crashing = self.process(crash_at=point)
        assert "devices" in crashing.ask("prepare", self.claim)[self.claim.uid]
        if left:
            crashing.ask("hold up")
        assert crashing.ask("unprepare", self.claim) is None
        assert crashing.died()

    def dies_undoing(self, point: str, *, works: bool) -> None:
        """The Prepare has failed. `works`: its undoing does not."""
        crashing = self.process(crash_at=point)
        crashing.ask("hold up")
        if works:
            crashing.ask("let go")
        assert crashing.ask("prepare", self.claim) is None
        assert crashing.died()

    def check_files(self, agent: Agent) -> None:
        """After a collection there are the files of the claims, and no others."""
        entries = agent.record.rows()
        agent.collector.look_after()
        completed = {
            agent.dialect.claim_file(entry.claim.uid) for entry in entries if entry.state is ledger.ClaimState.COMPLETED
        }
        begun = {agent.dialect.claim_file(entry.claim.uid) for entry in entries} - completed
        assert completed <= agent.claim_files() <= completed | begun
        for name in agent.claim_files():
            assert cdi_rules.violations((agent.directory.path / name).read_bytes()) == []

    def unprepare(self, agent: Agent) -> None:
        """The claim, until nothing is left to be put back."""
        assert not isinstance(agent.unprepare(self.claim), str)
        while agent.record.releasing():
            threading.Event().wait(0.01)
