# SPDX-License-Identifier: Apache-2.0
"""The CDI file that every container with a GPU of this node gets: driver libraries, programs and common device nodes.

It follows the driver root: replaced by an update of the driver or by a new driver container, it is written anew. A root
without a usable driver never makes a file without libraries; it makes every Prepare say what is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from driver.prepare import cdi, cdidir, devnodes, installation, locks, rootfs

logger = logging.getLogger(__name__)

CONTROL_NODE = "/dev/nvidiactl"
COMMON_NODES = (CONTROL_NODE, "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")

_CHECK_INTERVAL_S = 5.0
"""How old the last look at the driver root may be when a claim is prepared; looking costs a stat for each of its files."""

_WRITE_PATIENCE_S = 10.0
_SETTLED_NS = 2_000_000_000
"""Some file systems keep times in steps of up to 2 s."""

_Fingerprint = tuple[tuple[int, ...] | None, ...]


class NodeSpecError(Exception):
    """There is no node spec now; the text says why."""


class NodeSpec:
    """Owns the file. `driver_version` gives the version of the loaded kernel module, None where it is not known. `root` is
    None for a mock machine without a driver root: its containers get device nodes and no files of a driver.
    """

    def __init__(
        self,
        directory: cdidir.CdiDirectory,
        *,
        dialect: cdi.Dialect,
        root: rootfs.DriverRoot | None,
        nodes: devnodes.DeviceNodes,
        node_locks: locks.Locks,
        driver_version: Callable[[], str | None],
        machine: str = os.uname().machine,
        clock: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = directory
        self._dialect = dialect
        self._root = root
        self._nodes = nodes
        self._locks = node_locks
        self._driver_version = driver_version
        self._machine = machine
        self._clock = clock
        self._clock_ns = clock_ns
        self._guard = threading.Lock()
        self._content: bytes | None = None
        self._watched: tuple[Path, ...] = ()
        self._missing: tuple[str, ...] = ()
        self._fingerprint: tuple[str | None, tuple[str, ...], _Fingerprint] | None = None
        self._looked_at = float("-inf")
        self._problem: str | None = None
        self._said = ""

    def problem(self) -> str | None:
        """Why there was no usable driver when that was last looked at, None if there was."""
        return self._problem

    def ensure(self) -> None:
        """See that the file is there and true to a driver root that was looked at a moment ago. Raises NodeSpecError."""
        if self._clock() - self._looked_at < _CHECK_INTERVAL_S and self._directory.untouched(self._dialect.node_file):
            return
        self.look_after()

    def watch(self) -> None:
        """What is to do every few seconds: look after it where a driver is loaded. What is wrong is in `problem`."""
        if self._root is not None and self._driver_version() is None:
            self._problem = None
            return
        with contextlib.suppress(NodeSpecError):
            self.look_after()

    def look_after(self) -> None:
        """Look at the driver root now, and write the file where it or the root has changed. Raises NodeSpecError."""
        with self._guard:
            try:
                if self._rebuild() or not self._directory.untouched(self._dialect.node_file):
                    self._place()
            except NodeSpecError as error:
                self._content = None
                self._looked_at = float("-inf")
                if self._problem != str(error):
                    logger.warning("No container can get a GPU: %s", error)
                self._problem = str(error)
                raise
            if self._problem is not None:
                logger.info("The driver root is usable again")
            self._problem = None
            self._looked_at = self._clock()

    def _rebuild(self) -> bool:
        """Build the content anew if what it was built from has changed; whether it is another one then."""
        version = self._driver_version()
        absent = () if self._dialect.mock else self._nodes.missing(COMMON_NODES)
        if self._content is not None and self._fingerprint == (version, absent, _stats(self._watched)):
            return False
        if CONTROL_NODE in absent:
            raise NodeSpecError(f"{CONTROL_NODE} is missing: load the NVIDIA driver and run `nvidia-modprobe -c 0 -u`")
        mounts = () if self._root is None else self._find_mounts(self._root, version)
        nodes = tuple(node for node in COMMON_NODES if node not in absent)
        content = self._dialect.node_spec(cdi.NodeEdits(device_nodes=nodes, mounts=mounts))
        stats = _stats(self._watched)
        youngest_ns = max((stat[-1] for stat in stats if stat is not None), default=0)
        # What changed a moment ago may have changed again since it was read: it is read once more the next time.
        self._fingerprint = (version, absent, stats) if self._clock_ns() - youngest_ns > _SETTLED_NS else None
        changed = content != self._content
        self._content = content
        said = f"Containers get {len(mounts)} files of the driver; not there: {', '.join(absent) or 'nothing'}"
        if changed and said != self._said:
            self._said = said
            logger.info("%s", said)
        return changed

    def _find_mounts(self, root: rootfs.DriverRoot, version: str | None) -> tuple[cdi.Mount, ...]:
        try:
            found = installation.find(root, machine=self._machine, expected_version=version)
        except installation.NoDriverError as error:
            raise NodeSpecError(str(error)) from error
        self._watched = tuple(root.mount / path.lstrip("/") for path in found.watched)
        if found.missing != self._missing:
            logger.info("Driver %s in %s is without %s", found.version, root.host, ", ".join(found.missing))
            self._missing = found.missing
        return found.mounts

    def _place(self) -> None:
        assert self._content is not None
        name = self._dialect.node_file
        try:
            with self._locks.claim(name, patience=locks.Deadline(_WRITE_PATIENCE_S)):
                self._directory.place(name, self._content)
        except (OSError, locks.LockUnavailableError) as error:
            raise NodeSpecError(f"{self._directory.path / name} cannot be written: {error}") from error


def _stats(paths: tuple[Path, ...]) -> _Fingerprint:
    """What tells that a file or the list of a folder has changed; None for what is not there."""
    return tuple(map(_stat, paths))


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
