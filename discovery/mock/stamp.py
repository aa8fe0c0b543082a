# SPDX-License-Identifier: Apache-2.0
"""What a rendered machine was made from, as one word: the document, the products and the code that expands them.

The same word again means the same machine, so that a restart of an agent need not load what reads documents (pydantic and
YAML, half a second of CPU).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from discovery.mock import live

FILE = "source.sha256"

_HERE = Path(__file__).parent


def of(machine: str) -> str | None:
    """The word for a machine of the zoo or a file; None where it cannot be read, which is for others to say."""
    named = _HERE / "machines" / f"{machine}.yaml"
    document = named if "/" not in machine and named.is_file() else Path(machine)
    digest = hashlib.sha256()
    try:
        for path in (document, _HERE / "products.yaml", *sorted(_HERE.glob("*.py"))):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError:
        return None
    return digest.hexdigest()


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
