# SPDX-License-Identifier: Apache-2.0
"""One life of the control daemon of a device: from its start to the end of the last process of it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from discovery import process as processes
from driver.mps import control, leftovers, programs, running, shares
from driver.mps.shares import Protocol

logger = logging.getLogger(__name__)

START_S = 60.0
"""How long daemon and server may take until they are ready: without a persistence daemon the server initialises its GPU first (MPS
documentation, Troubleshooting Guide).
"""

END_S = 3.0
"""How long a daemon may take to end when it is asked to, and then again when it is told to; then it is killed."""

_FIRST_S = 0.05
_VERSIONS = {Protocol.V3: "3", Protocol.LEGACY: "2"}
_LOG_BYTES = 2048
_LOG_MAX_BYTES = 1 << 20
"""Every command is logged, also those with which a daemon is looked at; the logs lie in memory."""

_LOG_LINES = 3


class DaemonError(Exception):
    """The daemon did not start; the text has the end of its log."""


class Daemon:
    """The control daemon of a device. `folder`: what belongs to it. All methods belong to one thread, which has to outlive the
    daemon, as the kernel ends the daemon with the thread that started it; `ended` is called from another when it ends.
    """

    def __init__(
        self,
        able: programs.Control,
        *,
        directory: Path,
        device: str,
        uuid: str,
        protocol: Protocol,
        shm: Path | None,
        ended: Callable[[], None],
    ) -> None:
        place = PurePosixPath(directory)
        self.pipes = Path(shares.pipes(place, device))
        self._log = Path(shares.folder(place, device)) / "log"
        self._able = able
        self._directory = directory
        self._uuid = uuid
        self._protocol = protocol
        self._shm = shm
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._output = self._log / "output"
        uid = os.geteuid()
        self.control: control.Control = (
            control.V3(self._ask, uuid=uuid, pipes=self.pipes)
            if protocol is Protocol.V3
            else control.Legacy(self._ask, uid=uid)
        )

    def start(self, stop: threading.Event) -> None:
        """Start the daemon and its server, and wait until they are ready. Raises DaemonError; what was started is then ended."""
        deadline = time.monotonic() + START_S
        try:
            self._make_folders()
            self._process = self._spawn()
            threading.Thread(target=self._wait, args=(self._process,), name="mps-end", daemon=True).start()
            self._until_it_answers(self._process, stop, deadline)
            self.control.serve(stop, timeout_s=max(0.0, deadline - time.monotonic()))
        except (OSError, control.ControlError) as error:
            words = self.last_words()
            self.end()
            raise DaemonError(f"{error}; the end of its log: {words}") from error

    @property
    def alive(self) -> bool:
        """Whether the control daemon runs."""
        return self._process is not None and self._process.poll() is None

    def how_it_ended(self) -> str:
        """A sentence about a daemon that is not alive."""
        status = None if self._process is None else self._process.poll()
        return f"it {processes.ending(status)}" if status is not None else "it was not started"

    def end(self) -> None:
        """End the daemon and its server. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            self._settle(process, asked=self._quit())
        leftovers.end(lambda pipes: pipes == self.pipes)

    def trim_logs(self) -> None:
        """Begin logs anew that have become long."""
        for path in self._logs():
            with contextlib.suppress(OSError):
                if path.stat().st_size > _LOG_MAX_BYTES:
                    os.truncate(path, 0)

    def _logs(self) -> tuple[Path, ...]:
        server = self._log / shares.SERVER if self._protocol is Protocol.V3 else self._log
        return (self._output, self._log / "control.log", server / "server.log")

    def last_words(self) -> str:
        """The end of the logs of daemon and server, on one line."""
        lines: list[str] = []
        for path in self._logs():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                lines += file.read(_LOG_BYTES).decode(errors="replace").splitlines()[-_LOG_LINES:]
        return running.one_line("\n".join(lines)) or "empty"

    def _quit(self) -> bool:
        """Ask the daemon to end; whether that was of use: one that is just starting knows no commands yet."""
        try:
            return self.control.quit(timeout_s=END_S)
        except control.ControlError:
            return False

    def _settle(self, process: subprocess.Popen[bytes], *, asked: bool) -> None:
        """Wait for the end of a daemon that was asked to end; tell it, when it takes too long; then make it."""
        for number in (0, signal.SIGTERM, signal.SIGKILL) if asked else (signal.SIGTERM, signal.SIGKILL):
            if number:
                logger.info("The MPS daemon of %s does not end by itself: %s", self._uuid, signal.Signals(number).name)
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                return
        logger.error("The MPS daemon of %s hangs inside the kernel and cannot be killed yet", self._uuid)

    def _make_folders(self) -> None:
        """The folders of a device. The sockets of a former life go; folders stay, as containers that run may have them mounted."""
        self.pipes.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.rmtree(self._log, ignore_errors=True)
        self._log.mkdir(mode=0o700)
        # Reached through a mount alone, whatever uid the container has.
        self.pipes.mkdir(exist_ok=True)
        self.pipes.chmod(0o755)
        for folder, _, names in os.walk(self.pipes):
            for name in names:
                Path(folder, name).unlink(missing_ok=True)

    def _spawn(self) -> subprocess.Popen[bytes]:
        arguments = ["-f"]
        if self._protocol is Protocol.V3:
            arguments += ["-p", "3"]
        if os.geteuid() == 0 and (flag := self._able.multiuser.get(self._protocol)) is not None:
            arguments.append(flag)
        else:
            logger.warning(
                "The MPS daemon of %s serves programs of user %d alone: %s",
                self._uuid,
                os.geteuid(),
                "the supervisor is not root" if os.geteuid() else "its program knows no multi-user mode",
            )
        command = self._able.program.command(*arguments, parent=os.getpid(), visible=(self._directory,), shm=self._shm)
        with self._output.open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self._environment(daemon=True)),
                start_new_session=True,
            )

    def _environment(self, *, daemon: bool) -> Mapping[str, str]:
        environment = {
            **self._able.program.environment,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self._log),
            "CUDA_MPS_PROTOCOL_VERSION": _VERSIONS[self._protocol],
        }
        return {**environment, "CUDA_VISIBLE_DEVICES": self._uuid} if daemon else environment

    def _ask(self, *arguments: str, given: str = "", timeout_s: float = control.COMMAND_S) -> running.Result:
        program = self._able.program
        protocol = ("-p", "3") if self._protocol is Protocol.V3 and arguments[:1] != ("-q",) else ()
        return running.run(
            program.command(*protocol, *arguments, visible=(self._directory,)),
            environment=self._environment(daemon=False),
            timeout_s=timeout_s,
            given=given,
        )

    def _until_it_answers(self, process: subprocess.Popen[bytes], stop: threading.Event, deadline: float) -> None:
        """Wait for the socket of a daemon that is starting, and for its first answer."""
        wait_s = _FIRST_S
        why = "it has no socket"
        while True:
            if (self.pipes / control.SOCKET).exists():
                try:
                    self.control.answers()
                except control.ControlError as error:
                    why = str(error)
                else:
                    return
            if process.poll() is not None:
                raise control.ControlError(self.how_it_ended())
            if time.monotonic() >= deadline:
                raise control.ControlError(f"{why} after {START_S:.0f} s")
            if stop.wait(wait_s):
                raise control.ControlError("it is no longer wanted")
            wait_s = min(wait_s * 2, 0.5)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended()
