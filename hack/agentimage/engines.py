# SPDX-License-Identifier: Apache-2.0
"""What builds the image and writes it as a docker-archive: docker, podman, or buildah on a base of Debian packages."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hack.agentimage import debian, workspace
from hack.agentimage.context import CONTAINERFILE
from hack.agentimage.errors import ImageError


@dataclass(frozen=True)
class Job:
    """One build: the folder with its inputs, the secrets by their ids, and the archive to write."""

    context: Path
    secrets: Mapping[str, Path]
    tag: str
    archive: Path
    base: str | None
    """An image in the place of the Containerfile's default, or None. Not for buildah without one: it makes its own."""
    again: bool
    """Get the base anew, though it is there."""
    scratch: Path
    """A folder of this build's own, for what the engine writes in between."""
    kept: Path
    """The folder for what later builds use again."""


def choose() -> str:
    """The name of the engine that answers here, buildah where none does."""
    return next((name for name in ("docker", "podman") if answers(name)), "buildah")


def answers(engine: str) -> bool:
    """Whether the program is there and, with docker, its daemon too."""
    if shutil.which(engine) is None:
        return False
    return subprocess.run([engine, "info"], stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def docker(job: Job) -> None:
    """Raises ImageError."""
    _require("docker")
    if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode != 0:
        raise ImageError(
            "docker here lacks buildx, and the Containerfile's secrets need BuildKit: install docker-buildx-plugin."
        )
    # --load: a builder with a driver of its own would leave the image in its cache.
    workspace.run(["docker", "buildx", "build", "--load", "--provenance=false", *_arguments(job)])
    workspace.run(["docker", "save", "--output", job.archive, job.tag])


def podman(job: Job) -> None:
    """Raises ImageError."""
    _require("podman")
    workspace.run(["podman", "build", *_arguments(job)])
    workspace.run(["podman", "save", "--quiet", "--format", "docker-archive", "--output", job.archive, job.tag])


def buildah(job: Job) -> None:
    """With images of its own in `job.scratch`, so that nothing stays and two builds never meet. Raises ImageError."""
    debian.require()
    storage = ("--root", str(job.scratch / "storage"), "--runroot", str(job.scratch / "run"), "--storage-driver", "vfs")
    command = [*workspace.ALONE, "buildah", *storage]
    base = job.base
    if base is None:
        packages = debian.base(job.kept, again=job.again)
        base = "localhost/nearfield/base"
        workspace.run([*command, "from", "--name", "base", "scratch"], quiet=True, temporary_files=job.scratch)
        workspace.run([*command, "add", "--quiet", "base", packages, "/"], quiet=True, temporary_files=job.scratch)
        workspace.run([*command, "commit", "--quiet", "--rm", "base", base], quiet=True, temporary_files=job.scratch)
    arguments = _arguments(Job(**{**vars(job), "base": base, "again": False}))
    workspace.run(
        [*command, "build", "--isolation", "chroot", "--layers=false", *arguments], temporary_files=job.scratch
    )
    workspace.run(
        [*command, "push", "--quiet", job.tag, f"docker-archive:{job.archive}:{job.tag}"],
        quiet=True,
        temporary_files=job.scratch,
    )


def _arguments(job: Job) -> list[str | Path]:
    """What all engines understand alike."""
    return [
        *(("--build-arg", f"BASE={job.base}") if job.base else ()),
        *(("--pull",) if job.again else ()),
        *(word for name, path in job.secrets.items() for word in ("--secret", f"id={name},src={path}")),
        *("--file", job.context / CONTAINERFILE),
        *("--tag", job.tag),
        job.context,
    ]


def _require(engine: str) -> None:
    if not answers(engine):
        raise ImageError(
            f"`{engine} info` fails here: start {engine}, or leave out --engine to build with what is there."
        )


ENGINES: Mapping[str, Callable[[Job], None]] = {"buildah": buildah, "docker": docker, "podman": podman}
