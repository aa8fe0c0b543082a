# SPDX-License-Identifier: Apache-2.0
"""A program that uses a GPU by MPS, as far as the stand-in goes: `python -m discovery.mock.mpsclient` connects where CUDA would
(CUDA_MPS_PIPE_DIRECTORY), prints what it gets as one line of JSON, and stays until its input ends or its share does.

Exit status 0: its input ended; 3: it was terminated; 1: it was not let in, or there is no MPS, where a real program would go on
without.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from pathlib import Path

from discovery.mock import mpswire


def main() -> int:
    """Be a client; the exit status."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - CUDA's own default
    environment = {name: text for name, text in os.environ.items() if name.startswith("CUDA_MPS_")}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(folder / mpswire.SOCKET))
        except OSError as error:
            sys.stderr.write(f"No MPS at {folder}: {error}\n")
            return 1
        connection.sendall(json.dumps({"client": "mpsclient", "environment": environment}).encode() + b"\n")
        stream = connection.makefile("rb")
        line = stream.readline(mpswire.LINE_MAX)
        sys.stdout.write(line.decode() or "{}\n")
        sys.stdout.flush()
        if b'"error"' in line or not line:
            return 1
        while True:
            ready, _, _ = select.select([connection, sys.stdin.fileno()], [], [])
            if connection in ready and not connection.recv(1):
                return 3
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                return 0


if __name__ == "__main__":
    sys.exit(main())
