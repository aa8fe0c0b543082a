# SPDX-License-Identifier: Apache-2.0
"""The only opener of /sys and /proc. Paths are relative to their parent, `sys/...` and `proc/...`, and the two roots are
injectable, so that a mounted host, a rendered machine and this machine are read by the same code.

An attribute that is not there is None; so is one that the kernel refuses for now with EINVAL, ENODEV or ENXIO (the speed
of a link that is down, a device on its way out). Any other failure is a SourceError, and `Directory` turns it into a
Finding, so that one broken attribute costs one fact.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from discovery import errors, findings

MAX_FILE_BYTES = 256 * 1024
"""Attributes are at most a page, configuration space 4 KiB, a CPU list of the largest machine 64 KiB."""

_PAGE = 4096
"""sysfs gives an attribute that is shorter than a page in one read. procfs gives a list in pieces that end with a line, of any
length (fs/seq_file.c), and nothing tells that one is the last."""

MAX_CPUS = 65_536
"""More than any kernel is built for (CONFIG_NR_CPUS), so that a list with a wrong number cannot fill the memory."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: a FIFO in a made-up tree must not hold the probe."""

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODEV, errno.ENXIO}
_T = TypeVar("_T")

Reader = Callable[[int, int], bytes]
"""Reads from an offset as many bytes as asked for; fewer where the file ends, or where the reader may see no more."""

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}")
_MASK = re.compile(r"[0-9a-fA-F]+")
_CPU_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


class Sysfs:
    """Reads one machine's /sys and /proc. Stateless, so safe in several threads."""

    def __init__(self, *, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        self._sys = str(sys)
        self._proc = str(proc)

    @property
    def sys(self) -> Path:
        """The root that stands for /sys."""
        return Path(self._sys)

    @property
    def proc(self) -> Path:
        """The root that stands for /proc."""
        return Path(self._proc)

    def check_roots(self) -> None:
        """Raises a ProbeError that no repetition mends when a root is no directory."""
        for name, root in (("sys", self.sys), ("proc", self.proc)):
            if not root.is_dir():
                raise errors.ProbeError(f"{root} (for /{name}) is no directory; mount it there", retryable=False)

    def read(self, path: str, *, limit: int = MAX_FILE_BYTES) -> bytes | None:
        """The content of a file, of so many bytes at most."""
        name = self._place(path)
        try:
            descriptor = os.open(name, _FLAGS)
            try:
                # Room for more than a page costs eight times what the read itself does.
                data = os.read(descriptor, _PAGE)
                if len(data) >= _PAGE or not path.startswith("sys/"):
                    data = self._rest(descriptor, bytearray(data), path, limit)
            finally:
                os.close(descriptor)
        except OSError as err:
            _raise_unless_absent(path, err)
            return None
        return data

    def pieces(self, path: str, take: Callable[[Reader], _T]) -> _T | None:
        """What `take` makes of a file by reading pieces of it: every word of configuration space that is read is asked of the
        device, and all of it takes a millisecond.
        """
        try:
            descriptor = os.open(self._place(path), _FLAGS)
            try:
                return take(lambda offset, size: os.pread(descriptor, size, offset))
            finally:
                os.close(descriptor)
        except OSError as err:
            _raise_unless_absent(path, err)
            return None

    def text(self, path: str) -> str | None:
        """The content of a file of text, without white space around it."""
        data = self.read(path)
        if data is None:
            return None
        try:
            return data.decode().strip()
        except UnicodeDecodeError as err:
            raise _malformed(path, "is no text") from err

    def number(self, path: str) -> int | None:
        """A decimal number."""
        text = self.text(path)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            raise _malformed(path, f"holds {text[:40]!r}, not a number")
        return int(text)

    def hexadecimal(self, path: str, bits: int) -> int | None:
        """A number of so many bits that the kernel writes as 0x...."""
        text = self.text(path)
        if text is None:
            return None
        if not _HEX.fullmatch(text) or int(text, 16) >> bits:
            raise _malformed(path, f"holds {text[:40]!r}, not a hexadecimal number of {bits} bits")
        return int(text, 16)

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        """A list of CPUs or nodes as the kernel prints a bitmap (`0-3,8`); the empty list is known to be empty."""
        text = self.text(path)
        if text is None:
            return None
        try:
            return parse_list(text)
        except ValueError as err:
            raise _malformed(path, f"holds {text[:40]!r}, not a list of numbers") from err

    def cpu_mask(self, path: str) -> tuple[int, ...] | None:
        """A bitmap of CPUs as the kernel prints it: hexadecimal words with commas between, the highest CPU first."""
        text = self.text(path)
        if text is None:
            return None
        digits = text.replace(",", "")
        if not _MASK.fullmatch(digits) or len(digits) > MAX_CPUS // 4:
            raise _malformed(path, f"holds {text[:40]!r}, not a bitmap")
        mask = int(digits, 16)
        return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)

    def link(self, path: str) -> str | None:
        """The target of a symbolic link, as it stands there."""
        try:
            target = os.readlink(self._place(path))  # noqa: PTH115 - the target as text, whatever it is
        except OSError as err:
            _raise_unless_absent(path, err)
            return None
        if not _is_text(target):
            raise _malformed(path, "points to a name that is no text")
        return target

    def names(self, path: str) -> tuple[str, ...]:
        """The sorted names in a directory, those that are no text left out; none where there is no directory."""
        try:
            listing = os.listdir(self._place(path))  # noqa: PTH208 - names are all that is needed
        except OSError as err:
            _raise_unless_absent(path, err)
            return ()
        return tuple(sorted(filter(_is_text, listing)))

    def boot_id(self) -> str | None:
        """The identity of this boot of the kernel."""
        return self.text("proc/sys/kernel/random/boot_id")

    def _rest(self, descriptor: int, data: bytearray, path: str, limit: int) -> bytes:
        """A file that is longer than a page, or that the kernel gives in pieces."""
        while more := os.read(descriptor, MAX_FILE_BYTES):
            data += more
            if len(data) > limit:
                raise _malformed(path, f"is longer than {limit} bytes")
        return bytes(data)

    def _place(self, path: str) -> str:
        return self._sys + path[3:] if path.startswith("sys/") else self._proc + path[4:]


class Directory:
    """A directory whose attributes may each be missing or broken: what cannot be read is noted as a Finding on `subject`
    and reads as None.
    """

    __slots__ = ("_found", "_sysfs", "path", "subject")

    def __init__(self, sysfs: Sysfs, path: str, *, subject: object, found: findings.Findings) -> None:
        self._sysfs = sysfs
        self.path = path
        self.subject = subject
        self._found = found

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path.rpartition("/")[2]

    def text(self, name: str) -> str | None:
        """A line of text; None also where it is empty."""
        return self._noted(self._sysfs.text, name) or None

    def number(self, name: str) -> int | None:
        """A decimal number."""
        return self._noted(self._sysfs.number, name)

    def hexadecimal(self, name: str, bits: int) -> int | None:
        """A number of so many bits that the kernel writes as 0x...."""
        return self._noted(lambda path: self._sysfs.hexadecimal(path, bits), name)

    def cpu_list(self, name: str) -> tuple[int, ...] | None:
        """A list of CPUs."""
        return self._noted(self._sysfs.cpu_list, name)

    def cpu_mask(self, name: str) -> tuple[int, ...] | None:
        """A bitmap of CPUs."""
        return self._noted(self._sysfs.cpu_mask, name)

    def read(self, name: str) -> bytes | None:
        """Raw bytes."""
        return self._noted(self._sysfs.read, name)

    def pieces(self, name: str, take: Callable[[Reader], _T]) -> _T | None:
        """What `take` makes of pieces of a file."""
        return self._noted(lambda path: self._sysfs.pieces(path, take), name)

    def link(self, name: str) -> str | None:
        """The target of a link, as it stands there."""
        return self._noted(self._sysfs.link, name)

    def link_name(self, name: str) -> str | None:
        """The last component of a link's target: the name of a driver, the number of an IOMMU group."""
        target = self.link(name)
        return None if target is None else target.rstrip("/").rpartition("/")[2] or None

    def names(self, name: str | None = None) -> tuple[str, ...]:
        """The names in it, or in a directory below."""
        return self._noted(self._sysfs.names, name) or ()

    def below(self, name: str) -> Directory:
        """A directory below, with the same subject."""
        return Directory(self._sysfs, f"{self.path}/{name}", subject=self.subject, found=self._found)

    def _noted(self, read: Callable[[str], _T], name: str | None) -> _T | None:
        try:
            return read(self.path if name is None else f"{self.path}/{name}")
        except errors.SourceError as err:
            self._found.failed(self.subject, err)
            return None


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers in a list as the kernel prints a bitmap. Raises ValueError."""
    numbers: set[int] = set()
    for part in text.split(",") if text else ():
        match = _CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part[:40]!r} is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= MAX_CPUS:
            raise ValueError(f"{part[:40]!r} is no range of CPUs")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def _malformed(path: str, what: str) -> errors.SourceError:
    return errors.SourceError("sysfs", errors.MALFORMED, f"/{path} {what}")


def _is_text(name: str) -> bool:
    """Whether a name came as UTF-8: bytes that are not come as lone surrogates, which no document can hold."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _raise_unless_absent(path: str, err: OSError) -> None:
    if err.errno in _ABSENT:
        return
    kind = errno.errorcode.get(err.errno or 0, "unreadable").lower()
    raise errors.SourceError("sysfs", kind, f"/{path} cannot be read: {err.strerror}", path=path) from err
