# SPDX-License-Identifier: Apache-2.0
"""The stand-in for `nvidia-smi` of a rendered machine, as far as the agent uses it: `nvidia-smi compute-policy`, which sets how long
programs on a GPU have their turn, and `-L`.

    nvidia-smi compute-policy -i UUID|index|address --set-timeslice=0..3
    nvidia-smi compute-policy [-i ...] --list

Exit statuses are those of nvidia-smi(1): 2 an argument that is none, 3 not on this GPU, 4 no permission, 6 no such GPU, 9 no driver,
15 the GPU fell off the bus.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from discovery import address
from discovery.errors import DocumentError
from discovery.mock import abi, live, mighardware, state, view
from discovery.mock.status import StatusError

INVALID_ARGUMENT, NOT_AVAILABLE, NO_PERMISSION, NOT_FOUND, NO_DRIVER, LOST = 2, 3, 4, 6, 9, 15
TIME_SLICES = ("Default", "Short", "Medium", "Long")
_VOLTA = 5
"""nvmlDeviceArchitecture_t: GPUs before it take turns without a choice."""


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(INVALID_ARGUMENT, f"Invalid combination of input arguments: {message}")


def main(arguments: Sequence[str]) -> int:
    """`arguments`: the folder of the machine, then those of nvidia-smi. The exit status."""
    try:
        _run(Path(arguments[0]), arguments[1:])
    except _RefusedError as err:
        sys.stdout.write(f"{err}\n")
        return err.status
    except DocumentError as err:
        sys.stderr.write(f"{err}\n")
        return NO_DRIVER
    return 0


def _run(directory: Path, arguments: Sequence[str]) -> None:
    file = live.LiveFile(directory)
    shown = view.view(file.read(), now=time.time())
    if shown.system is None:
        raise _RefusedError(
            NO_DRIVER,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
            "driver is installed and running.",
        )
    if list(arguments) in (["-L"], ["--list-gpus"]):
        for index, gpu in enumerate(shown.gpus):
            sys.stdout.write(f"GPU {index}: {gpu.name} (UUID: {gpu.uuid})\n")
        return
    parser = _Parser(prog="nvidia-smi", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=["compute-policy"])
    parser.add_argument("-i", "--id", dest="gpu")
    parser.add_argument("--set-timeslice", dest="time_slice")
    parser.add_argument("-l", "--list", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.list == (asked.time_slice is not None):
        parser.error("give --list or --set-timeslice")
    gpus = shown.gpus if asked.gpu is None else (_found(shown, asked.gpu),)
    if asked.list:
        for gpu in gpus:
            sys.stdout.write(f"GPU {gpu.pci} ({gpu.uuid}): Timeslice: {TIME_SLICES[gpu.time_slice]}\n")
        return
    if asked.time_slice not in map(str, range(len(TIME_SLICES))):
        raise _RefusedError(INVALID_ARGUMENT, f"Invalid timeslice value {asked.time_slice}: it is 0, 1, 2 or 3.")
    hand = mighardware.Hand(directory, file)
    for gpu in gpus:
        _set(hand, shown, gpu, int(asked.time_slice))
        sys.stdout.write(f"Successfully set the timeslice of GPU {gpu.pci} to {TIME_SLICES[int(asked.time_slice)]}.\n")


def _set(hand: mighardware.Hand, shown: view.View, gpu: state.Gpu, value: int) -> None:
    assert shown.system is not None
    if gpu.pci in shown.lost:
        raise _RefusedError(LOST, f"Unable to set the timeslice of GPU {gpu.pci}: GPU is lost.")
    if not shown.system.privileged:
        raise _RefusedError(NO_PERMISSION, f"Unable to set the timeslice of GPU {gpu.pci}: Insufficient Permissions.")

    def rule(now: state.Gpu) -> tuple[state.Gpu, None]:
        if (now.architecture or 0) < _VOLTA or (now.mig is not None and now.mig.current):
            raise StatusError(abi.NOT_SUPPORTED)
        return (now if now.time_slice == value else dataclasses.replace(now, time_slice=value)), None

    try:
        hand.change(gpu.pci, rule)
    except StatusError as err:
        said = abi.ERROR_STRINGS.get(err.status, b"Unknown Error").decode()
        status = NOT_AVAILABLE if err.status == abi.NOT_SUPPORTED else LOST
        raise _RefusedError(status, f"Unable to set the timeslice of GPU {gpu.pci}: {said}.") from err


def _found(shown: view.View, named: str) -> state.Gpu:
    """The GPU of a UUID, an index or an address."""
    for index, gpu in enumerate(shown.gpus):
        if named in (gpu.uuid, str(index)):
            return gpu
    try:
        where = address.parse(named.lower())
    except ValueError:
        where = None
    found = None if where is None else shown.gpu(where)
    if found is not None:
        return found
    raise _RefusedError(NOT_FOUND, f'No devices were found for "-i {named}".')
