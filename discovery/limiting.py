# SPDX-License-Identifier: Apache-2.0
"""Limiting who has how much of a GPU, in this process, by the contract of limits.Limiting. Each call is a session of its own, as in
dividing.py.

A path is taken only if it is a cgroup below the root that this process was given, by real folders alone: whoever may write the
request must not get NVML, which is root here, to open anything else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from discovery import dividing, errors, limits, nvml, work
from discovery.address import PciAddress

_LONGEST = 4095
"""PATH_MAX without its end."""


class Limiter:
    """Sets limits over a session with NVML. For one thread at a time."""

    def __init__(self, *, root: Path, session: nvml.Nvml) -> None:
        """`root`: that of the cgroups that may be limited."""
        self._root = os.path.normpath(root)
        self._nvml = session

    def limit_memory(self, address: PciAddress, wanted: Mapping[str, limits.MemoryLimit]) -> None:
        """See limits.Limiting. Every cgroup is tried before the first error leaves."""
        there = {path: self._is_there(path) for path in wanted}
        with self._session(address, "limit the memory of cgroups"):
            gpu = self._nvml.limits_of(address)
            failed: list[errors.WorkError | errors.SourceError] = []
            for path, limit in wanted.items():
                try:
                    if there[path]:
                        gpu.limit_memory(path, limit)
                    elif limit != limits.NO_LIMIT:
                        raise dividing.refused(work.Kind.FAILED, f"{address}: the cgroup {path} is not there")
                    if limit != limits.NO_LIMIT:
                        _verify(address, path, limit, gpu.memory_use(path))
                except errors.SourceError as err:
                    if err.kind != "not-found":
                        failed.append(errors.SourceError(err.source, err.kind, f"{path}: {err}"))
                    elif limit != limits.NO_LIMIT:
                        failed.append(dividing.refused(work.Kind.FAILED, f"{address}: {self._why_not(path)}"))
                except errors.WorkError as err:
                    failed.append(err)
            if failed:
                raise failed[0]

    def memory_use(self, address: PciAddress, cgroups: Sequence[str]) -> Mapping[str, limits.MemoryUse]:
        """See limits.Limiting."""
        there = [path for path in cgroups if self._is_there(path)]
        with self._session(address, "read the memory of cgroups"):
            gpu = self._nvml.limits_of(address)
            told = {path: gpu.memory_use(path) for path in there}
            return {path: use for path, use in told.items() if use is not None}

    def set_compute_mode(self, address: PciAddress, mode: limits.ComputeMode) -> limits.ComputeMode:
        """See limits.Limiting."""
        with self._session(address, f"set the compute mode to {mode}"):
            gpu = self._nvml.limits_of(address)
            before = gpu.compute_mode()
            if before is None:
                raise dividing.refused(work.Kind.NOT_SUPPORTED, f"{address}: the driver tells no compute mode")
            if before is not mode:
                gpu.set_compute_mode(mode)
                after = gpu.compute_mode()
                if after is not mode:
                    raise dividing.refused(
                        work.Kind.FAILED, f"{address}: the compute mode was set to {mode}, and the driver says {after}"
                    )
            return before

    def _is_there(self, path: str) -> bool:
        """Whether there is such a cgroup. Raises WorkError for a path that is none of a cgroup below the root."""
        below = path.removeprefix(f"{self._root}/")
        names = below.split("/")
        if path == below or {"", ".", ".."}.intersection(names) or "\0" in path or len(os.fsencode(path)) > _LONGEST:
            raise dividing.refused(work.Kind.NOT_SUPPORTED, f"{path[:200]!r} is no cgroup below {self._root}")
        place = self._root
        for name in names:
            place = f"{place}/{name}"
            try:
                mode = os.lstat(place).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as err:
                raise dividing.refused(work.Kind.FAILED, f"{place} cannot be looked at: {err.strerror}") from err
            if not stat.S_ISDIR(mode):
                raise dividing.refused(work.Kind.NOT_SUPPORTED, f"{place} is no folder, so {path} is no cgroup")
        return True

    def _why_not(self, path: str) -> str:
        """Why a cgroup has no limit that could be set."""
        if not Path(path).is_dir():
            return f"the cgroup {path} went away before it was limited"
        return (
            f"the cgroup {path} cannot be limited: the dmem controller is not handed down to it (+dmem in cgroup.subtree_control of "
            "every cgroup above it); enable it there, or have the driver count by itself (module option "
            'NVreg_RegistryDwords="RmMemacctMode=1")'
        )

    @contextlib.contextmanager
    def _session(self, address: PciAddress, doing: str) -> Iterator[None]:
        """A call: NVML's errors become WorkErrors."""
        try:
            dividing.open_session(self._nvml)
            yield
        except errors.SourceError as err:
            kind = dividing.KINDS.get(err.kind, work.Kind.FAILED)
            raise dividing.refused(kind, f"{address}: cannot {doing}: {err}") from err
        finally:
            self._nvml.close()


def _verify(address: PciAddress, path: str, limit: limits.MemoryLimit, use: limits.MemoryUse | None) -> None:
    if use is None or not limits.alike(limit, use.limit):
        told = "none" if use is None else f"{use.limit.soft} soft, {use.limit.hard} hard"
        raise dividing.refused(
            work.Kind.FAILED,
            f"{address}: the cgroup {path} was limited to {limit.soft} bytes soft, {limit.hard} hard, and the driver says {told}",
        )
