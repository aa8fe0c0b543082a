# SPDX-License-Identifier: Apache-2.0
"""The components' programs: built from Go modules whose versions and checksums are committed, and kept outside the tree.

A first build of Kubernetes takes minutes and 4 GB of Go's build cache; so a build is kept under a hash of everything that decides it,
and whoever has the same sources finds it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hack.realnode import locks, needs
from hack.realnode.errors import ClusterError
from hack.tools import cache

MODULES = Path(__file__).resolve().parent / "upstream"
KUBERNETES = "v1.37.2"
"""As upstream/kubernetes/go.mod requires; compiled in, because components refuse to work beside a version v0.0.0."""

HIDDEN = ("/run", "/var/run", "/var/lib", "/var/log")
"""Where the cluster's programs see folders of the cluster."""

LINKS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
"""Names of the one binary of upstream/kubernetes."""

VERSION = "k8s.io/component-base/version"
LINKER = " ".join(
    (
        "-s -w",
        f"-X {VERSION}.gitVersion={KUBERNETES}",
        f"-X {VERSION}.gitMajor={KUBERNETES.removeprefix('v').split('.')[0]}",
        f"-X {VERSION}.gitMinor={KUBERNETES.split('.')[1]}",
    )
)

BUILDS: dict[str, tuple[str, ...]] = {
    "kubernetes": ("-ldflags", LINKER, "."),
    "containerd": ("-tags", "no_btrfs no_zfs no_devmapper", "-ldflags", "-s -w", "./pause", "tool"),
}
"""Module below upstream: the arguments of its `go build`. A package that is named `tool` is all of go.mod's tools."""


def path() -> Path:
    """The folder of all programs, by this tree's sources; whether it has been built or not."""
    return cache.folder() / f"components-{_key()}"


def build() -> Path:
    """The folder of all programs, built now if it is not there. Raises ClusterError with what Go said."""
    folder = path()
    if any(folder.is_relative_to(hidden) for hidden in HIDDEN):
        raise ClusterError(
            f"{folder} cannot be used: the node has folders of its own at {', '.join(HIDDEN)}. Set NEARFIELD_CACHE to another."
        )
    if not folder.is_dir():
        with locks.held(folder.parent / "components.lock"):
            if not folder.is_dir():
                _build_into(folder)
    return folder


def _build_into(folder: Path) -> None:
    needs.require_room(folder.parent, needs.BUILD_BYTES, "A first build of the components")
    for stale in folder.parent.glob(".components-*"):  # of a build that was interrupted: nobody else holds the lock
        shutil.rmtree(stale)
    made = Path(tempfile.mkdtemp(prefix=".components-", dir=folder.parent))
    try:
        for module, arguments in BUILDS.items():
            _go_build(module, arguments, made)
        for name in LINKS:
            (made / name).symlink_to("kubernetes")
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _go_build(module: str, arguments: Sequence[str], made: Path) -> None:
    go = needs.go(module=MODULES / module)
    print(f"Building {module} (the first time takes minutes)", file=sys.stderr, flush=True)
    target = made / "kubernetes" if module == "kubernetes" else f"{made}/"
    done = locks.run(
        [go, "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-o", str(target), *arguments],
        cwd=MODULES / module,
        environment={**os.environ, "GOWORK": "off"},
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-4000:]
        raise ClusterError(f"go build of hack/realnode/upstream/{module} failed: {said}")


def _key() -> str:
    digest = hashlib.sha256(repr((sorted(BUILDS.items()), LINKS)).encode())
    for module in BUILDS:
        for file in sorted((MODULES / module).rglob("*")):
            if file.name in {"go.mod", "go.sum"} or file.suffix == ".go":
                digest.update(f"{file.relative_to(MODULES)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
