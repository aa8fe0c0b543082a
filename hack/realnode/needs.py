# SPDX-License-Identifier: Apache-2.0
"""What the machine must have: programs from Debian packages, the right to make namespaces, room on its disk, and Go to build with."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from hack.realnode import layout, locks
from hack.realnode.errors import ClusterError
from hack.tools import debian, golang
from hack.tools.errors import ToolError

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

STATIC = Path("/bin/busybox")
"""Goes into an image by itself, without the libraries of this machine."""

CLUSTER_BYTES = 2 << 30
BUILD_BYTES = 6 << 30
_PT_INTERP = 3
_ALL_USERS = 2**32 - 1


def require_root() -> None:
    """Raises ClusterError where the caller is not root."""
    if os.geteuid() != 0:
        raise ClusterError(
            "A real node needs root: it makes network and mount namespaces, cgroups and containers. Run it as root, or use"
            " hack/kind-up where there is Docker."
        )


def require_rights() -> None:
    """Raises ClusterError where namespaces and mounts cannot be made: not root, or a root in a container without rights."""
    require_root()
    if int(Path("/proc/self/uid_map").read_text().split()[2]) < _ALL_USERS:
        raise ClusterError(
            "This is root of a user namespace, as in a rootless container: a real node needs the machine's root, as it makes"
            " network namespaces, mounts and cgroups."
        )
    done = locks.run(["unshare", "--mount", "--net", "--", "mount", "-t", "tmpfs", "none", "/mnt"])
    if done.returncode != 0:
        raise ClusterError(
            f"This root may not make namespaces and mounts ({done.stderr.decode(errors='replace').strip()}): a real node needs"
            " CAP_SYS_ADMIN and CAP_NET_ADMIN, which a container has when it is privileged."
        )
    for folder in Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/"):
        if os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists():
            return
    raise ClusterError("No cgroups can be made below /sys/fs/cgroup: mount them there, writable.")


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raises ClusterError where the disk of `folder` is too full for `what`."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ClusterError(
            f"{what} needs about {needed / (1 << 30):.0f} GiB below {folder}, and {free / (1 << 30):.1f} GiB are free there"
        )


def install() -> None:
    """Installs the packages that are missing. Raises ClusterError where that cannot be done."""
    with locks.held(layout.ROOT / ".install.lock"):
        missing = sorted({package for file, package in PACKAGES.items() if not Path(file).exists()})
        if STATIC.exists() and not is_static(STATIC):
            missing.append(PACKAGES[str(STATIC)])  # takes the place of package busybox
        if missing:
            try:
                debian.install(missing)
            except ToolError as error:
                raise ClusterError(str(error)) from error
    if not is_static(STATIC):
        raise ClusterError(
            f"{STATIC} needs libraries of this machine, which an image with it alone has not: apt-get install"
            f" {PACKAGES[str(STATIC)]}"
        )


def is_static(program: Path) -> bool:
    """Whether an ELF program names no loader (elf(5), PT_INTERP)."""
    content = program.read_bytes()
    if content[:5] != b"\x7fELF\x02":  # a script, or a program of 32 bits
        return False
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    kinds = (struct.unpack_from("<I", content, offset + number * size)[0] for number in range(count))
    return _PT_INTERP not in kinds


def go(*, module: Path) -> str:
    """The Go command that can build `module`; fetched where the machine has none. Raises ClusterError where none can be had."""
    try:
        return golang.command(module=module)
    except ToolError as error:
        raise ClusterError(f"The components of the node are built from Go modules. {error}") from error
