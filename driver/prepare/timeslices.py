# SPDX-License-Identifier: Apache-2.0
"""How long a turn is where programs take turns at a GPU: set by the nvidia-smi of the driver root, as NVML has no call for it.

`nvidia-smi compute-policy -i UUID --set-timeslice=N`, with 0 for default, 1 short, 2 medium, 3 long, and `--list`, which shows the word
of each GPU (nvidia-smi compute-policy -h). It belongs to the whole GPU and to nobody's process; a reload of the driver forgets it.
"""

from __future__ import annotations

import re

from discovery import work
from discovery.errors import WorkError
from driver.mps import programs, running
from driver.prepare import rootfs
from driver.sharing.shares import TimeSlice

PROGRAM = "nvidia-smi"

_NUMBERS = {TimeSlice.DEFAULT: 0, TimeSlice.SHORT: 1, TimeSlice.MEDIUM: 2, TimeSlice.LONG: 3}
_WORD = re.compile(rf"\b({'|'.join(TimeSlice)})\b", re.IGNORECASE)


class TimeSlices:
    """The turns of the GPUs of this node. `root`: None for a mock machine without a driver root. Methods from any thread."""

    def __init__(self, root: rootfs.DriverRoot | None) -> None:
        self._root = root

    def problem(self) -> str | None:
        """Why turns cannot be set on this node, in a sentence that says what would help; None where they can."""
        return None if self._program() is not None else self._missing()

    def get(self, uuid: str, *, timeout_s: float) -> TimeSlice | None:
        """How long a turn of a GPU is, None where that is not told in words that are known. Raises WorkError."""
        words = {word.lower() for word in _WORD.findall(self._run(uuid, "--list", timeout_s=timeout_s))}
        return TimeSlice(words.pop()) if len(words) == 1 else None

    def set(self, uuid: str, turn: TimeSlice, *, timeout_s: float) -> None:
        """Set how long a turn of a GPU is. Raises WorkError."""
        self._run(uuid, f"--set-timeslice={_NUMBERS[turn]}", timeout_s=timeout_s)

    def _program(self) -> programs.Program | None:
        return None if self._root is None else programs.find(self._root, PROGRAM)

    def _missing(self) -> str:
        if self._root is None:
            return f"a mock machine has no {PROGRAM}; give one with --driver-root (python -m discovery.mock.programs makes it)"
        return (
            f"{PROGRAM} is not in the driver root {self._root.mount}: install the driver's utilities, and see --driver-root and"
            " --driver-root-mount"
        )

    def _run(self, uuid: str, what: str, *, timeout_s: float) -> str:
        program = self._program()
        if program is None:
            raise WorkError(self._missing(), kind=work.Kind.NOT_SUPPORTED, retryable=False)
        command = program.command("compute-policy", "-i", uuid, what)
        spelt = f"{program.path} compute-policy -i {uuid} {what}"
        try:
            done = running.run(command, environment=program.environment, timeout_s=max(0.0, timeout_s))
        except running.RunningError as error:
            raise WorkError(f"{spelt}: {error}", kind=work.Kind.TIMEOUT, retryable=True) from error
        if done.status != 0:
            raise WorkError(
                f"{spelt} ended with status {done.status}: {done.words}", kind=work.Kind.FAILED, retryable=False
            )
        return done.out
