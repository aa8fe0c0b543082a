# SPDX-License-Identifier: Apache-2.0
"""The base where no registry of images is reached: Debian's own packages, put together by mmdebstrap. And the programs for it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hack.agentimage import workspace
from hack.agentimage.errors import ImageError

RELEASE = "bookworm"

PACKAGES = ("ca-certificates", "libstdc++6", "python3", "python3-venv")
"""Besides the essential ones. libstdc++6, because grpcio and protobuf are linked with it."""

ARGUMENTS = (
    "--quiet",
    "--variant=essential",
    f"--include={','.join(PACKAGES)}",
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    RELEASE,
)

PROGRAMS: Mapping[str, str] = {
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Program: the Debian package that brings it."""


def require() -> None:
    """Makes sure that this machine can build without an engine. Raises ImageError saying what it lacks."""
    if os.geteuid() != 0:
        raise ImageError(
            "No docker and no podman answers here, and without them the image is built by mmdebstrap and buildah, which need root"
            " (mounts and file owners): run it as root on Debian, or start a container engine."
        )
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if not missing:
        return
    apt = shutil.which("apt-get")
    if apt is None:
        raise ImageError(
            f"Without docker or podman the image is built by {' and '.join(missing)}, which are missing, and there is no apt-get to"
            " install them with: this way is for Debian and its derivatives."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (("update", "-qq"), ("install", "-qq", "--yes", "--no-install-recommends", *missing)):
        done = subprocess.run([apt, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ImageError(f"apt-get {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")


def base_key() -> str:
    """Changes with everything that decides the base, but the day on which its packages were fetched."""
    return hashlib.sha256(repr((ARGUMENTS, platform.machine())).encode()).hexdigest()[:16]


def base(kept: Path, *, again: bool) -> Path:
    """The base as a tar of its files, made if it is not kept, or if asked for anew. Raises ImageError."""
    archive = kept / f"base-{RELEASE}-{base_key()}.tar"
    with workspace.locked(kept / f"{archive.stem}.lock"):
        if again or not archive.exists():
            with workspace.temporary(kept) as folder:
                made = folder / "base.tar"
                workspace.run([*workspace.ALONE, "mmdebstrap", *ARGUMENTS, made], temporary_files=folder)
                made.rename(archive)
    return archive
