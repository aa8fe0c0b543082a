# SPDX-License-Identifier: Apache-2.0
"""From this tree to an archive, which is kept under a key of all that decides its content."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from driver import version
from hack.agentimage import context, debian, engines, pipsettings, workspace

ROOT = Path(__file__).resolve().parents[2]

TAG = f"localhost/nearfield/agent:{version.VERSION}"
"""The image's name where no other is given: that of the manifests in deploy/daemonset."""

KEPT_ARCHIVES = 4


def archive(*, tag: str = TAG, engine: str | None = None, base: str | None = None, again: bool = False) -> Path:
    """The image of this tree as a docker-archive, built if it is not kept, or if `again`. Raises ImageError."""
    engine = engine or engines.choose()
    kept = workspace.images()
    with workspace.temporary(kept) as scratch:
        inputs = context.copy(ROOT, scratch / "context")
        decisive = (inputs, tag, engine, base or (debian.base_key() if engine == "buildah" else None))
        path = kept / f"agent-{hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]}.tar"
        if not again and _is_kept(path):
            return path
        with workspace.locked(kept / "agent.lock"):
            if not again and _is_kept(path):  # by now: somebody else wanted the same
                return path
            made = scratch / "image.tar"
            engines.ENGINES[engine](
                engines.Job(
                    context=scratch / "context",
                    secrets=pipsettings.of_this_machine().write(scratch),
                    tag=tag,
                    archive=made,
                    base=base,
                    again=again,
                    scratch=scratch,
                    kept=kept,
                )
            )
            made.chmod(0o644)
            made.replace(path)
        workspace.keep_newest(kept, "agent-*.tar", KEPT_ARCHIVES)
    return path


def _is_kept(path: Path) -> bool:
    """Whether it is there; it then counts as used now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def copy(source: Path, target: Path) -> None:
    """A copy that is whole or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        shutil.copyfile(source, name)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
