# SPDX-License-Identifier: Apache-2.0
"""How a C function of the mock is declared, and how its arguments are read and written.

Every pointer arrives as an integer (c_void_p; None is NULL), because that is what C sees: what pynvml marshalled is read
and written through memory, so a wrong struct or a short buffer shows here as it would in NVIDIA's library.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from discovery.mock import abi
from discovery.mock.status import StatusError

POINTER = ctypes.c_void_p
UINT = ctypes.c_uint
ULONGLONG = ctypes.c_ulonglong
TEXT = ctypes.c_char_p

S = TypeVar("S", bound=ctypes.Structure)


class First(enum.Enum):
    """What the first argument of a C function is a handle of."""

    NOTHING = enum.auto()
    GPU = enum.auto()
    DEVICE = enum.auto()
    GPU_INSTANCE = enum.auto()
    COMPUTE_INSTANCE = enum.auto()


@dataclass(frozen=True, slots=True)
class Function:
    """A C function: the types of its arguments, and its body. The body raises StatusError to fail.

    The body gets the Driver, and in place of the first handle what it stands for: `state.Gpu` and, where that is asked for,
    `handles.MigPart | None`, `state.MigInstance`, `state.MigComputeInstance`. `root`: needs the right to change MIG.
    """

    body: Callable[..., None]
    arguments: tuple[type[Any], ...]
    first: First = First.NOTHING
    root: bool = False


def system(*arguments: type[Any]) -> Callable[[Callable[..., None]], Function]:
    """Declares a function of an initialised session."""
    return lambda body: Function(body, arguments)


def device(*arguments: type[Any], root: bool = False) -> Callable[[Callable[..., None]], Function]:
    """Declares a function whose first argument is the handle of a GPU; `arguments` are the others. For a MIG device it answers
    NVML_ERROR_NOT_SUPPORTED.
    """
    return lambda body: Function(body, (POINTER, *arguments), First.GPU, root)


def any_device(*arguments: type[Any]) -> Callable[[Callable[..., None]], Function]:
    """Declares a function whose first argument is the handle of a GPU or of a MIG device."""
    return lambda body: Function(body, (POINTER, *arguments), First.DEVICE)


def gpu_instance(*arguments: type[Any], root: bool = False) -> Callable[[Callable[..., None]], Function]:
    """Declares a function whose first argument is the handle of a GPU instance."""
    return lambda body: Function(body, (POINTER, *arguments), First.GPU_INSTANCE, root)


def compute_instance(*arguments: type[Any], root: bool = False) -> Callable[[Callable[..., None]], Function]:
    """Declares a function whose first argument is the handle of a compute instance."""
    return lambda body: Function(body, (POINTER, *arguments), First.COMPUTE_INSTANCE, root)


def wanted(value: Any) -> Any:
    """A field's value; NVML_ERROR_NOT_SUPPORTED where there is none."""
    if value is None:
        raise StatusError(abi.NOT_SUPPORTED)
    return value


def put(pointer: int | None, kind: type[Any], value: Any) -> None:
    """Writes a scalar to where a pointer points."""
    if not pointer:
        raise StatusError(abi.INVALID_ARGUMENT)
    kind.from_address(pointer).value = value


def put_text(pointer: int | None, length: int, text: str) -> None:
    """Writes a C string into a buffer of `length` bytes."""
    data = text.encode() + b"\0"
    if not pointer:
        raise StatusError(abi.INVALID_ARGUMENT)
    if len(data) > length:
        raise StatusError(abi.INSUFFICIENT_SIZE)
    ctypes.memmove(pointer, data, len(data))


def struct(pointer: int | None, kind: type[S]) -> S:
    """The struct at a pointer."""
    if not pointer:
        raise StatusError(abi.INVALID_ARGUMENT)
    return kind.from_address(pointer)


def versioned(pointer: int | None, *kinds: type[ctypes.Structure]) -> ctypes.Structure:
    """The struct at a pointer, of the kind whose version the caller put into its first field."""
    asked = struct(pointer, _Version).version
    for kind in kinds:
        if asked == abi.version_of(kind):
            return struct(pointer, kind)
    raise StatusError(abi.ARGUMENT_VERSION_MISMATCH)


class _Version(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint),)
