# SPDX-License-Identifier: Apache-2.0
"""What is set for shares, in a file, so that it outlives the processes that set it; with faults. The room of `preparing.Agent` works
with it as with the enforcer of the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from discovery import address
from discovery.address import PciAddress
from discovery.errors import WorkError
from driver.prepare import ledger


class Called(NamedTuple):
    """One call."""

    name: str
    claim: str
    others: frozenset[str]
    begun: bool


@dataclass
class Enforcer:
    """A releasing.Enforcer. `calls`: what was asked of this one. `failing`: calls that fail with this, after they have done it."""

    path: Path
    calls: list[Called] = field(default_factory=list)
    failing: dict[str, WorkError] = field(default_factory=dict)
    locked: Callable[[PciAddress], bool] = lambda _: True
    """Whether somebody has the lock of a GPU."""

    def apply(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, begun: bool, timeout_s: float) -> None:
        """As releasing.Enforcer."""
        self._called("apply", entry, others, timeout_s, begun=begun)
        with self._state() as state:
            state[entry.claim.uid] = {
                "pods": list(entry.pods),
                "shares": {
                    str(result.share_id): [
                        device.name,
                        device.uuid,
                        result.share.memory_limit,
                        result.share.compute_limit,
                    ]
                    for device, result in entry.shared
                    if result.share is not None and result.share.enforced
                },
            }
        self._fault("apply")

    def undo(self, entry: ledger.Entry, others: Sequence[ledger.Entry], *, timeout_s: float) -> None:
        """As releasing.Enforcer."""
        self._called("undo", entry, others, timeout_s, begun=False)
        with self._state() as state:
            state.pop(entry.claim.uid, None)
        self._fault("undo")

    def there(self) -> dict[str, Any]:
        """What is set, by claim."""
        with self._state() as state:
            return dict(state)

    def drop(self, claim: str) -> None:
        """As one who sweeps what no row asks for."""
        with self._state() as state:
            state.pop(claim, None)

    def forget(self) -> None:
        """As after a reboot."""
        self.path.unlink(missing_ok=True)

    def _called(
        self, name: str, entry: ledger.Entry, others: Sequence[ledger.Entry], timeout_s: float, *, begun: bool
    ) -> None:
        assert timeout_s > 0
        assert entry.enforced
        uids = [other.claim.uid for other in others]
        assert len(set(uids)) == len(uids)
        assert entry.claim.uid not in uids
        assert all(other.boot_id == entry.boot_id and other.held_in_shares for other in others)
        assert all(self.locked(address.parse(device.address)) for device, _ in entry.shared)
        self.calls.append(Called(name, entry.claim.uid, frozenset(uids), begun))

    def _fault(self, name: str) -> None:
        if name in self.failing:
            raise self.failing[name]

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with Path(f"{self.path}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else "{}"
            state: dict[str, Any] = json.loads(text)
            yield state
            # By a rename: what was set outlives whoever is killed in the middle.
            if (after := json.dumps(state)) != text:
                written = Path(f"{self.path}.new")
                written.write_text(after, encoding="utf-8")
                written.replace(self.path)
