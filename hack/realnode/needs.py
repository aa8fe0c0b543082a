# SPDX-License-Identifier: Apache-2.0
"""What the machine must have: programs from Debian packages, the right to make namespaces, and Go to build with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hack.realnode.errors import ClusterError

PACKAGES: Mapping[str, str] = {
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
    "/bin/ip": "iproute2",
    "/usr/bin/nsenter": "util-linux",
    "/usr/bin/mount": "mount",
    "/usr/bin/openssl": "openssl",
}
"""File that must be there: the Debian package that brings it."""

GO_MINIMUM = (1, 26)


def require_root() -> None:
    """Raises ClusterError where namespaces, mounts and cgroups cannot be made."""
    if os.geteuid() != 0:
        raise ClusterError(
            "A real node needs root: it makes network and mount namespaces, cgroups and containers. Run it as root, or use"
            " hack/kind-up where there is Docker."
        )


def install() -> None:
    """Installs the packages that are missing. Raises ClusterError where that cannot be done."""
    missing = sorted({package for file, package in PACKAGES.items() if not Path(file).exists()})
    if not missing:
        return
    apt = shutil.which("apt-get")
    if apt is None:
        raise ClusterError(
            f"Install these first (they are Debian's names, and there is no apt-get here): {' '.join(missing)}"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (("update", "-qq"), ("install", "-qq", "--yes", "--no-install-recommends", *missing)):
        done = subprocess.run([apt, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"apt-get {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")


def go() -> str:
    """The Go command. Raises ClusterError where there is none, or an old one."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if found is None:
        raise ClusterError(
            "The components of the node are built from Go modules, and there is no `go` on the PATH: install Go"
            f" {GO_MINIMUM[0]}.{GO_MINIMUM[1]} or newer (https://go.dev/dl)."
        )
    text = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout.strip()
    numbers = tuple(int(part) for part in text.removeprefix("go").split(".")[:2] if part.isdecimal())
    if numbers < GO_MINIMUM:
        raise ClusterError(f"{found} is {text}; the components need {GO_MINIMUM[0]}.{GO_MINIMUM[1]} or newer.")
    return found
