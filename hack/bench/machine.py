# SPDX-License-Identifier: Apache-2.0
"""The facts of the machine that a reader needs to judge a run. No names, no addresses."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def facts(directory: Path, *, go: str | None, environment: str, proc: Path = PROC) -> Mapping[str, Any]:
    """What this run is made on. `directory` is where everything is written; `go` the version of Go, if there is one."""
    return {
        "environment": environment,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model((proc / "cpuinfo").read_text(errors="replace")),
        "memory MiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "kernel": platform.release(),
        "file system": file_system((proc / "self" / "mountinfo").read_text(errors="replace"), directory.stat().st_dev),
        "python": platform.python_version(),
        "grpcio": metadata.version("grpcio"),
        "sqlite": sqlite3.sqlite_version,
        "go": go or "none",
        "commit": _commit(),
        "load at start": round(os.getloadavg()[0], 2),
    }


def _cpu_model(cpuinfo: str) -> str:
    models = [
        value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if key.strip() == "model name"
    ]
    return models[0] if models else platform.machine()


def file_system(mountinfo: str, device: int) -> str:
    """The type of the file system with this device number (proc_pid_mountinfo(5)); overlays and the like may not be listed
    under the number that stat gives, and are then `unknown`.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) > 6 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


def _commit() -> str:
    """The commit that is measured, `+` when files differ from it; `unknown` outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
