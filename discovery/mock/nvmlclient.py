# SPDX-License-Identifier: Apache-2.0
"""Asking a libnvidia-ml as a C program would: functions by name, and what they answer if it is no success."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from discovery.mock import abi

ABSENT = (abi.NOT_SUPPORTED, abi.FUNCTION_NOT_FOUND)
"""The answers of a function that has nothing to say of this GPU, or that this driver has not."""

_TEXT_BYTES = 256


class Client:
    """Calls functions of a library by name; a missing one answers NVML_ERROR_FUNCTION_NOT_FOUND."""

    def __init__(self, given: object) -> None:
        self._library = given
        self.errors: dict[str, int] = {}

    def call(self, name: str, *arguments: Any) -> int:
        """The nvmlReturn_t of a function."""
        function = getattr(self._library, name, None)
        return abi.FUNCTION_NOT_FOUND if function is None else int(function(*arguments))

    def missing_of(self, names: Iterable[str]) -> list[str]:
        """Those of some functions that the library has not."""
        return [name for name in names if not hasattr(self._library, name)]

    def ask(self, name: str, *arguments: Any) -> bool:
        """Whether a function answered. Its error is kept, unless it says that there is no such thing."""
        status = self.call(name, *arguments)
        if status != abi.SUCCESS and status not in ABSENT:
            self.errors[name] = status
        return status == abi.SUCCESS

    def number(self, name: str, kind: type[Any], *arguments: Any) -> int | None:
        """What a function writes behind its last argument; None where it does not answer."""
        out = kind()
        return int(out.value) if self.ask(name, *arguments, ctypes.byref(out)) else None

    def text(self, name: str, *arguments: Any) -> str | None:
        """The text that a function writes into a buffer, its last argument but for the length."""
        out = ctypes.create_string_buffer(_TEXT_BYTES)
        done = self.ask(name, *arguments, out, ctypes.c_uint(_TEXT_BYTES))
        return out.value.decode(errors="replace") if done else None

    def taken_errors(self) -> dict[str, int]:
        """The errors kept so far, which begin anew."""
        errors, self.errors = self.errors, {}
        return errors
