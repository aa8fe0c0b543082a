# SPDX-License-Identifier: Apache-2.0
"""`python -m discovery.mock.programs DIRECTORY MACHINE` writes a driver root: the folder in which an agent finds the programs of the
NVIDIA driver, here stand-ins that act on a rendered machine. Exit status 0, or 2 with a message on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from discovery.mock import live, mpscontrol

PROGRAMS: Mapping[str, str] = {"usr/bin/nvidia-smi": "discovery.mock.smi"}
"""Path in the driver root -> the module whose `main` stands in for it, with the folder of the machine as its first argument."""

_USAGE = "usage: python -m discovery.mock.programs DIRECTORY MACHINE"
_SOURCES = Path(__file__).resolve().parents[2]


def write(directory: Path, machine: Path) -> None:
    """Write all programs. Those that are there are replaced in one step: one may be running. Raises OSError."""
    for path, module in PROGRAMS.items():
        program = directory / path
        program.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = program.with_name(f".{program.name}.new")
        temporary.write_text(_script(module, machine))
        temporary.chmod(0o755)
        temporary.replace(program)
    mpscontrol.install(directory, machine / live.FILE)


def _script(module: str, machine: Path) -> str:
    """No shell: the image of the agent has none."""
    return (
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(_SOURCES)!r})\n"
        f"from {module} import main\nsys.exit(main([{str(machine.absolute())!r}, *sys.argv[1:]]))\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Writes the programs; the exit status."""
    if len(arguments) != 2:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    try:
        write(Path(arguments[0]), Path(arguments[1]))
    except OSError as err:
        sys.stderr.write(f"{arguments[0]}: {err.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
