# SPDX-License-Identifier: Apache-2.0
"""The cgroups of pods in a hierarchy of a rendered tree, where kubelet would make them (pkg/kubelet/cm of Kubernetes:
pod_container_manager_linux.go and cgroup_manager_linux.go; systemd's names by ToSystemd).

    kubepods/burstable/pod<uid>                                                        cgroupfs
    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid, - as _>.slice  systemd
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from discovery.mock import dmem

Qos = Literal["guaranteed", "burstable", "besteffort"]
Driver = Literal["cgroupfs", "systemd"]

_UID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
_KERNELS = (Path("/sys"), Path("/proc"))
_CLASSES: tuple[Qos, ...] = ("guaranteed", "burstable", "besteffort")
_DRIVERS: tuple[Driver, ...] = ("cgroupfs", "systemd")


def make(
    root: Path, pod_uid: str, *, qos: Qos = "burstable", driver: Driver = "cgroupfs", hand_down: bool = True
) -> Path:
    """Make the cgroup of a pod, with all above it; its folder. What is there already stays. `root`: of the hierarchy. `hand_down`:
    whether cgroups above hand the dmem controller down, if there is one: kubelet has every controller of the root handed down
    (CreateCgroupPath of github.com/opencontainers/cgroups, fs2/create.go), others may not.

    ValueError for a UID that is none, and for a hierarchy of the kernel.
    """
    place = root
    for name in _names(root, pod_uid, qos, driver):
        place = _made(root, place / name, hand_down=hand_down)
    return place


def remove(root: Path, pod_uid: str) -> None:
    """Remove the cgroup of a pod, wherever it is. What holds other pods stays. ValueError as `make`."""
    for qos in _CLASSES:
        for driver in _DRIVERS:
            folder = root.joinpath(*_names(root, pod_uid, qos, driver))
            if folder.is_dir():
                shutil.rmtree(folder)


def _names(root: Path, pod_uid: str, qos: Qos, driver: Driver) -> tuple[str, ...]:
    if not _UID.fullmatch(pod_uid):
        raise ValueError(f"{pod_uid!r} is no UID")
    if any(root.resolve().is_relative_to(kernel) for kernel in _KERNELS) or not root.is_dir():
        raise ValueError(f"{root} is no hierarchy of a rendered tree")
    between = "" if qos == "guaranteed" else qos
    if driver == "cgroupfs":
        return tuple(name for name in ("kubepods", between, f"pod{pod_uid}") if name)
    steps = [name for name in ("kubepods", between, f"pod{pod_uid.replace('-', '_')}") if name]
    return tuple("-".join(steps[: end + 1]) + ".slice" for end in range(len(steps)))


def _made(root: Path, folder: Path, *, hand_down: bool) -> Path:
    """A cgroup, which comes with its files at once; those of version 2 if it is one of that."""
    if folder.is_dir():
        return folder
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    new.chmod(0o755)
    for name, text in _files(root, hand_down=hand_down).items():
        (new / name).write_text(text)
    try:
        new.rename(folder)
    except OSError:
        shutil.rmtree(new)
        if not folder.is_dir():  # else somebody made it meanwhile
            raise
    return folder


def _files(root: Path, *, hand_down: bool) -> dict[str, str]:
    files = {"cgroup.procs": ""}
    try:
        controllers = (root / "cgroup.controllers").read_text().split()
    except FileNotFoundError:
        return files
    down = " ".join(name for name in controllers if hand_down or name != dmem.CONTROLLER) + "\n"
    files |= {"cgroup.controllers": down, "cgroup.subtree_control": down}
    if hand_down and dmem.CONTROLLER in controllers:
        files |= dmem.files(dmem.regions(root))
    return files
