# SPDX-License-Identifier: Apache-2.0
r"""The Recording: every file of sysfs, procfs and /dev that discovery may read on a node, and the state behind NVML.

    {"apiVersion": "mock.nearfield.dev/v1alpha1", "kind": "Recording", "name": "...", "description": "...",
     "files": {"sys/bus/pci/devices/0000:1b:00.0": {"link": "../../../devices/pci0000:15/..."},
               "sys/devices/pci0000:15/.../vendor": "0x10de\n", ".../config": {"base64": "3hAwIw=="}},
     "nvml": {"system": {...}, "gpus": [...]}, "faults": [...]}

`nvml` is absent where no NVIDIA driver is loaded. A Recording may come from anywhere: its paths cannot leave the
directory it is rendered into (no `..` but at the beginning of a link, nothing below a link), and it is bounded in size.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discovery import codec
from discovery.errors import DocumentError
from discovery.mock import fault as faultmodel
from discovery.mock import state

API_VERSION = "mock.nearfield.dev/v1alpha1"
KIND = "Recording"

MAX_BYTES = 64 << 20
"""No Recording is larger, unpacked. A node with 16 GPUs and 384 CPUs makes about 1 MiB."""

ROOTS = ("sys", "proc", "dev")

_MAX_PATH = 1024
_MAX_NAME = 255
_USUAL_PATH = re.compile(r"(?:sys|proc|dev)(?:/(?!\.\.?(?:/|$))[A-Za-z0-9:._-]{1,255})+")
"""Nearly all of the thousands of paths, accepted at once."""

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link; the target is relative to the link's directory, as in sysfs."""

    target: str


Entry = str | bytes | Link
"""A text file, a binary file or a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded or expanded machine. One that can escape its directory cannot be made: DocumentError names the path."""

    name: str
    description: str = ""
    files: Mapping[str, Entry]
    nvml: state.Nvml | None = None
    faults: tuple[faultmodel.Fault, ...] = ()

    def __post_init__(self) -> None:
        for problem in path_problems(self.files):
            raise DocumentError(f"Recording {self.name}: {problem}")
        for number, fault in enumerate(self.faults):
            for place, problem in faultmodel.problems(fault):
                raise DocumentError(f"Recording {self.name}: faults[{number}].{place}: {problem}")


def path_problems(files: Mapping[str, Entry]) -> Iterator[str]:
    """Why files could be written outside of their directory, or not at all."""
    directories: dict[str, str] = {}
    for path, entry in files.items():
        yield from _name_problems(path)
        if isinstance(entry, Link):
            yield from _link_problems(path, entry.target)
        parent = posixpath.dirname(path)
        while parent and parent not in directories:
            directories[parent] = path
            parent = posixpath.dirname(parent)
    for directory in directories.keys() & files.keys():
        what = "a link" if isinstance(files[directory], Link) else "a file"
        yield f"files[{directory!r}] is {what} and cannot have {directories[directory]!r} below it"


def _name_problems(path: str) -> Iterator[str]:
    if _USUAL_PATH.fullmatch(path) and len(path) <= _MAX_PATH:
        return
    parts = path.split("/")
    if len(parts) < 2 or parts[0] not in ROOTS:
        yield f"files[{_short(path)}]: a path begins with one of {', '.join(root + '/' for root in ROOTS)}"
    elif any(part in ("", ".", "..") for part in parts) or "\0" in path:
        yield f"files[{_short(path)}]: a path has no empty, '.' or '..' component"
    elif not _is_text(path) or len(path) > _MAX_PATH or any(len(part) > _MAX_NAME for part in parts):
        yield f"files[{_short(path)}]: no file can have this name"


def _link_problems(path: str, target: str) -> Iterator[str]:
    parts = target.split("/")
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    rest = parts[climbs:]
    if (
        any(part in ("", ".", "..") for part in rest)
        or "\0" in target
        or not _is_text(target)
        or len(target) > _MAX_PATH
    ):
        yield f"files[{_short(path)}]: link to {_short(target)}: a target is relative, with '..' only at its beginning"
    elif climbs > path.count("/") or (climbs == path.count("/") and rest[:1] and rest[0] not in ROOTS):
        yield f"files[{_short(path)}]: link to {_short(target)} leads out of the recording"


def _is_text(name: str) -> bool:
    if name.isascii():
        return True
    try:
        return len(name.encode()) <= _MAX_NAME
    except UnicodeEncodeError:
        return False


def _short(text: str) -> str:
    return ascii(text if len(text) <= 120 else text[:117] + "...")


def to_json(recording: Recording) -> dict[str, Any]:
    """The document of a Recording, files in order of their paths."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": recording.name,
        "description": recording.description,
        "nvml": codec.encode(recording.nvml),
        "faults": codec.encode(recording.faults),
        "files": {path: _encode(recording.files[path]) for path in sorted(recording.files)},
    }


def from_json(obj: object, *, name: str) -> Recording:
    """The Recording of a document. `name` is for messages. Raises DocumentError with the place."""
    if not isinstance(obj, dict):
        raise DocumentError(f"{name}: not a JSON object")
    if (obj.get("apiVersion"), obj.get("kind")) != (API_VERSION, KIND):
        raise DocumentError(f"{name}: expected apiVersion {API_VERSION} and kind {KIND}")
    known = {"apiVersion", "kind", "name", "description", "files", "nvml", "faults"}
    for key in obj.keys() - known:
        raise DocumentError(f"{name}: unknown field {_short(key)}; known are {', '.join(sorted(known))}")
    files = obj.get("files")
    if not isinstance(files, dict):
        raise DocumentError(f"{name}: files: expected an object")
    nvml = obj.get("nvml")
    faults: tuple[faultmodel.Fault, ...] = tuple(
        codec.decode(faultmodel.Fault, item, place=f"{name}: faults[{number}]")
        for number, item in enumerate(_list(obj.get("faults"), f"{name}: faults"))
    )
    try:
        return Recording(
            name=codec.decode(str, obj.get("name"), place=f"{name}: name"),
            description=codec.decode(str, obj.get("description", ""), place=f"{name}: description"),
            files={path: _decode(entry, f"{name}: files[{_short(path)}]") for path, entry in files.items()},
            nvml=None if nvml is None else codec.decode(state.Nvml, nvml, place=f"{name}: nvml"),
            faults=faults,
        )
    except UnicodeEncodeError as err:
        raise DocumentError(f"{name}: a path or a file has a lone surrogate") from err


def _list(obj: object, place: str) -> list[object]:
    if obj is None:
        return []
    if not isinstance(obj, list):
        raise DocumentError(f"{place}: expected a list")
    return obj


def _encode(entry: Entry) -> object:
    match entry:
        case str():
            return entry
        case bytes():
            return {"base64": base64.b64encode(entry).decode("ascii")}
        case Link():
            return {"link": entry.target}


def _decode(obj: object, place: str) -> Entry:
    match obj:
        case str():
            obj.encode()
            return obj
        case {"base64": str(text), **more} if not more:
            try:
                return base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError) as err:
                raise DocumentError(f"{place}: not base64") from err
        case {"link": str(target), **more} if not more:
            target.encode()
            return Link(target)
        case _:
            raise DocumentError(f'{place}: expected text, {{"base64": ...}} or {{"link": ...}}')


def dump(recording: Recording) -> bytes:
    """The document as bytes, always the same for the same Recording; one line a file, so that two can be compared."""
    document = to_json(recording)
    write = json.JSONEncoder(ensure_ascii=False).encode
    files = ",\n".join(f"{write(path)}: {write(entry)}" for path, entry in document.pop("files").items())
    return f'{write(document)[:-1]},\n"files": {{\n{files}\n}}}}\n'.encode()


def load(data: bytes, *, name: str) -> Recording:
    """The Recording in some bytes, gzipped or not. Raises DocumentError; never unpacks more than MAX_BYTES."""
    if data[:2] == _GZIP_MAGIC:
        data = _unpack(data, name)
    if len(data) > MAX_BYTES:
        raise DocumentError(f"{name}: larger than {MAX_BYTES >> 20} MiB, which no Recording is")
    try:
        obj = json.loads(data)
    except UnicodeDecodeError as err:
        raise DocumentError(f"{name}: not UTF-8 (byte {err.start})") from err
    except json.JSONDecodeError as err:
        raise DocumentError(f"{name}:{err.lineno}: not JSON: {err.msg}") from err
    except (RecursionError, ValueError) as err:
        raise DocumentError(f"{name}: not JSON that a Recording could be: {err}") from err
    return from_json(obj, name=name)


def read(path: Path) -> Recording:
    """The Recording in a file. Raises DocumentError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as err:
        raise DocumentError(f"{path}: cannot be read: {err}") from err
    return load(data, name=str(path))


def _unpack(data: bytes, name: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as err:
        raise DocumentError(f"{name}: damaged gzip: {err}") from err


class Tree:
    """Questions to the files of a Recording that several modules ask."""

    def __init__(self, files: Mapping[str, Entry]) -> None:
        self.files = files
        self._targets: dict[str, str] | None = None

    def resolve(self, path: str) -> str | None:
        """Where the link at a path leads, lexically, or None where there is no link."""
        entry = self.files.get(path)
        if not isinstance(entry, Link):
            return None
        return posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))

    def function(self, pci: object) -> str | None:
        """The directory of a PCI function."""
        return self.resolve(f"sys/bus/pci/devices/{pci}")

    def below(self, directory: str) -> tuple[str, ...]:
        """The paths below a directory."""
        prefix = directory + "/"
        return tuple(path for path in self.files if path.startswith(prefix))

    def links_into(self, directory: str) -> tuple[str, ...]:
        """The links that lead to a directory or below it, from outside of it."""
        if self._targets is None:
            self._targets = {path: self.resolve(path) or "" for path, e in self.files.items() if isinstance(e, Link)}
        prefix = directory + "/"
        return tuple(
            path
            for path, target in self._targets.items()
            if (target == directory or target.startswith(prefix)) and not path.startswith(prefix)
        )

    def text(self, path: str) -> str | None:
        """The stripped content of a text file, or None."""
        entry = self.files.get(path)
        return entry.strip() if isinstance(entry, str) else None
