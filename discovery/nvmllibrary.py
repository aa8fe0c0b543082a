# SPDX-License-Identifier: Apache-2.0
"""libnvidia-ml: finding it in a mounted driver, putting it under `pynvml`, and calling its functions with errors of our own.

Errors are translated here and nowhere else: `SourceError("nvml", kind)`, where kind is NVML's own name for the error,
`NVML_ERROR_GPU_IS_LOST` as `gpu-is-lost`. `pynvml` is passed in, as nvml.py imports it late.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discovery import errors


def load(driver_root: Path) -> object | None:
    """libnvidia-ml of a driver that is mounted at `driver_root`; None for `/`, where the dynamic linker finds it.

    Raises SourceError when there is none, or when it cannot be loaded.
    """
    if driver_root == Path("/"):
        return None
    import ctypes  # noqa: PLC0415 - as pynvml

    places = [
        driver_root / folder / "libnvidia-ml.so.1"
        for folder in (
            "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib",
            "usr/lib/wsl/lib",
        )
    ]  # fmt: skip
    for place in places:
        if place.exists():
            try:
                return ctypes.CDLL(str(place))
            except OSError as err:
                raise errors.SourceError("nvml", "library-not-loadable", f"{place}: {err}") from err
    raise errors.SourceError(
        "nvml", "library-not-found", f"no libnvidia-ml.so.1 below {driver_root}; is the driver installed there?"
    )


def install(pynvml: Any, library: object | None) -> None:
    """Make pynvml call `library`, or let it load the real one. Function pointers it kept are of the library before."""
    if library is not None or getattr(pynvml.nvmlLib, "_name", None) != "libnvidia-ml.so.1":
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - it has no public door


def ask(pynvml: Any, function: str, *arguments: object) -> Any:
    """What a function of pynvml answers. Raises SourceError."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as err:
        raise errors.SourceError("nvml", _kind(pynvml, err.value), f"{function}: {_said(pynvml, err)}") from err
    except UnicodeDecodeError as err:
        raise errors.SourceError("nvml", errors.MALFORMED, f"{function} answered bytes that are no text") from err


def error(pynvml: Any, function: str, status: int) -> errors.SourceError:
    """The error for a status that a function gave as an answer."""
    return errors.SourceError("nvml", _kind(pynvml, status), f"{function}: {_said(pynvml, pynvml.NVMLError(status))}")


@functools.cache
def _names(pynvml: Any) -> Mapping[int, str]:
    """Of two names for one status the first counts."""
    return {value: name for name, value in reversed(vars(pynvml).items()) if name.startswith("NVML_ERROR_")}


def _kind(pynvml: Any, status: int) -> str:
    """NVML's own name of an error; the numbers stand in nvmlReturn_t."""
    name = _names(pynvml).get(status, f"NVML_ERROR_{status}")
    return name.removeprefix("NVML_ERROR_").lower().replace("_", "-")


def _said(pynvml: Any, err: Exception) -> str:
    try:
        return str(err)
    except (UnicodeDecodeError, pynvml.NVMLError):
        return "an error without a text"
