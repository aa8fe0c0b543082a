# SPDX-License-Identifier: Apache-2.0
"""The right to use an instance of MIG, as the NVIDIA driver shows it below /proc/driver/nvidia/capabilities: a file for each
GPU instance and each compute instance, which names the minor number of a character device (MIG User Guide, "Device Nodes and
Capabilities"). Whoever can open the device of both may use the instance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from discovery import findings, mig, sysfs

_ROOT = "proc/driver/nvidia/capabilities"
_MINOR = re.compile(r"^DeviceFileMinor: *([0-9]{1,7})$", re.MULTILINE)
_MAJOR = re.compile(r"^ *([0-9]{1,4}) nvidia-caps$", re.MULTILINE)
_NUMBERED = re.compile(r"[a-z]{2}(0|[1-9][0-9]{0,3})")


def instances(files: sysfs.Sysfs, minor: int, found: findings.Findings) -> Mapping[int, tuple[int, ...]]:
    """The numbers of the GPU instances of the GPU of a minor number, with those of their compute instances."""
    directory = sysfs.Directory(files, f"{_ROOT}/gpu{minor}/mig", subject=f"gpu{minor}", found=found)
    return {number: _numbers(directory, "ci", f"gi{number}") for number in _numbers(directory, "gi")}


def nodes(
    files: sysfs.Sysfs, minor: int, instance: mig.MigInstance, found: findings.Findings, *, subject: object
) -> tuple[mig.CapabilityNode, ...]:
    """The devices of an instance: of the GPU instance and of the compute instance. None where one of them cannot be told, which
    is a Finding on `subject`.
    """
    directory = sysfs.Directory(files, f"{_ROOT}/gpu{minor}/mig", subject=subject, found=found)
    major = _major(files, found)
    told = []
    for name in (f"gi{instance.gpu_instance}", f"gi{instance.gpu_instance}/ci{instance.compute_instance}"):
        match = _MINOR.search(directory.text(f"{name}/access") or "")
        if major is None or match is None:
            lacks = "proc/devices" if major is None else f"{directory.path}/{name}/access"
            found.warning(
                "mig-capability-missing",
                subject,
                f"/{lacks} does not tell the device of GPU instance {instance.gpu_instance}, so no container can use it; is the "
                "/proc of the node mounted, and the driver of this boot?",
            )
            return ()
        node = int(match[1])
        told.append(mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{node}", major=major, minor=node))
    return tuple(told)


def _major(files: sysfs.Sysfs, found: findings.Findings) -> int | None:
    text = sysfs.Directory(files, "proc", subject="nvidia-caps", found=found).text("devices") or ""
    match = _MAJOR.search(text.partition("Block devices:")[0])
    return None if match is None else int(match[1])


def _numbers(directory: sysfs.Directory, prefix: str, below: str | None = None) -> tuple[int, ...]:
    matches = (_NUMBERED.fullmatch(name) for name in directory.names(below) if name.startswith(prefix))
    return tuple(sorted(int(match[1]) for match in matches if match is not None))
