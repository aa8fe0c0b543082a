# SPDX-License-Identifier: Apache-2.0
"""The kernel's controller of device memory in the cgroups of a rendered tree: dmem.max, dmem.min and dmem.current, a line for each
region (Documentation/admin-guide/cgroup-v2.rst, "DMEM"), and dmem.capacity at the root.

A cgroup has the files if its parent hands the controller down. Protection counts only as far as every cgroup above reserves as
much, so who sets a reservation adds the difference to all of them that have the file (NVIDIA, "MPS v3 Memory Partitioning",
ancestor reservation propagation). One that is deleted leaves its part of that in its parents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from discovery.address import PciAddress
from discovery.mock.recording import Entry

CONTROLLER = "dmem"
CAPACITY = "dmem.capacity"
_MAX, _MIN, _CURRENT = "dmem.max", "dmem.min", "dmem.current"
_NONE = "max"


def region(gpu: PciAddress) -> str:
    """The name of the memory of a GPU."""
    return f"nvidia/{gpu}/vidmem"


def files(regions: list[str]) -> dict[str, str]:
    """The files of a cgroup that the controller was handed down to: name -> text."""
    return {
        name: "".join(f"{each} {value}\n" for each in regions)
        for name, value in ((_MAX, _NONE), (_MIN, "0"), ("dmem.low", "0"), (_CURRENT, "0"))
    }


def capacity(gpus: dict[PciAddress, int]) -> Entry:
    """dmem.capacity of the root."""
    return "".join(f"{region(gpu)} {size}\n" for gpu, size in sorted(gpus.items()))


def regions(root: Path) -> list[str]:
    """The regions of a hierarchy, by its root."""
    try:
        return [line.split(" ")[0] for line in (root / CAPACITY).read_text().splitlines()]
    except FileNotFoundError:
        return []


def limits(cgroup: Path, gpu: PciAddress) -> tuple[int, int | None] | None:
    """Reservation and limit of a cgroup; None where it has no files."""
    most, least = _value(cgroup / _MAX, gpu), _value(cgroup / _MIN, gpu)
    if most is None or least is None:
        return None
    return int(least), None if most == _NONE else int(most)


def used(cgroup: Path, gpu: PciAddress) -> int:
    """What a cgroup has."""
    return int(_value(cgroup / _CURRENT, gpu) or 0)


def limit(cgroup: Path, gpu: PciAddress, *, soft: int, hard: int | None) -> bool:
    """Set both; whether it has the files. Call it under a lock."""
    before = limits(cgroup, gpu)
    if before is None:
        return False
    _put(cgroup / _MAX, gpu, _NONE if hard is None else str(hard))
    _put(cgroup / _MIN, gpu, str(soft))
    for parent in _above(cgroup):
        held = limits(parent, gpu)
        assert held is not None
        _put(parent / _MIN, gpu, str(max(0, held[0] + soft - before[0])))
    return True


def charge(cgroup: Path, gpu: PciAddress, size: int) -> bool:
    """Let a cgroup have so much more, or less, which counts for all above it; whether their limits allow it."""
    every = [cgroup, *_above(cgroup)]
    for each in every:
        held = limits(each, gpu)
        if held is not None and held[1] is not None and used(each, gpu) + size > held[1]:
            return False
    for each in every:
        if limits(each, gpu) is not None:
            _put(each / _CURRENT, gpu, str(max(0, used(each, gpu) + size)))
    return True


def _above(cgroup: Path) -> Iterator[Path]:
    """The cgroups above, up to the first that has no files: the root, or a gap."""
    for parent in cgroup.parents:
        if not (parent / _MIN).is_file():
            return
        yield parent


def _lines(file: Path) -> dict[str, str]:
    try:
        return dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _value(file: Path, gpu: PciAddress) -> str | None:
    return _lines(file).get(region(gpu))


def _put(file: Path, gpu: PciAddress, value: str) -> None:
    """In place, as the kernel changes what a file says; a file that went away with its cgroup stays away."""
    lines = _lines(file) | {region(gpu): value}
    try:
        with file.open("r+", encoding="utf-8") as out:
            out.write("".join(f"{name} {each}\n" for name, each in lines.items()))
            out.truncate()
    except FileNotFoundError:
        return
