# SPDX-License-Identifier: Apache-2.0
"""What a rendered machine was made from, as one word: the document, those it is based on, the products, and the code that expands
them.

The same word again means the same machine, so that a restart of an agent need not load what reads documents (pydantic and
YAML, half a second of CPU). Beside it stands the boot of the kernel under which that was, as hardware loses its MIG instances
when its node is booted.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from discovery.mock import live, shelf

FILE = "source.sha256"
BOOT_FILE = "boot_id"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_HERE = Path(__file__).parent
_BASE = re.compile(rb"^base:[ \t]*[\"']?([^\"'#\s]+)", re.MULTILINE)
_VARIANT = b"Variant"


def of(machine: str) -> str | None:
    """The word for a machine of the zoo or a file; None where it cannot be read, which is for others to say."""
    digest = hashlib.sha256()
    try:
        for data in _documents(machine):
            digest.update(hashlib.sha256(data).digest())
        for path in (_HERE / "products.yaml", *sorted(_HERE.glob("*.py"))):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    except (OSError, ValueError):
        return None
    return digest.hexdigest()


def _documents(machine: str) -> list[bytes]:
    """What stands in a document and in those it is based on. ValueError where that cannot be told without reading YAML."""
    path = shelf.path(machine) if machine in shelf.names() else Path(machine)
    read: dict[Path, bytes] = {}
    while path not in read:
        data = read[path] = path.read_bytes()
        if _VARIANT not in data:
            return list(read.values())
        base = _BASE.search(data)
        if base is None:
            raise ValueError(f"{path}: a Variant, or not, whose base does not stand on a line of its own")
        path = shelf.find(base[1].decode(), beside=path)
    raise ValueError(f"{path}: based on itself")


def stands(directory: Path, word: str | None) -> bool:
    """Whether a whole machine of that word is rendered in a directory."""
    try:
        return word is not None and (directory / FILE).read_text() == word and (directory / live.FILE).is_file()
    except (OSError, ValueError):
        return False


def put(directory: Path, word: str) -> None:
    """Say what a directory was rendered from, once it is. A word that cannot be written costs the next start some time."""
    temporary = directory / f"{FILE}.tmp"
    temporary.write_text(word)
    temporary.replace(directory / FILE)


def outlived(directory: Path) -> bool:
    """Whether a machine was rendered before the kernel that runs now was booted."""
    try:
        return (directory / BOOT_FILE).read_bytes() != _BOOT_ID.read_bytes()
    except OSError:
        return False


def put_boot(directory: Path) -> None:
    """Say under which boot of the kernel a machine was rendered, where that can be told."""
    with contextlib.suppress(OSError):
        (directory / BOOT_FILE).write_bytes(_BOOT_ID.read_bytes())
