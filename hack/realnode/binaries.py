# SPDX-License-Identifier: Apache-2.0
"""The components' programs: built from Go modules whose versions and checksums are committed, and kept outside the tree.

A first build of Kubernetes takes minutes and 4 GB of Go's build cache; so a build is kept under a hash of everything that decides it,
and whoever has the same sources finds it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hack.realnode import needs
from hack.realnode.errors import ClusterError

MODULES = Path(__file__).resolve().parent / "upstream"
KUBERNETES = "v1.37.2"
"""As upstream/kubernetes/go.mod requires; compiled in, because components refuse to work beside a version v0.0.0."""

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


def cache() -> Path:
    """Where built things are kept between runs."""
    given = os.environ.get("NEARFIELD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearfield"


def path() -> Path:
    """The folder of all programs, by this tree's sources; whether it has been built or not."""
    return cache() / f"components-{_key()}"


def build() -> Path:
    """The folder of all programs, built now if it is not there. Raises ClusterError with what Go said."""
    folder = path()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "components.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build_into(folder)
    return folder


def _build_into(folder: Path) -> None:
    go = needs.go()
    for stale in folder.parent.glob(".components-*"):  # of a build that was interrupted: nobody else holds the lock
        shutil.rmtree(stale)
    made = Path(tempfile.mkdtemp(prefix=".components-", dir=folder.parent))
    try:
        for module, arguments in BUILDS.items():
            print(f"Building {module} (the first time takes minutes)", file=sys.stderr, flush=True)
            target = made / "kubernetes" if module == "kubernetes" else f"{made}/"
            done = subprocess.run(
                [go, "build", "-trimpath", "-mod=readonly", "-o", str(target), *arguments],
                cwd=MODULES / module,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise ClusterError(f"go build of hack/realnode/upstream/{module}: {done.stderr.strip()[-4000:]}")
        for name in LINKS:
            (made / name).symlink_to("kubernetes")
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _key() -> str:
    digest = hashlib.sha256(repr((sorted(BUILDS.items()), LINKS)).encode())
    for module in BUILDS:
        for file in sorted((MODULES / module).rglob("*")):
            if file.name in {"go.mod", "go.sum"} or file.suffix == ".go":
                digest.update(f"{file.relative_to(MODULES)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
