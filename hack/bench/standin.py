# SPDX-License-Identifier: Apache-2.0
"""The stand-in API server as the environment of a run, in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from driver.errors import DriverError
from driver.standin import processes
from hack.bench import apiserver, drivers
from hack.bench.errors import BenchError

NODE = "bench"


class StandIn(apiserver.ApiServer):
    """Starts it, and ends it with the context. `directory` is made. An Environment."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        kubeconfig = directory / "kubeconfig"
        self._stack = ExitStack()
        try:
            started = processes.ApiServerProcess(self._stack, node_name=NODE, kubeconfig=kubeconfig)
        except DriverError as error:
            self._stack.close()
            raise BenchError(str(error)) from error
        super().__init__(apiserver.Address(url=started.url, token=started.token))
        self.server = self
        self.place = drivers.Place(kubeconfig=kubeconfig, peer_arguments=("-json",))

    def close(self) -> None:
        """End the process too."""
        super().close()
        self._stack.close()

    def writes(self) -> int:
        """How many writes it has taken since its start, of objects of any kind; dry ones are none."""
        return sum(self.call("GET", "/standin/counters")["writes"].values())

    def claim_reads(self) -> int:
        """How often a claim was read since its start."""
        return int(self.call("GET", "/standin/counters")["requests"].get("get resourceclaims", 0))
