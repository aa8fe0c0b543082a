# SPDX-License-Identifier: Apache-2.0
"""Facts about the host that psutil knows. The only importer of psutil, which is loaded when first asked: the process that
serves never needs it.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from discovery import errors

_PROCFS = threading.Lock()
"""psutil takes the place of /proc from a module variable."""


def memory_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that the kernel manages, from a mounted or rendered /proc. Raises SourceError."""
    import psutil  # noqa: PLC0415 - see above

    with _PROCFS, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of fields in meminfo that we do not ask for
        before = psutil.PROCFS_PATH
        psutil.PROCFS_PATH = str(proc)
        try:
            total = int(psutil.virtual_memory().total)
        except (OSError, KeyError, ValueError, IndexError, ZeroDivisionError) as err:
            raise errors.SourceError("host", "memory", f"{proc}/meminfo gives no memory size: {err!r}") from err
        finally:
            psutil.PROCFS_PATH = before
    if not 0 < total < 1 << 63:
        raise errors.SourceError("host", "memory", f"{proc}/meminfo gives a memory size of {total} bytes")
    return total
