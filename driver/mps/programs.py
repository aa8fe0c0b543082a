# SPDX-License-Identifier: Apache-2.0
"""Programs of the driver root: where they are, how they are run, and what nvidia-cuda-mps-control can do.

A program is run inside the driver root where that has what its first bytes ask for, the dynamic loader of an ELF file (PT_INTERP,
System V ABI) or the interpreter of a script: then it finds the C library and the driver beside which it was installed. A root that
has nothing but the driver (Container-Optimized OS) has no loader; its programs run here, with its libraries.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from driver.mps import launch, running
from driver.mps.shares import Protocol

CONTROL = "nvidia-cuda-mps-control"

MULTIUSER = "-multiuser-server"
"""Lets the server of legacy MPS serve every user (MPS documentation, Architecture, Provisioning Sequence)."""

LOOK_S = 5.0

_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/nvidia/bin")
_LIBRARIES = (
    "/lib64",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
)
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_MAGIC_64_LE = b"\x7fELF\x02\x01"
_PT_INTERP = 3
_SEGMENTS_MAX = 64
_INTERPRETER_MAX = 255
_PROGRAM_MAX_BYTES = 64 << 20

_MODULES = (re.compile(r"\bserver\b"), re.compile(r"\bnamespace\b"))
_MULTIUSER_FLAG = re.compile(r"--multiuser[a-z-]*")


class Root(typing.Protocol):
    """The driver root, with links followed inside of it (driver.prepare.rootfs)."""

    mount: Path

    def file(self, inside: str) -> str | None:
        """The resolved path of a regular file."""

    def directory(self, inside: str) -> str | None:
        """The resolved path of a folder."""

    def seen(self, inside: str) -> Path:
        """Where we see a resolved path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the driver root. `path`: inside that; `seen`: as we see it; `root`: the root that it is run in, None: ours."""

    path: str
    seen: Path
    root: Path | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(
        self,
        *arguments: str,
        parent: int | None = None,
        visible: Sequence[Path] = (),
        shm: Path | None = None,
    ) -> list[str]:
        """What to run. `parent`: it ends with this process (with that thread of it which starts it); `visible`: folders that it must
        see at their paths; `shm`: its /dev/shm.
        """
        wanted: dict[str, object] = {}
        if self.root is not None:
            wanted |= {"root": str(self.root), "visible": [str(path) for path in visible]}
        if parent is not None:
            wanted["parent"] = parent
        if shm is not None:
            wanted["shm"] = str(shm)
        program = str(self.seen) if self.root is None else self.path
        if not wanted:
            return [program, *arguments]
        return [sys.executable, "-I", "-S", launch.__file__, json.dumps(wanted), program, *arguments]


def find(root: Root, name: str) -> Program | None:
    """A program of the driver root, None where it has none of that name that may be run."""
    for folder in _FOLDERS:
        path = root.file(f"{folder}/{name}")
        if path is not None and os.access(root.seen(path), os.X_OK):
            return _program(root, path)
    return None


def _program(root: Root, path: str) -> Program:
    seen = root.seen(path)
    if root.mount == Path("/"):
        return Program(path=path, seen=seen, root=None, environment={"PATH": _PATH})
    interpreter = _interpreter(seen)
    if interpreter is not None and root.file(interpreter) is not None:
        return Program(path=path, seen=seen, root=root.mount, environment={"PATH": _PATH})
    libraries = [str(root.seen(folder)) for place in _LIBRARIES if (folder := root.directory(place)) is not None]
    return Program(
        path=path,
        seen=seen,
        root=None,
        environment={"PATH": f"{seen.parent}:{_PATH}", "LD_LIBRARY_PATH": ":".join(dict.fromkeys(libraries))},
    )


def _interpreter(path: Path) -> str | None:
    """What the kernel starts first to run a file; None where it names nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        first = os.pread(fd, _HEADER.size, 0)
        if first.startswith(b"#!"):
            words = os.pread(fd, _INTERPRETER_MAX, 0).partition(b"\n")[0][2:].split()
            return os.fsdecode(words[0]) if words else None
        return _loader(fd, first)
    except OSError:
        return None
    finally:
        os.close(fd)


def _loader(fd: int, first: bytes) -> str | None:
    if len(first) < _HEADER.size or not first.startswith(_MAGIC_64_LE):
        return None
    fields = _HEADER.unpack(first)
    offset, size, count = fields[5], fields[9], fields[10]
    if size != _SEGMENT.size or count > _SEGMENTS_MAX or offset >= 1 << 62:
        return None
    table = os.pread(fd, size * count, offset)
    for place in range(0, len(table) - size + 1, size):
        kind, _, start, _, _, length, _, _ = _SEGMENT.unpack_from(table, place)
        if kind == _PT_INTERP and length <= _INTERPRETER_MAX + 1 and start < 1 << 62:
            return os.fsdecode(os.pread(fd, length, start).rstrip(b"\0")) or None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """nvidia-cuda-mps-control, and what it can do. `multiuser`: the option for each protocol that lets clients of every user in; without
    it only those of the user who runs the daemon are served.
    """

    program: Program
    version: str | None
    protocols: frozenset[Protocol]
    multiuser: Mapping[Protocol, str]
    reasons: Mapping[Protocol, str]


def look(program: Program, *, timeout_s: float = LOOK_S) -> Control:
    """What a control program can do: by the help of MPS v3, which lists the modules of that interface, and by its version."""
    reasons: dict[Protocol, str] = {}
    multiuser: dict[Protocol, str] = {}
    usage = _ask(program, "-p", "3", "-h", timeout_s=timeout_s)
    protocols = {Protocol.LEGACY}
    if isinstance(usage, running.RunningError):
        reasons[Protocol.V3] = f"{program.path} -p 3 -h did not tell whether it knows MPS v3: {usage}"
    elif all(module.search(usage.out + usage.err) for module in _MODULES):
        protocols.add(Protocol.V3)
        flag = _MULTIUSER_FLAG.search(usage.out + usage.err)
        if flag is not None:
            multiuser[Protocol.V3] = flag.group()
    else:
        reasons[Protocol.V3] = f"{program.path} does not know MPS v3, which came with driver 615: update the driver"
    if _names(program, MULTIUSER):
        multiuser[Protocol.LEGACY] = MULTIUSER
    return Control(
        program=program,
        version=_version(program, timeout_s=timeout_s),
        protocols=frozenset(protocols),
        multiuser=multiuser,
        reasons=reasons,
    )


def _version(program: Program, *, timeout_s: float) -> str | None:
    told = _ask(program, "-v", timeout_s=timeout_s)
    if isinstance(told, running.RunningError) or told.status != 0:
        return None
    return running.one_line(told.out.strip().partition("\n")[0]) or None


def _ask(program: Program, *arguments: str, timeout_s: float) -> running.Result | running.RunningError:
    try:
        return running.run(program.command(*arguments), environment=program.environment, timeout_s=timeout_s)
    except running.RunningError as error:
        return error


def _names(program: Program, option: str) -> bool:
    """Whether the file of a program has the name of an option in it: legacy MPS has no help to ask."""
    try:
        with program.seen.open("rb") as file:
            return option.encode() in file.read(_PROGRAM_MAX_BYTES)
    except OSError:
        return False


def why_none(root: Root) -> str:
    """Why there is no MPS at all, and what would help."""
    return (
        f"{CONTROL} is not in the driver root {root.mount} (looked in {', '.join(map(str, map(PurePosixPath, _FOLDERS)))}): install"
        " the driver's compute utilities, and see --driver-root and --driver-root-mount"
    )
