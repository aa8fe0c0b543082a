# SPDX-License-Identifier: Apache-2.0
"""The machines that come with Nearfield, as files: cheap to ask, as no document is read."""

from __future__ import annotations

from pathlib import Path

_MACHINES = Path(__file__).parent / "machines"


def names() -> tuple[str, ...]:
    """What `--mock` may name without a file."""
    return tuple(sorted(path.stem for path in _MACHINES.glob("*.yaml")))


def path(name: str) -> Path:
    """The document of a machine, whether it is there or not."""
    return _MACHINES / f"{name}.yaml"


def find(named: str, *, beside: Path) -> Path:
    """The document that another one names: a machine of the zoo, else a file, from the directory of `beside` on."""
    return path(named) if named in names() else beside.parent / named
