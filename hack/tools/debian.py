# SPDX-License-Identifier: Apache-2.0
"""Programs from Debian's packages, through apt: installed by root, unpacked into a folder by anybody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hack.tools.errors import ToolError

APT_WAIT_S = 300
"""How long another apt is waited for."""


def install(packages: Sequence[str]) -> None:
    """Installs packages on this machine; needs root. Raises ToolError with what apt said."""
    apt = _program("apt-get", packages)
    options = ("-o", f"DPkg::Lock::Timeout={APT_WAIT_S}")
    for verb in ("update", "-qq"), ("install", "-qq", "--yes", "--no-install-recommends", *packages):
        _run([apt, *options, *verb], environment={"DEBIAN_FRONTEND": "noninteractive"})


def unpack(packages: Sequence[str], folder: Path) -> None:
    """Unpacks packages, and those of their dependencies that this machine lacks, into `folder`; needs no root, and changes
    nothing else. Raises ToolError with what apt said.
    """
    apt, dpkg = _program("apt-get", packages), _program("dpkg-deb", packages)
    with tempfile.TemporaryDirectory(prefix="nearfield-apt-") as name:
        own = Path(name)
        for needed in "lists/partial", "archives/partial":
            (own / needed).mkdir(parents=True)
        settings = {
            "Dir::State::Lists": own / "lists",
            "Dir::Cache": own,
            "Dir::Cache::Archives": own / "archives",
            # A lock of the machine's own folders is for root alone, and everything that is written is in ours.
            "Debug::NoLocking": "1",
        }
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        _run([apt, *options, "update", "-qq"])
        # One that is installed, and whose program is not on the PATH, would not be fetched otherwise.
        again = ("--reinstall", "--download-only")
        _run([apt, *options, "install", "-qq", "--yes", "--no-install-recommends", *again, *packages])
        for archive in sorted((own / "archives").glob("*.deb")):
            _run([dpkg, "--extract", str(archive), str(folder)])


def _program(name: str, packages: Sequence[str]) -> str:
    found = shutil.which(name)
    if found is None:
        raise ToolError(
            f"Install these first (they are Debian's names, and there is no {name} here): {' '.join(packages)}"
        )
    return found


def _run(arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}"
        raise ToolError(f"{' '.join(arguments)}: {said[-2000:]}")
