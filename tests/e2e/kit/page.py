# SPDX-License-Identifier: Apache-2.0
"""The YAML of docs/claims.md, so that what users are shown is what is tried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.e2e.kit.api import Json

PAGE = Path(__file__).parents[3] / "docs/claims.md"
_WRONG = "# Wrong: "
_EXAMPLE = re.compile(r"\(\.\./deploy/examples/([a-z0-9-]+)\.yaml\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A YAML block."""

    line: int
    """Of the page, where it begins."""
    lines: tuple[str, ...]
    example: str | None
    """Name of the example that was linked last before it."""

    @property
    def wrong(self) -> str | None:
        """What is wrong with it; None where it is right."""
        return self.lines[0].removeprefix(_WRONG) if self.lines[0].startswith(_WRONG) else None


def blocks() -> tuple[Block, ...]:
    """All of the page, in its order."""
    found: list[Block] = []
    example: str | None = None
    inside: list[str] | None = None
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1):
        if line == "```" and inside is not None:
            found.append(Block(number - len(inside), tuple(inside), example))
            inside = None
        elif inside is not None:
            inside.append(line)
        elif line == "```yaml":
            inside = []
        elif names := _EXAMPLE.findall(line):
            example = names[-1]
    assert inside is None, "the last YAML block has no end"
    return tuple(found)


def linked() -> frozenset[str]:
    """The examples that the page links."""
    return frozenset(_EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))


def wrong(title: str) -> tuple[list[Json], Sequence[Json]]:
    """Requests and constraints of the block that says that this is wrong with it."""
    (block,) = (block for block in blocks() if block.wrong == title)
    devices = yaml.safe_load("\n".join(block.lines))
    assert devices.keys() <= {"requests", "constraints"}, title
    return devices["requests"], devices.get("constraints", ())
