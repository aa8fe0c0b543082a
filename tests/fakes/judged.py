# SPDX-License-Identifier: Apache-2.0
"""A node for the judges that play with an agent: in place of the agent this does everything right, until told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver import values
from driver.prepare import ledger
from hack.judges import agentnode, upstream


class JudgedNode(agentnode.AgentNode):
    """`wrong`: what it does wrong. `points`: those of which it may be told to die."""

    points: tuple[str, ...] = ()

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.claims: dict[values.ClaimRef, tuple[upstream.Result, ...]] = {}
        self.prepared: set[values.ClaimRef] = set()
        self.down = True
        self.starts = 0

    def offers(self) -> list[dict[str, Any]]:
        """The devices of its slice."""
        return []

    def answered(self, ref: values.ClaimRef) -> Sequence[upstream.Result]:
        """What it says that a claim has."""
        return self.claims[ref]

    def consumed(self, one: upstream.Result) -> Mapping[str, str]:
        """What its record says of it."""
        return one.consumed

    def start(self, *, crash_at: str | None = None) -> None:
        assert crash_at is None or crash_at in self.points
        self.down = False
        self.starts += 1

    def alive(self) -> bool:
        return not self.down

    def kill(self) -> None:
        self.down = True

    def slices(self) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "s"}, "spec": {"pool": {"generation": self.starts}, "devices": self.offers()}}]

    def allocate(self, claim: Any, results: Sequence[upstream.Result], *, pods: Sequence[str] = ()) -> values.ClaimRef:
        name = claim["metadata"]["name"]
        ref = values.ClaimRef(uid=values.ClaimUid(f"uid-{name}"), namespace="ml", name=name)
        self.claims[ref] = tuple(results)
        return ref

    def prepare(self, ref: values.ClaimRef) -> values.Prepared | values.Failed | None:
        if self.down:
            return None
        if self.wrong == "refused":
            return values.Failed(message="no")
        self.prepared.add(ref)
        return values.Prepared(
            devices=tuple(
                values.PreparedDevice(
                    request_names=(one.request,),
                    pool="p",
                    device=one.device,
                    cdi_device_ids=(),
                    share_id=one.share_id,
                )
                for one in self.answered(ref)
            )
        )

    def unprepare(self, ref: values.ClaimRef) -> values.Unprepared | values.Failed | None:
        if self.down:
            return None
        if self.wrong == "not unprepared":
            return values.Failed(message="no")
        self.prepared.discard(ref)
        return values.Unprepared()

    def prepare_again(self, ref: values.ClaimRef) -> values.Prepared | values.Failed:
        self.start()
        answer = self.prepare(ref)
        assert answer is not None
        return answer

    def unprepare_again(self, ref: values.ClaimRef) -> values.Unprepared | values.Failed:
        self.start()
        answer = self.unprepare(ref)
        assert answer is not None
        return answer

    def forget(self, ref: values.ClaimRef) -> None:
        del self.claims[ref]

    def rows(self) -> tuple[ledger.Entry, ...]:
        left = values.ClaimRef(uid=values.ClaimUid("uid-old"), namespace="ml", name="old")
        return tuple(
            ledger.Entry(
                claim=ref,
                state=ledger.ClaimState.COMPLETED,
                boot_id="b",
                devices=(),
                results=tuple(
                    ledger.Result(
                        request=one.request,
                        pool="p",
                        device=one.device,
                        share_id=one.share_id,
                        consumed_capacity=self.consumed(one),
                    )
                    for one in self.claims.get(ref, ())
                ),
                cdi_ids=(),
            )
            for ref in [*self.prepared, *([left] if self.wrong == "row" else [])]
        )

    def cdi_files(self) -> list[str]:
        left = ["gpu.nearfield.dev_old.json"] if self.wrong == "file" else []
        return sorted([*left, *(f"gpu.nearfield.dev_{ref.uid}.json" for ref in self.prepared)])

    def _until(self, look: Callable[[], agentnode.T], what: str, *, within_s: float) -> agentnode.T:
        if not (found := look()):
            raise agentnode.NodeError(f"{what}: never, in {within_s} s")
        return found
