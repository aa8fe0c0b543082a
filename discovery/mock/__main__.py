# SPDX-License-Identifier: Apache-2.0
"""`python -m discovery.mock MACHINE DIRECTORY` renders a machine, in a process of its own: what reads documents of people
is large and slow to load, and nobody needs it afterwards. A machine that stands there already stays as it is. Exit status 0, or 2 with a message for a
person on stderr. One that was put there before the node was booted is put there anew: instances and faults do not outlive that.

With --end-with-stdin it ends, with status 1, as soon as its standard input does: whoever started it is gone then, and a
machine that goes on growing would be in the way of the next one, or of somebody who clears up.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from discovery.errors import DocumentError
from discovery.mock import live, stamp

_USAGE = "usage: python -m discovery.mock [--end-with-stdin] MACHINE|FILE DIRECTORY"
_END_WITH_STDIN = "--end-with-stdin"


def main(arguments: Sequence[str]) -> int:
    """Renders the machine; the exit status."""
    if arguments[:1] == [_END_WITH_STDIN]:
        arguments = arguments[1:]
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    if len(arguments) != 2:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    machine, directory = arguments[0], Path(arguments[1])
    word = stamp.of(machine)
    if stamp.outlived(directory):
        (directory / live.FILE).unlink(missing_ok=True)
    if stamp.stands(directory, word):
        return 0
    from discovery.mock import render, zoo  # noqa: PLC0415 - slow to load, and not needed for what stands

    try:
        render.render(zoo.load(machine), directory)
        stamp.put_boot(directory)
        if word is not None:
            stamp.put(directory, word)
    except DocumentError as err:
        sys.stderr.write(f"{err}\n")
        return 2
    except OSError as err:
        sys.stderr.write(f"{directory}: {err.strerror}\n")
        return 2
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
