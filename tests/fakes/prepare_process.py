# SPDX-License-Identifier: Apache-2.0
"""The prepare room of `preparing.Agent` in a process of its own, to be killed: `python -m tests.fakes.prepare_process NODE`
reads one JSON command a line and answers one JSON line; `PrepareProcess` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from discovery import work
from discovery.errors import WorkError
from driver import values
from driver.sharing import shares

_ROOT = Path(__file__).resolve().parents[2]


class PrepareProcess:
    """An agent in a process. `crash_at` names the point at which it kills itself; `divided`: its GPUs are divided at need,
    those of the mock machine in the folder, if there is one; `shared`: they are given out in shares that MPS holds.
    """

    def __init__(
        self,
        node: Path,
        *,
        crash_at: str | None = None,
        wait_s: float = 0.05,
        divided: bool = False,
        shared: bool = False,
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "NEARFIELD_CRASH_AT"}
        if crash_at is not None:
            environment["NEARFIELD_CRASH_AT"] = crash_at
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.prepare_process",
                str(node),
                str(wait_s),
                *(["divided"] * divided),
                *(["shared"] * shared),
            ],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def started(self) -> bool:
        """Whether it came to serve."""
        return bool(self._answer() == "serving")

    def ask(self, operation: str, *claims: values.ClaimRef) -> Any:
        """The answer of the process, None where it died instead."""
        self.send(operation, *claims)
        return self._answer()

    def send(self, operation: str, *claims: values.ClaimRef) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([operation, [asdict(claim) for claim in claims]]) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer."""
        return self._answer()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(60)

    def died(self) -> bool:
        """Whether it was killed by the signal of a crash point."""
        return self._process.wait(60) == -9

    def close(self) -> None:
        """End it in order, or see that it is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None


def _serve(node: Path, wait_s: float, *, divided: bool, shared: bool) -> None:
    from tests.fakes import preparing

    machine = node / "machine"
    agent = preparing.Agent(node, wait_s=wait_s, machine=machine if machine.exists() else None)
    if divided:
        agent.index.divide()
    if shared:
        agent.index.share(memory=shares.Memory.MPS, compute=shares.Compute.MPS)
    agent.start()
    print(json.dumps("serving"), flush=True)
    for line in sys.stdin:
        operation, wanted = json.loads(line)
        refs = [values.ClaimRef(**claim) for claim in wanted]
        answer: Any
        match operation:
            case "prepare":
                answer = {uid: asdict(value) for uid, value in agent.executor.prepare(refs, preparing.Rpc()).items()}
            case "unprepare":
                answer = {uid: asdict(value) for uid, value in agent.executor.unprepare(refs, preparing.Rpc()).items()}
            case "hold up":
                for call in ("create", "destroy"):
                    agent.hardware.failing[call] = WorkError("busy", kind=work.Kind.IN_USE, retryable=False)
                for call in ("apply", "undo"):
                    agent.enforcer.failing[call] = WorkError("busy", kind=work.Kind.FAILED, retryable=False)
                answer = None
            case "let go":
                del agent.hardware.failing["destroy"], agent.enforcer.failing["undo"]
                answer = None
            case "leads":
                answer = agent.epoch.leads()
            case "look_after":
                agent.collector.look_after()
                answer = None
            case _:
                raise ValueError(operation)
        print(json.dumps(answer), flush=True)
    agent.stop()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), float(sys.argv[2]), divided="divided" in sys.argv, shared="shared" in sys.argv)
