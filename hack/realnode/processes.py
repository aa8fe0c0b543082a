# SPDX-License-Identifier: Apache-2.0
"""The processes of a cluster: started to outlive the command that starts them, found again by namespace and cgroup, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hack.realnode import cgroups
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

TERM_S = 20.0
"""kube-apiserver drains its connections for some seconds after SIGTERM."""

KILL_S = 60.0
ROUNDS = 6

GATE = 'read -r go || exit 1; exec "$@" </dev/null'
"""Ends where the one who started it is killed before it says go."""


def start(
    layout: Layout, component: str, arguments: Sequence[str], *, inside: int, environment: Mapping[str, str]
) -> None:
    """Starts a component in the namespaces of the process `inside`; its output goes to its log. It is in a session of its own."""
    _start_logged(
        layout, component, ["nsenter", f"--target={inside}", "--mount", "--net", "--", *arguments], environment
    )


def start_in_network(
    layout: Layout, component: str, arguments: Sequence[str], *, environment: Mapping[str, str]
) -> None:
    """The same in the cluster's network alone, with the files of the machine."""
    _start_logged(layout, component, ["nsenter", f"--net={layout.namespace_file}", "--", *arguments], environment)


def _start_logged(layout: Layout, component: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    layout.logs.mkdir(parents=True, exist_ok=True)
    with (layout.logs / f"{component}.log").open("ab") as log:
        _start(layout, component, command, stdout=log, stderr=log, environment=environment)


def start_holder(layout: Layout, component: str, arguments: Sequence[str], *, ready_s: float) -> None:
    """Starts a process in the cluster's network namespace and waits for the line `ready` from it. Raises ClusterError with what it said."""
    layout.logs.mkdir(parents=True, exist_ok=True)
    log = layout.logs / f"{component}.log"
    with log.open("ab") as errors:
        process = _start(
            layout,
            component,
            ["nsenter", f"--net={layout.namespace_file}", "--", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            environment=None,
        )
    assert process.stdout is not None
    with process.stdout as output:
        readable, _, _ = select.select([output], [], [], ready_s)
        if not readable or output.readline() != b"ready\n":
            raise ClusterError(f"The namespaces of cluster {layout.name} cannot be made: {log.read_text().strip()}")


def _start(
    layout: Layout,
    component: str,
    arguments: Sequence[str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes],
    environment: Mapping[str, str] | None,
) -> subprocess.Popen[bytes]:
    """Starts a process that becomes the component once its number is on record; so none runs that nobody would find."""
    layout.pids.mkdir(parents=True, exist_ok=True)
    wait_ended(layout, component)
    process = subprocess.Popen(
        ["sh", "-c", GATE, "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name=f"reap-{process.pid}", daemon=True).start()
    write(layout.pids / component, f"{process.pid} {_started(process.pid)}")
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as gate:
        gate.write(b"go\n")
    return process


def pid(layout: Layout, component: str) -> int | None:
    """The component's process, None where it does not run. A number that another process has got since does not count."""
    try:
        number, started = (layout.pids / component).read_text().split()
    except (OSError, ValueError):
        return None
    return int(number) if started != "0" and _started(int(number)) == started else None


def recorded(layout: Layout) -> tuple[str, ...]:
    """The components that were started and not ended by us, whether they run or not."""
    if not layout.pids.is_dir():
        return ()
    return tuple(sorted(path.name for path in layout.pids.iterdir() if not path.name.startswith(".")))


def end(layout: Layout, component: str, *, how: signal.Signals = signal.SIGTERM) -> None:
    """Ends a component and waits until it is gone; one that does not run is fine. Who starts it meanwhile waits as well."""
    number = pid(layout, component)
    ending = _ending(layout, component)
    with contextlib.suppress(FileNotFoundError):
        (layout.pids / component).replace(ending)
    if number is not None:
        _end([number], how=how)
    ending.unlink(missing_ok=True)


def _ending(layout: Layout, component: str) -> Path:
    """The record of a component that was asked to end."""
    return layout.pids / f".{component}.ending"


def wait_ended(layout: Layout, component: str) -> None:
    """Waits for one that still drains. Raises ClusterError where it does not end."""
    number = pid(layout, _ending(layout, component).name)
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(number)
            try:
                if not _gone(handle, TERM_S + KILL_S):
                    raise ClusterError(f"{component} (process {number}) does not end, so it cannot be started again.")
            finally:
                os.close(handle)


def end_all(layout: Layout) -> None:
    """Kills whatever is left in the cluster's network namespace or cgroups, shims and containers included. Raises ClusterError."""
    for _ in range(ROUNDS):  # what a process started while it was being killed is found in the next round
        left = members(layout)
        if not left:
            return
        with contextlib.suppress(ClusterError):  # on a busy machine some need longer
            cgroups.thaw(layout.cgroup)
            _end(sorted(left), how=signal.SIGKILL)
    left = members(layout)
    if left:
        names = ", ".join(f"{number} ({_command(number)})" for number in sorted(left))
        raise ClusterError(f"These processes of cluster {layout.name} do not end: {names}")


def members(layout: Layout) -> set[int]:
    """Every process that is in the cluster's network namespace or below its cgroups, ourselves excepted."""
    found = cgroups.members(layout.cgroup)
    with contextlib.suppress(FileNotFoundError):
        namespace = layout.namespace_file.stat()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    own = (folder / "ns/net").stat()
                    if (own.st_dev, own.st_ino) == (namespace.st_dev, namespace.st_ino):
                        found.add(int(folder.name))
    return found - {os.getpid()}


def _end(numbers: Iterable[int], *, how: signal.Signals) -> None:
    handles: dict[int, int] = {}
    try:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                handles[number] = os.pidfd_open(number)
        for handle in handles.values():
            _send(handle, how)
        for handle in handles.values():
            if how != signal.SIGKILL and not _gone(handle, TERM_S):
                _send(handle, signal.SIGKILL)
        stuck = [number for number, handle in handles.items() if not _gone(handle, KILL_S)]
    finally:
        for handle in handles.values():
            os.close(handle)
    if stuck:
        raise ClusterError(f"Process {stuck[0]} ({_command(stuck[0])}) does not end.")


def _send(handle: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, how)


def _gone(handle: int, patience_s: float) -> bool:
    """Whether the process ends in time: its handle is readable then (pidfd_open(2))."""
    readable, _, _ = select.select([handle], [], [], patience_s)
    return bool(readable)


def _started(number: int) -> str:
    """When the process started, in clock ticks since boot (proc_pid_stat(5), field 22); "0" where there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    return "0" if fields[0] in "ZX" else fields[19]


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:
        return "gone"


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """A file, whole or not at all."""
    new = path.with_name(f".{path.name}")
    new.touch(mode)
    new.write_text(text)
    new.replace(path)
