# SPDX-License-Identifier: Apache-2.0
"""What is done with the hardware for one claim: MIG instances made and removed, GPUs made whole. Over all its GPUs at once.

The GPUs of a claim are worked at side by side, and begin together: nothing is changed on any of them before the places on all
were found free and the record says that the claim has begun. So a claim costs one commit, and as long as its slowest GPU.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from discovery import mig, work
from discovery.errors import WorkError
from driver.prepare import crashpoints, plan
from driver.prepare.crashpoints import Point

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNDO_S = 3.0
"""How long it may take at most to remove what was made for nothing, out of what is kept for the answer."""


class _AbandonedError(Exception):
    """Another GPU of the claim could not begin, so this one does not."""


class Hands:
    """Works for claims by `work`. Methods from any thread; they raise WorkError, and whatever `commit` raises."""

    def __init__(self, worker: work.Work) -> None:
        self._worker = worker

    def make(
        self, wanted: Sequence[plan.GpuWork], *, begun: bool, commit: Callable[[], None], timeout_s: float
    ) -> Mapping[str, mig.MigInstance]:
        """Do the work of a plan; the instances by the names of their devices. `begun`: `commit` was called before, by a call that
        may have made some of them.

        What fails on one GPU, and is `clean`, takes back what was made on the others, as long as it is known whose it is: an instance
        that somebody makes at one of these places afterwards is not of this claim. Otherwise what is there stays.
        """
        start = _Start(sum(bool(item.wanted) for item in wanted), commit)
        found: dict[str, mig.MigInstance] = {}
        unsure = threading.Event()

        def carry_out(item: plan.GpuWork) -> None:
            if not item.wanted:
                self._worker.whole(item.gpu, toggle=item.toggle, timeout_s=timeout_s)
                return
            try:
                made = self._worker.create(
                    item.gpu,
                    tuple(item.wanted.values()),
                    begun=begun,
                    toggle=item.toggle,
                    commit=start.ready,
                    timeout_s=timeout_s,
                )
            except BaseException as error:
                start.abandon()
                if not (isinstance(error, _AbandonedError) or (isinstance(error, WorkError) and error.clean)):
                    unsure.set()
                raise
            found.update(zip(item.wanted, made, strict=True))

        try:
            _side_by_side([functools.partial(carry_out, item) for item in wanted])
        except WorkError as error:
            mine = [part for item in wanted for name, part in item.wanted.items() if name in found]
            error.clean = not (begun or unsure.is_set()) and self._taken_back(mine, timeout_s=min(UNDO_S, timeout_s))
            raise
        if found:
            crashpoints.reach(Point.MIG_MADE)
        return found

    def _taken_back(self, made: Sequence[mig.Partition], *, timeout_s: float) -> bool:
        try:
            self.remove(made, timeout_s=timeout_s)
        except WorkError as error:
            logger.warning("What was made for nothing cannot be removed yet: %s", error)
            return False
        return True

    def remove(self, partitions: Collection[mig.Partition], *, timeout_s: float) -> None:
        """Remove the instances at some places; those that are not there are done."""
        if not partitions:
            return
        crashpoints.reach(Point.MIG_BEFORE_REMOVAL)
        _side_by_side(
            [
                functools.partial(self._worker.destroy, gpu, tuple(parts), timeout_s=timeout_s)
                for gpu, parts in itertools.groupby(sorted(partitions), key=lambda part: part.gpu)
            ]
        )
        crashpoints.reach(Point.MIG_REMOVED)


class _Start:
    """Where the GPUs of one claim wait for each other: the last one that is ready commits, and then all go on."""

    def __init__(self, parties: int, commit: Callable[[], None]) -> None:
        self._missing = parties
        self._commit = commit
        self._changed = threading.Condition()
        self._over = False
        self._abandoned = False

    def ready(self) -> None:
        """One GPU can begin. Returns when all can and it is recorded; raises _AbandonedError where one cannot."""
        with self._changed:
            self._missing -= 1
            if not self._missing and not self._abandoned:
                self._commit()
                self._over = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._abandoned)
            if not self._over:
                raise _AbandonedError("another GPU of the claim cannot begin")

    def abandon(self) -> None:
        """One GPU cannot begin, or has failed later, which changes nothing for the others."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


def _side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """Do all, the first in the caller's thread, and give their answers in order. Where some fail, all have ended, and the first
    error that is not about another one's leaves here.
    """
    answers: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def carry_out(number: int) -> None:
        try:
            answers[number] = works[number]()
        except BaseException as error:  # noqa: BLE001 - it is raised below, in the thread of the caller
            failures[number] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(carry_out, number), name="gpu", daemon=True)
        for number in range(1, len(works))
    ]
    for thread in threads:
        thread.start()
    if works:
        carry_out(0)
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures.items(), key=lambda item: (isinstance(item[1], _AbandonedError), item[0]))[1]
    return [answers[number] for number in range(len(works))]
