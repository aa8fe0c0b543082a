# SPDX-License-Identifier: Apache-2.0
"""Changes of the state of GPUs of a rendered machine by its driver: of MIG as slow as hardware and no slower, and of limits.

A change takes its time in a lock file of its GPU, so that GPUs never wait for each other and of two callers that want one
place exactly one gets it. The lock of the machine is held for the moment in which the state changes, no longer. Who is
killed in the middle leaves what was before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from discovery.address import PciAddress
from discovery.mock import abi, live, migfiles, state
from discovery.mock import view as viewing
from discovery.mock.status import StatusError

LOCKS = "locks"
_CHANGED = ("mig", "processes", "compute_mode", "time_slice", "cgroups")

T = TypeVar("T")


class Hand:
    """Changes the GPUs of one rendered machine. Thread-safe."""

    def __init__(self, directory: Path, file: live.LiveFile, *, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._file = file
        self._clock = clock

    @property
    def directory(self) -> Path:
        """Where the machine is rendered."""
        return self._directory

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """The lock of the machine, for a moment: its files are changed."""
        return self._file.locked()

    def change(
        self,
        pci: PciAddress,
        rule: Callable[[state.Gpu], tuple[state.Gpu, T]],
        *,
        seconds: Callable[[state.MigTimes], float] = lambda _: 0.0,
    ) -> T:
        """Makes of a GPU what `rule` says, after the time that it takes. What the rule refuses (StatusError) is refused at once."""
        with self._gpu(pci):
            before = self._look(pci)
            after, _ = rule(before)
            takes = seconds(before.mig.times) if before.mig is not None and after is not before else 0.0
            if takes > 0:
                time.sleep(takes)
            with self._file.locked():
                before = self._look(pci)
                after, answer = rule(before)
                if after is not before:
                    self._write(before, after)
            return answer

    def occupy(self, pci: PciAddress, processes: tuple[state.Process, ...]) -> None:
        """Puts processes on a GPU in place of those that are there. They need not wait for the hardware."""
        with self._file.locked():
            before = self._look(pci)
            self._write(before, dataclasses.replace(before, processes=processes))

    def _look(self, pci: PciAddress) -> state.Gpu:
        view = viewing.view(self._file.read(), now=self._clock())
        gpu = view.gpu(pci)
        if gpu is None or pci in view.lost:
            raise StatusError(abi.GPU_IS_LOST)
        return gpu

    def _write(self, before: state.Gpu, after: state.Gpu) -> None:
        """`before` and `after` may show faults; only what the driver changes is written."""
        now = self._file.read()
        assert now.nvml is not None
        gpus = tuple(
            dataclasses.replace(gpu, **{name: getattr(after, name) for name in _CHANGED})
            if gpu.pci == after.pci
            else gpu
            for gpu in now.nvml.gpus
        )
        migfiles.come(self._directory, before, after)
        self._file.write(dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=gpus)))
        migfiles.go(self._directory, before, after)

    @contextlib.contextmanager
    def _gpu(self, pci: PciAddress) -> Iterator[None]:
        folder = self._directory / LOCKS
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / f"{pci}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def repair(directory: Path, *, clock: Callable[[], float] = time.time) -> None:
    """Makes the capability files of a rendered machine fit its state, if they do not. DocumentError when there is none."""
    file = live.LiveFile(directory)
    if not migfiles.fit(directory, viewing.view(file.read(), now=clock())):
        with file.locked():
            migfiles.repair(directory, viewing.view(file.read(), now=clock()))
