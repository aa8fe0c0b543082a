# SPDX-License-Identifier: Apache-2.0
"""A node with MPS: a driver root with the stand-in control program, a supervisor, its socket, and programs that use shares."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from discovery.mock import mpscontrol
from driver.mps import client, keeper, server, shares, shm, supervisor
from driver.prepare import rootfs

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
GIB = 1 << 30
QUICK = keeper.Pace(first=0.05, last=0.2, steady=3600.0, check=0.2)
PATIENCE_S = 60.0


def share(number: int = 1, **changes: Any) -> shares.Share:
    """A share of a device."""
    given: dict[str, Any] = {
        "device": "gpu-0",
        "uuid": UUID,
        "share_id": f"share-{number}",
        "protocol": shares.Protocol.V3,
        "memory": 20 * GIB,
        "compute": 25,
    }
    return shares.Share(**given | changes)


@dataclass
class Node:
    """`faults`: the file of faults of the stand-in."""

    directory: Path
    root: Path
    faults: Path
    pace: keeper.Pace = QUICK
    supervisor: supervisor.Supervisor | None = None
    server: server.Server | None = None
    clients: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        """A supervisor, as a new instance."""
        self.supervisor = supervisor.Supervisor(
            self.directory, rootfs.DriverRoot(Path("/"), mount=self.root), pace=self.pace, shm_at=shm.plain
        )
        self.supervisor.begin(threading.Event())
        self.server = server.Server(self.supervisor, self.directory)

    def stop(self) -> None:
        """End the supervisor and its daemons."""
        if self.server is not None:
            self.server.stop()
        if self.supervisor is not None:
            self.supervisor.stop()

    @property
    def client(self) -> client.Client:
        """A new client."""
        return client.Client(self.directory)

    def pipes(self, device: str = "gpu-0") -> Path:
        """The pipe folder of the daemon of a device."""
        return Path(shares.pipes(PurePosixPath(self.directory), device))

    def pid(self, device: str = "gpu-0") -> int:
        """The process of a control daemon."""
        return int((self.pipes(device) / "nvidia-cuda-mps-control.pid").read_text())

    def control(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the control program against the daemon of gpu-0."""
        return subprocess.run(
            [self.root / "usr/bin" / mpscontrol.CONTROL, *arguments],
            env={"CUDA_MPS_PIPE_DIRECTORY": str(self.pipes())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def use(self, of: shares.Share) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """A program in the container of a share, and what it gets."""
        environment = dict(shares.edits(PurePosixPath(self.directory), of).environment)
        process = subprocess.Popen(
            [sys.executable, "-m", "discovery.mock.mpsclient"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(mpscontrol.__file__).parents[2],
        )
        self.clients.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        return process, json.loads(line) if line else {}


@contextlib.contextmanager
def node(
    *, version: str = "615.71.09", devices: Sequence[str] = (UUID,), pace: keeper.Pace = QUICK, start: bool = True
) -> Iterator[Node]:
    """A node, gone with the block."""
    place = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    root = place / "root"
    made = Node(
        place / "run", root, mpscontrol.install(root, {"driverVersion": version, "devices": list(devices)}), pace
    )
    try:
        if start:
            made.start()
        yield made
    finally:
        for process in made.clients:
            process.kill()
            process.communicate()
        made.stop()
        shutil.rmtree(place, ignore_errors=True)
