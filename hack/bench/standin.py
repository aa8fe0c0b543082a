# SPDX-License-Identifier: Apache-2.0
"""The stand-in API server as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hack.bench import apiserver, drivers
from hack.bench.errors import BenchError

STOP_TIMEOUT_S = 20.0


class StandIn(apiserver.ApiServer):
    """Starts it, and ends it with the context. `directory` is made. An Environment."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        kubeconfig = directory / "kubeconfig"
        with (directory / "log").open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "driver.standin.apiserver", "--kubeconfig", str(kubeconfig)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        try:
            started = json.loads(line)
        except ValueError as error:
            self._popen.kill()
            raise BenchError(f"The stand-in API server did not start: {(directory / 'log').read_text()}") from error
        super().__init__(apiserver.Address(url=started["url"], token=started.get("token") or ""))
        self.server = self
        self.place = drivers.Place(kubeconfig=kubeconfig, peer_arguments=("-json",))

    def close(self) -> None:
        """End the process too."""
        super().close()
        self._popen.terminate()
        self._popen.wait(timeout=STOP_TIMEOUT_S)
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    def writes(self) -> int:
        """How many writes it has taken since its start, of objects of any kind; dry ones are none."""
        return sum(self.call("GET", "/standin/counters")["writes"].values())

    def claim_reads(self) -> int:
        """How often a claim was read since its start."""
        return int(self.call("GET", "/standin/counters")["requests"].get("get resourceclaims", 0))
