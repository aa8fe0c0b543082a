# SPDX-License-Identifier: Apache-2.0
"""The supervisor: the daemons of all devices, and what is asked for them. It keeps nothing on disk but sockets.

Its daemons end with it, and with it what they held; a new supervisor is another instance, and the agent asks for everything again.
One at a time works in a folder, which a lock sees to. Folders of a former life stay for a while, as containers that run may have
them mounted and their daemon is asked for again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
import uuid as uuids
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from driver.errors import MpsError
from driver.mps import control, daemon, keeper, leftovers, programs, shares, shm, values
from driver.mps.shares import Protocol, Share

logger = logging.getLogger(__name__)

LOCK = "supervisor.lock"
LOCK_S = 20.0
"""How long a supervisor that is ending is waited for."""

STALE_S = 600.0
"""How long the folder of a device that nobody asks for is kept."""

END_S = 15.0
"""How long all daemons may take to end: their own times together."""

LOOK_AGAIN_S = 60.0
"""After how long a program that did not say what it can do is asked again."""

_DEVICE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_PERCENT_MAX = 100
_MEBIBYTE = 1 << 20


class Supervisor:
    """The daemons of a node. `root`: the driver root; `shm_at`: has a /dev/shm at a path and says where, None for none. Thread-safe;
    place and remove raise MpsError.
    """

    def __init__(
        self,
        directory: Path,
        root: programs.Root,
        *,
        pace: keeper.Pace | None = None,
        shm_at: Callable[[Path], Path | None] = shm.provide,
    ) -> None:
        self._directory = directory
        self._root = root
        self._pace = pace or keeper.Pace()
        self._shm_at = shm_at
        self._instance = uuids.uuid4().hex
        self._changed = threading.Condition()
        self._change = 0
        self._keepers: dict[str, keeper.Keeper] = {}
        self._stopping = False
        self._looking = threading.Lock()
        self._looked: tuple[object, float, programs.Control | None] | None = None
        self._lock_file: int | None = None

    def begin(self, stop: threading.Event) -> None:
        """Take the folder, and end what is left of a former life there. Raises MpsError where another supervisor works in it."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o700)  # containers reach what is in it by mounts alone
            self._lock_file = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MpsError(f"--mps-dir {self._directory} cannot be used: {error.strerror}", retryable=False) from error
        self._take_lock(self._lock_file, stop)
        ended = leftovers.end(lambda pipes: self._directory in pipes.parents)
        if ended:
            logger.warning("%d processes of a former supervisor were still there", ended)

    def ability(self) -> values.Ability:
        """What this supervisor can do now: the driver may come, go or change while it runs."""
        able = self._control()
        if able is None:
            why = programs.why_none(self._root)
            return values.Ability(instance=self._instance, reasons=dict.fromkeys(Protocol, why))
        return values.Ability(
            instance=self._instance,
            program=able.program.path,
            version=able.version,
            protocols=able.protocols,
            reasons=able.reasons,
        )

    def place(self, share: Share, *, timeout_s: float) -> None:
        """Have a share in place."""
        self._require_possible(share)
        self._keeper(share.device).place(share, timeout_s=timeout_s)

    def remove(self, device: str, share_id: str, *, timeout_s: float) -> None:
        """Have a share gone."""
        with self._changed:
            kept = self._keepers.get(device)
        if kept is not None:
            kept.remove(share_id, timeout_s=timeout_s)

    def status(self) -> values.Status:
        """All daemons."""
        with self._changed:
            change, kept = self._change, tuple(self._keepers.values())
        daemons = (one.daemon() for one in kept)
        return values.Status(
            instance=self._instance,
            change=change,
            daemons={one.device: one for one in sorted(filter(None, daemons), key=lambda one: one.device)},
        )

    def wait(self, seen: tuple[str, int] | None, *, timeout_s: float) -> values.Status:
        """All daemons, once it is not as it was seen, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or seen != (self._instance, self._change), timeout_s)
        return self.status()

    def sweep(self) -> None:
        """Remove the folders of devices that nobody asked for in this life."""
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                with self._changed:
                    used = path.name in self._keepers
                if not used and path.is_dir() and not path.is_symlink() and _DEVICE.fullmatch(path.name):
                    logger.info("Removing %s, which is of a former supervisor", path)
                    clear(path)

    def stop(self) -> None:
        """End all daemons, side by side. Idempotent."""
        with self._changed:
            self._stopping = True
            kept = tuple(self._keepers.values())
            self._changed.notify_all()
        for one in kept:
            one.stop()
        deadline = time.monotonic() + END_S
        for one in kept:
            if not one.join(max(0.0, deadline - time.monotonic())):
                logger.error("The MPS daemon of device %s does not end", one.device)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _take_lock(self, lock: int, stop: threading.Event) -> None:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline or stop.wait(0.1):
                    holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
                    raise MpsError(
                        f"Another MPS supervisor (process {holder}) works in {self._directory}: end it, or give this one its own"
                        " --mps-dir",
                        retryable=True,
                    ) from None
            else:
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return

    def _require_possible(self, share: Share) -> None:
        """Raises MpsError for what no daemon could do."""
        problem = None
        if not _DEVICE.fullmatch(share.device):
            problem = f"{share.device!r} is no name of a device"
        elif not _UUID.fullmatch(share.uuid):
            problem = f"{share.uuid!r} is no UUID of a GPU or MIG instance"
        elif share.compute is not None and not 1 <= share.compute <= _PERCENT_MAX:
            problem = f"{share.compute} percent of the multiprocessors: MPS takes 1 to {_PERCENT_MAX}"
        elif share.memory is not None and share.memory < _MEBIBYTE:
            problem = f"{share.memory} bytes of memory: MPS limits it in MiB"
        elif share.protocol is Protocol.V3 and share.uuid.startswith("MIG-"):
            problem = f"{share.uuid} is a MIG instance, which MPS v3 does not limit"
        else:
            problem = self._path_problem(share)
        if problem is not None:
            raise MpsError(f"Share {share.share_id} of device {share.device}: {problem}", retryable=False)
        able = self._control()
        if able is None:
            raise MpsError(
                f"Share {share.share_id} of device {share.device}: {programs.why_none(self._root)}", retryable=True
            )
        if share.protocol not in able.protocols:
            why = able.reasons.get(share.protocol, f"MPS {share.protocol} is not known here")
            raise MpsError(f"Share {share.share_id} of device {share.device}: {why}", retryable=False)

    def _path_problem(self, share: Share) -> str | None:
        pipes = Path(shares.pipes(PurePosixPath(self._directory), share.device))
        if control.socket_path_fits(pipes, share.namespace if share.protocol is Protocol.V3 else None):
            return None
        return f"the paths of the sockets below {pipes} would be longer than 107 bytes: take a shorter --mps-dir"

    def _keeper(self, device: str) -> keeper.Keeper:
        with self._changed:
            if self._stopping:
                raise MpsError("The MPS supervisor is ending", retryable=True)
            kept = self._keepers.get(device)
            if kept is None:
                folder = Path(shares.folder(PurePosixPath(self._directory), device))
                kept = keeper.Keeper(device, folder, self._make, changed=self._tell, pace=self._pace, clear=clear)
                self._keepers[device] = kept
            return kept

    def _make(self, share: Share, ended: Callable[[], None]) -> daemon.Daemon:
        able = self._control()
        if able is None or share.protocol not in able.protocols:
            raise daemon.DaemonError(
                programs.why_none(self._root)
                if able is None
                else able.reasons.get(share.protocol, "it cannot any more")
            )
        place = Path(shares.shm(PurePosixPath(self._directory), share.device))
        return daemon.Daemon(
            able,
            directory=self._directory,
            device=share.device,
            uuid=share.uuid,
            protocol=share.protocol,
            shm=self._shm_at(place) if share.protocol is Protocol.LEGACY else None,
            ended=ended,
        )

    def _tell(self) -> None:
        """Something changed. Called by keepers, some with their own lock held: nothing of theirs is asked for here."""
        with self._changed:
            self._change += 1
            self._changed.notify_all()

    def _control(self) -> programs.Control | None:
        """The control program. It is looked at again when its file is another, and when it did not answer."""
        with self._looking:
            program = programs.find(self._root, programs.CONTROL)
            mark = None if program is None else (program, _mark(program.seen))
            now = time.monotonic()
            if self._looked is not None and self._looked[0] == mark and now < self._looked[1]:
                return self._looked[2]
            able = None if program is None else programs.look(program)
            known = able is not None and (Protocol.V3 in able.protocols or able.version is not None)
            self._looked = (mark, float("inf") if known or able is None else now + LOOK_AGAIN_S, able)
            return able


def clear(folder: Path) -> None:
    """Remove what belongs to a device. Whoever has a part of it mounted keeps that."""
    shm.release(folder / shares.SHM)
    shutil.rmtree(folder, ignore_errors=True)


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns
