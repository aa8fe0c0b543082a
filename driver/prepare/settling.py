# SPDX-License-Identifier: Apache-2.0
"""Brings one GPU into the state that the rows ask for, whatever became of it meanwhile: limits of pods, compute mode, turns.

A reload of the driver forgets all of it, an admin may change some of it, and an agent that was killed before it wrote a row leaves
what no row knows. The caller holds the lock of the GPU, and has read the rows under it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from discovery import limits
from discovery.address import PciAddress
from discovery.errors import WorkError
from discovery.limits import ComputeMode, MemoryLimit, MemoryUse
from driver import values
from driver.prepare import cgroups, duties, ledger, modes

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 250
"""Pods that one call is for: a node may have many, and a call that takes too long is taken for one that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a pod used of a GPU when that was last read. The claims of one pod have one limit on a GPU, and one use, together.
    `used` and `limit` in bytes, None where the driver does not tell and where there is no limit; `read_at` since the epoch.
    """

    device: str
    gpu: str
    pod: str
    claims: tuple[values.ClaimUid, ...]
    used: int | None
    limit: int | None
    read_at: float


class Settler:
    """Methods raise WorkError, after having done as much as they can."""

    def __init__(
        self,
        limiting: limits.Limiting,
        pods: cgroups.Cgroups,
        gpu_modes: modes.Modes,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limiting = limiting
        self._pods = pods
        self._modes = gpu_modes
        self._clock = clock

    def settle_modes(
        self, gpu: PciAddress, uuid: str | None, rows: Sequence[ledger.Entry], *, again: bool, timeout_s: float
    ) -> None:
        """Compute mode and turns of a GPU. `again`: set turns also where that was done, as nobody can tell cheaply what they are."""
        failed: WorkError | None = None
        exclusive, turns = gpu in duties.one_process(rows), duties.turns(rows).get(gpu)
        try:
            if exclusive:
                before = self._modes.one_process(gpu, begun=True, timeout_s=timeout_s)
                if before is not ComputeMode.EXCLUSIVE_PROCESS:
                    logger.warning(
                        "The compute mode of GPU %s was %s while clients of MPS share it, and is %s again",
                        gpu,
                        before,
                        ComputeMode.EXCLUSIVE_PROCESS,
                    )
            elif turns is not None:
                self._modes.restore_process(gpu, timeout_s=timeout_s)
        except WorkError as error:
            failed = error
        if turns is not None:
            self._modes.turns(gpu, turns, timeout_s=timeout_s, again=again)
        elif exclusive:
            if uuid is not None:
                self._modes.restore_turns(gpu, uuid, timeout_s=timeout_s)
        elif self._modes.restore(gpu, uuid, timeout_s=timeout_s):
            logger.info("GPU %s, of which nothing is shared any more, is set as it was before", gpu)
        if failed is not None:
            raise failed

    def settle_limits(self, gpu: PciAddress, rows: Sequence[ledger.Entry], *, timeout_s: float) -> tuple[Seen, ...]:
        """Limits of pods on a GPU, and what these use of it; those that rows ask for first. `timeout_s`: for each call."""
        wanted = duties.pod_limits(rows).get(gpu, {})
        pods = sorted(self._pods.pods().items(), key=lambda each: each[0] not in wanted)
        seen: list[Seen] = []
        for begin in range(0, len(pods), ASKED_AT_ONCE):
            some = dict(pods[begin : begin + ASKED_AT_ONCE])
            seen += self._settle_some(gpu, some, wanted, rows, timeout_s=timeout_s)
        return tuple(seen)

    def _settle_some(
        self,
        gpu: PciAddress,
        paths: Mapping[str, str],
        wanted: Mapping[str, MemoryLimit],
        rows: Sequence[ledger.Entry],
        *,
        timeout_s: float,
    ) -> list[Seen]:
        above = {path: path.rpartition("/")[0] for path in paths.values()}
        found = self._limiting.memory_use(gpu, (*above, *sorted(set(above.values()))), timeout_s=timeout_s)
        read_at = self._clock()
        changes: dict[str, MemoryLimit] = {}
        seen: list[Seen] = []
        for pod, path in paths.items():
            use, want = found.get(path), wanted.get(pod, limits.NO_LIMIT)
            if use is None or (pod not in wanted and _is_inherited(use, found.get(above[path]))):
                continue
            if not limits.alike(want, use.limit):
                changes[path] = want
                logger.warning(
                    "The limit of pod %s on GPU %s was %s, and is set to %s", pod, gpu, _spelt(use.limit), _spelt(want)
                )
            if pod in wanted:
                seen.append(
                    Seen(
                        device=values.gpu_device_name(gpu),
                        gpu=str(gpu),
                        pod=pod,
                        claims=_claims(rows, gpu, pod),
                        used=use.used,
                        limit=want.hard,
                        read_at=read_at,
                    )
                )
        if changes:
            self._limiting.limit_memory(gpu, changes, timeout_s=timeout_s)
        return seen


def _is_inherited(use: MemoryUse, above: MemoryUse | None) -> bool:
    """Whether a cgroup tells the limit of the one above it, as one without a limit of its own does: that is somebody else's."""
    return above is not None and limits.alike(above.limit, use.limit)


def _claims(rows: Sequence[ledger.Entry], gpu: PciAddress, pod: str) -> tuple[values.ClaimUid, ...]:
    return tuple(row.claim.uid for row in rows if pod in row.pods and gpu in duties.pod_limits((row,)))


def _spelt(limit: MemoryLimit) -> str:
    if limit.hard is None:
        return "none" if not limit.soft else f"none, with {limit.soft >> 20} MiB kept for it"
    soft = "" if limit.soft == limit.hard else f" (soft {limit.soft >> 20} MiB)"
    return f"{limit.hard >> 20} MiB{soft}"
