# SPDX-License-Identifier: Apache-2.0
"""Memory limits of cgroups as the driver of a rendered machine keeps them.

With `dmem` they stand in the files of the rendered tree (dmem.py). With `misc` the driver counts by itself, by the nearest cgroup
that has a limit; and so it does for any hierarchy outside of the tree, of which it only looks whether the folder is there: a real
one is never written to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import stat
from dataclasses import dataclass
from pathlib import Path

from discovery.address import PciAddress
from discovery.mock import abi, dmem, live, mighardware, state
from discovery.mock.status import StatusError

_TREE = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the driver says of a cgroup, in bytes."""

    soft: int
    hard: int | None
    used: int


def told(hand: mighardware.Hand, accounting: str, gpu: state.Gpu, path: str) -> Told:
    """The limit of a cgroup, else the nearest one above it. NVML_ERROR_NOT_FOUND where it is not there."""
    cgroup, by_kernel = _cgroup(hand.directory, accounting, path)
    if by_kernel:
        with hand.locked():
            for each in (cgroup, *cgroup.parents):
                found = dmem.limits(each, gpu.pci)
                if found is not None:
                    return Told(soft=found[0], hard=found[1], used=dmem.used(each, gpu.pci))
    else:
        for each in (cgroup, *cgroup.parents):
            kept = _kept(hand.directory, gpu, each)
            if kept is not None and (kept.soft or kept.hard is not None or each == cgroup):
                return Told(soft=kept.soft, hard=kept.hard, used=kept.used)
    return Told(soft=0, hard=None, used=0)


def limit(hand: mighardware.Hand, accounting: str, pci: PciAddress, path: str, *, soft: int, hard: int | None) -> None:
    """Set the limit of a cgroup. NVML_ERROR_NOT_FOUND where it is not there, or has no files of the controller."""
    cgroup, by_kernel = _cgroup(hand.directory, accounting, path)

    def rule(now: state.Gpu) -> tuple[state.Gpu, None]:
        return _with(
            hand.directory,
            now,
            dataclasses.replace(
                _kept(hand.directory, now, cgroup) or _new(hand.directory, cgroup), soft=soft, hard=hard
            ),
        ), None

    if not by_kernel:
        hand.change(pci, rule)
        return
    with hand.locked():
        if not dmem.limit(cgroup, pci, soft=soft, hard=hard):
            raise StatusError(abi.NOT_FOUND)


def charge(directory: Path, pci: PciAddress, path: str, size: int) -> bool:
    """Let programs of a cgroup have so many bytes more of a GPU, or fewer; False where its limit does not allow it, as for any
    allocation of theirs. Raises StatusError where there is no such GPU or cgroup.
    """
    file = live.LiveFile(directory)
    nvml = file.read().nvml
    accounting = None if nvml is None else nvml.system.memory_accounting
    if accounting is None:
        raise StatusError(abi.NOT_SUPPORTED)
    cgroup, by_kernel = _cgroup(directory, accounting, path)

    def rule(now: state.Gpu) -> tuple[state.Gpu, bool]:
        each = next(
            (kept for up in (cgroup, *cgroup.parents) if (kept := _kept(directory, now, up)) is not None),
            _new(directory, cgroup),
        )
        if each.hard is not None and each.used + size > each.hard:
            return now, False
        return _with(directory, now, dataclasses.replace(each, used=max(0, each.used + size))), True

    if by_kernel:
        with file.locked():
            return dmem.charge(cgroup, pci, size)
    return mighardware.Hand(directory, file).change(pci, rule)


def _cgroup(directory: Path, accounting: str, path: str) -> tuple[Path, bool]:
    """The folder of a cgroup, and whether the kernel counts there."""
    tree = (directory / _TREE).resolve()
    cgroup = Path(path).resolve()
    if not cgroup.is_dir():
        raise StatusError(abi.NOT_FOUND)
    return cgroup, accounting == dmem.CONTROLLER and cgroup.is_relative_to(tree)


def _kept(directory: Path, gpu: state.Gpu, cgroup: Path) -> state.CgroupMemory | None:
    """What is kept of a cgroup; that of a folder of the same name that is gone is not of this one."""
    path = str(cgroup)
    for each in gpu.cgroups:
        if each.path == path:
            return each if _is(each, _folder(directory, path)) else None
    return None


def _new(directory: Path, cgroup: Path) -> state.CgroupMemory:
    folder = _folder(directory, str(cgroup))
    if folder is None:
        raise StatusError(abi.NOT_FOUND)
    return state.CgroupMemory(path=str(cgroup), device=folder[0], inode=folder[1], made=folder[2])


def _with(directory: Path, gpu: state.Gpu, cgroup: state.CgroupMemory) -> state.Gpu:
    """With one, and without those whose folders are gone."""
    others = (each for each in gpu.cgroups if each.path != cgroup.path and _is(each, _folder(directory, each.path)))
    kept = (cgroup,) if cgroup.soft or cgroup.hard is not None or cgroup.used else ()
    return dataclasses.replace(gpu, cgroups=(*others, *kept))


def _is(cgroup: state.CgroupMemory, folder: tuple[int, int, int] | None) -> bool:
    return (cgroup.device, cgroup.inode, cgroup.made) == folder


def _folder(directory: Path, path: str) -> tuple[int, int, int] | None:
    """What tells a folder from every other one; None where there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return None
    made = 0
    if Path(path).is_relative_to((directory / _TREE).resolve()):
        with contextlib.suppress(OSError):
            made = Path(path, "cgroup.procs").stat().st_mtime_ns
    return found.st_dev, found.st_ino, made
