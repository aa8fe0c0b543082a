# SPDX-License-Identifier: Apache-2.0
"""What may not be left behind by a test: looked at from the API, from kubelet and from the node's disk."""

from __future__ import annotations

import copy
from collections.abc import Callable

from tests.e2e.kit import partitions, waiting
from tests.e2e.kit.agent import Agent
from tests.e2e.kit.api import Api, Json
from tests.e2e.kit.kubelet import Kubelet
from tests.e2e.kit.node import Disk

PATIENCE_S = 240.0
PREFIX = "e2e-"
"""Of the namespaces of tests."""


class Leftovers:
    """Compares a node with itself before a test. What an earlier test left is that one's failure only."""

    def __init__(self, *, api: Api, agent: Agent, disk: Disk, kubelet: Kubelet) -> None:
        self._api = api
        self._agent = agent
        self._disk = disk
        self._kubelet = kubelet
        self._slices = self._published()
        self._already = frozenset(self.found())

    def require_nothing(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Return once nothing is left; fails with a list of what is."""
        waiting.until(
            lambda: all(set(look()) <= self._already for look in self._looks),
            "nothing left of the test",
            timeout_s=timeout_s,
            told=lambda: [text for text in self.found() if text not in self._already],
        )

    def remove_namespaces(self) -> None:
        """Begin to delete the tests' namespaces: only now, as no Event can be written in one that is being deleted."""
        for item in self._api.items("Namespace"):
            if item["metadata"]["name"].startswith(PREFIX) and "deletionTimestamp" not in item["metadata"]:
                self._api.delete("Namespace", item["metadata"]["name"])

    def found(self) -> list[str]:
        """What is left now."""
        return [text for look in self._looks for text in look()]

    @property
    def _looks(self) -> tuple[Callable[[], list[str]], ...]:
        """Where to look, what takes long last."""
        return self._objects, self._files, self._sockets, self._changes, self._in_use

    def _objects(self) -> list[str]:
        return [
            f"{kind} {item['metadata']['namespace']}/{item['metadata']['name']} ({item['metadata']['uid']})"
            for kind in ("Pod", "ResourceClaim")
            for item in self._api.items(kind)
            if item["metadata"]["namespace"].startswith(PREFIX)
        ]

    def _files(self) -> list[str]:
        record = [f"record: {entry.state} {entry.claim}" for entry in self._disk.record()]
        instances = [f"MIG instance {entry.device}" for entry in partitions.there(self._disk.machine)]
        return record + [f"CDI file {path.name}" for path in self._disk.claim_files()] + instances

    def _sockets(self) -> list[str]:
        wanted, there = self._agent.socket_paths(), self._disk.sockets()
        return [
            *(f"socket {path}" for path in sorted(there - wanted)),
            *(f"no socket {path}" for path in sorted(wanted - there)),
        ]

    def _changes(self) -> list[str]:
        return (
            [] if self._published() == self._slices else [f"slices that are not those of before: {self._published()}"]
        )

    def _in_use(self) -> list[str]:
        in_use = self._kubelet.claims_in_use()
        return [f"kubelet has {in_use} claims in use"] if in_use else []

    def _published(self) -> list[Json]:
        """The slices with what a user sees of them: a repair raises the generation and renames nothing."""
        kept = []
        for item in self._agent.slices():
            spec = copy.deepcopy(item["spec"])
            del spec["pool"]["generation"]
            kept.append(spec)
        return kept
