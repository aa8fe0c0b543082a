# SPDX-License-Identifier: Apache-2.0
"""The stand-in for libnvidia-ml: an object whose attributes are C functions, over the state of a rendered machine.

pynvml gets it in the place of the loaded library, finds functions on it by `getattr`, and calls them through ctypes.
A function that is not in the tables is missing, as from an older driver: pynvml says NVML_ERROR_FUNCTION_NOT_FOUND.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import (
    abi,
    call,
    faults,
    handles,
    library_device,
    library_limits,
    library_links,
    library_mig,
    library_migcompute,
    live,
    mighardware,
    state,
)
from discovery.mock.call import First
from discovery.mock.driver import Driver
from discovery.mock.status import StatusError

logger = logging.getLogger(__name__)

FUNCTIONS = {
    **library_device.FUNCTIONS,
    **library_limits.FUNCTIONS,
    **library_links.FUNCTIONS,
    **library_mig.FUNCTIONS,
    **library_migcompute.FUNCTIONS,
}

_UNTYPED = ctypes.CFUNCTYPE(ctypes.c_int)
"""What a symbol of a loaded library is to ctypes: a function of unknown arguments that returns int."""

_UNNOTICED_S = 1.0
"""How long a change of the faults by another process stays unnoticed, for effects that lie in the future."""


class Library:
    """The functions of libnvidia-ml over one rendered machine. Pointers are made at first use and live as long as this."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        file = live.LiveFile(directory)
        nvml = file.read().nvml
        self._missing = () if nvml is None else nvml.system.missing_functions
        hand = mighardware.Hand(directory, file, clock=clock)
        self._driver = Driver(file, hand=hand, clock=clock)
        self._thunks: list[object] = []
        self._strings = {status: ctypes.create_string_buffer(text) for status, text in abi.ERROR_STRINGS.items()}

    def __getattr__(self, name: str) -> object:
        thunk = self._own(name)
        if thunk is None:
            function = FUNCTIONS.get(name)
            if function is None or name in self._missing:
                raise AttributeError(f"libnvidia-ml of this machine has no {name}")
            thunk = self._thunk(name, function)
        pointer = _UNTYPED(ctypes.cast(thunk, ctypes.c_void_p).value or 0)
        self._thunks.append(thunk)
        setattr(self, name, pointer)
        return pointer

    def _own(self, name: str) -> Any:
        """The functions that need no session."""
        match name:
            case "nvmlInitWithFlags":
                return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(
                    self._guarded(name, lambda _flags: self._initialise(name))
                )
            case "nvmlInit_v2":
                return ctypes.CFUNCTYPE(ctypes.c_int)(self._guarded(name, lambda: self._initialise(name)))
            case "nvmlShutdown":
                return ctypes.CFUNCTYPE(ctypes.c_int)(self._guarded(name, self._driver.shut_down))
            case "nvmlErrorString":
                return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(self._error_string)
            case _:
                return None

    def _initialise(self, name: str) -> None:
        self._driver.suffer(name, None)
        self._driver.initialise()

    def _error_string(self, status: int) -> int:
        return ctypes.addressof(self._strings.get(status, self._strings[abi.UNKNOWN]))

    def _thunk(self, name: str, function: call.Function) -> Any:
        driver, body = self._driver, function.body

        def on_session(*arguments: Any) -> None:
            driver.enter(name, None)
            body(driver, *arguments)
            driver.suffer(name, None, after=True)

        def on_object(handle: int | None, *arguments: Any) -> None:
            key = driver.key(handle)
            pci = _gpu_of(key)
            current = driver.enter(name, pci)
            gpu = driver.device(current, pci, name)
            if function.root and current.system is not None and not current.system.privileged:
                raise StatusError(abi.NO_PERMISSION)
            body(driver, *_subject(function.first, key, gpu), *arguments)
            driver.suffer(name, pci, after=True)

        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *function.arguments)
        return prototype(self._guarded(name, on_session if function.first is First.NOTHING else on_object))

    def _guarded(self, name: str, body: Callable[..., None]) -> Callable[..., int]:
        """A C caller knows no exceptions: one that left here would be taken for success."""

        def called(*arguments: Any) -> int:
            try:
                body(*arguments)
            except StatusError as err:
                return err.status
            except DocumentError as err:
                logger.error("%s: %s", name, err)
                return abi.UNKNOWN
            except Exception:
                logger.exception("%s failed", name)
                return abi.UNKNOWN
            return abi.SUCCESS

        return called


def _gpu_of(key: object) -> PciAddress:
    """The GPU that the object of a handle is, or is a part of."""
    match key:
        case PciAddress():
            return key
        case handles.MigDevice() | handles.GpuInstance() | handles.ComputeInstance():
            return key.pci
        case _:
            raise StatusError(abi.INVALID_ARGUMENT)


def _subject(first: First, key: object, gpu: state.Gpu) -> tuple[object, ...]:
    """What a body gets for the first handle."""
    match first, key:
        case First.GPU, PciAddress():
            return (gpu,)
        case First.DEVICE, PciAddress():
            return gpu, None
        case First.GPU, handles.MigDevice():
            key.instance.found(gpu)
            raise StatusError(abi.NOT_SUPPORTED)
        case First.DEVICE, handles.MigDevice():
            instance, compute = key.instance.found(gpu)
            return gpu, handles.MigPart(instance=instance, compute=compute)
        case First.GPU_INSTANCE, handles.GpuInstance():
            return gpu, key.found(gpu)
        case First.COMPUTE_INSTANCE, handles.ComputeInstance():
            return gpu, *key.found(gpu)
        case _:
            raise StatusError(abi.INVALID_ARGUMENT)


def load_library(directory: Path) -> Library:
    """The library of a machine that `render` wrote, with its timed faults running. DocumentError when there is none."""
    timeline = faults.Timeline(directory)
    timeline.advance(time.time())
    mighardware.repair(directory)
    threading.Thread(target=_follow, args=(timeline,), name="mock-faults", daemon=True).start()
    return Library(directory)


def _follow(timeline: faults.Timeline) -> None:
    """Gives faults of the tree their effect when their time comes, for as long as the machine is there."""
    waiting = threading.Event()
    with contextlib.suppress(DocumentError):
        while True:
            due = timeline.advance(time.time())
            waiting.wait(_UNNOTICED_S if due is None else min(_UNNOTICED_S, max(0.0, due - time.time())))
