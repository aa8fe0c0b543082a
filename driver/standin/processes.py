# SPDX-License-Identifier: Apache-2.0
"""The stand-ins as processes of their own, and how to talk to them. They end with the stack that they are given."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from driver.errors import DriverError

CALL_S = 60.0
STOP_S = 5.0


class ApiServerProcess:
    """The stand-in API server, as a process."""

    def __init__(self, stack: contextlib.ExitStack, *, node_name: str, kubeconfig: Path) -> None:
        process = stack.enter_context(
            run_process(
                [
                    sys.executable,
                    "-m",
                    "driver.standin.apiserver",
                    "--kubeconfig",
                    str(kubeconfig),
                    "--node",
                    node_name,
                ],
                stdout=subprocess.PIPE,
            )
        )
        hello = json.loads(_first_line(process))
        self.url: str = hello["url"]
        self.token: str = hello["token"]

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One request."""
        request = urllib.request.Request(  # noqa: S310 - our own stand-in
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as response:  # noqa: S310
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise DriverError(f"{method} {path}: {error.read().decode(errors='replace')}") from error
        return answer


class KubeletProcess:
    """The stand-in kubelet as a process: commands go in, answers come out."""

    def __init__(
        self, stack: contextlib.ExitStack, kubelet_dir: Path, *, api: ApiServerProcess, node_name: str, driver: str
    ) -> None:
        self._driver = driver
        self._process = stack.enter_context(
            run_process(
                [
                    *(sys.executable, "-m", "driver.standin.kubelet_commands"),
                    *("--kubelet-dir", str(kubelet_dir)),
                    *("--api-server", api.url),
                    f"--token={api.token}",  # it may begin with a dash
                    *("--node-name", node_name),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        _first_line(self._process)

    def ask(self, operation: str, **arguments: object) -> Any:
        """One command, and what came of it. Raises DriverError."""
        assert self._process.stdin is not None
        line = json.dumps({"id": 1, "op": operation, "driver": self._driver, **arguments})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(_first_line(self._process))
        if not answer["ok"]:
            raise DriverError(f"The stand-in kubelet: {answer['error']}")
        return answer["result"]


@contextlib.contextmanager
def run_process(
    arguments: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: IO[bytes] | int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to end with the block, and made to if it does not.

    It is in a group of its own: Ctrl-C reaches this process alone, which then ends the others in order.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith("NEARFIELD_")}
    with subprocess.Popen(
        arguments, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a stand-in prints. Raises DriverError when it ends or takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(CALL_S, process.kill)
    timer.start()
    try:
        line: bytes = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise DriverError(f"A stand-in (process {process.pid}) ended without an answer")
    return line
