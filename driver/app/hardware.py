# SPDX-License-Identifier: Apache-2.0
"""Where the hardware facts come from: this machine, or a mock machine that is rendered first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from discovery import child, uevents
from discovery.errors import ProbeError
from discovery.mock import ueventsocket
from driver import config
from driver.errors import ConfigError

RENDER_TIMEOUT_S = 60.0
_USAGE = 2
"""Exit status of `python -m discovery.mock` for a document that is not usable."""


def mock_directory(settings: config.Settings) -> Path:
    """Where the mock machine is rendered. It stays over a restart, with its faults, as hardware does."""
    return settings.state_dir / "mock"


def source(settings: config.Settings) -> child.Source:
    """What the probe reads."""
    if settings.mocked:
        return child.Source.rendered(mock_directory(settings), cgroups=cgroup_root(settings))
    return child.Source(
        sys=settings.sysfs,
        proc=settings.procfs,
        dev=settings.dev,
        driver_root=settings.driver_root_mount,
        cgroups=cgroup_root(settings),
    )


def cgroup_root(settings: config.Settings) -> Path:
    """Below which folder the cgroups of pods are."""
    if settings.cgroup_root is not None:
        return settings.cgroup_root
    return mock_directory(settings) / "sys/fs/cgroup" if settings.mocked else Path("/sys/fs/cgroup")


def has_pods(settings: config.Settings) -> bool:
    """Whether those are kubelet's: a mock machine has cgroups of pods once somebody makes them."""
    return settings.cgroup_root is not None or not settings.mocked


def prober(settings: config.Settings, options: child.ProbeOptions) -> child.ProbeChild:
    """What probes the machine; nothing is read before it is asked."""
    return child.ProbeChild(source=source(settings), options=options)


def listen(settings: config.Settings) -> uevents.Listener:
    """Where changes of that machine are told. Raises SourceError."""
    return ueventsocket.listen(mock_directory(settings)) if settings.mocked else uevents.kernel()


def render(settings: config.Settings, machine: str) -> None:
    """Render a mock machine, a name of the zoo or a file, in a process of its own: only that one needs what reads documents.

    Raises ConfigError where --mock names no usable machine, ProbeError where rendering failed.
    """
    directory = str(mock_directory(settings))
    command = [sys.executable, "-m", "discovery.mock", "--end-with-stdin", machine, directory]
    # The end of this pipe is the end of this process, however that comes about; nothing is ever written to it.
    alive, ours = os.pipe()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RENDER_TIMEOUT_S,
            check=False,
            stdin=alive,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"The mock machine {machine} could not be rendered: {error}") from error
    finally:
        os.close(alive)
        os.close(ours)
    if done.returncode == _USAGE:
        raise ConfigError(f"--mock {done.stderr.strip()}")
    if done.returncode:
        raise ProbeError(f"The mock machine {machine} could not be rendered: {done.stderr.strip()}")
