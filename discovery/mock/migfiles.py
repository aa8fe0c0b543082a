# SPDX-License-Identifier: Apache-2.0
"""The files by which the NVIDIA driver grants the use of MIG instances: capabilities in procfs, their nodes in /dev.

    proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<N>/access          of a GPU instance
    proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<N>/ci<M>/access    of a compute instance
    proc/driver/nvidia-caps/mig-minors                                   the number of every one that could be
    dev/nvidia-caps/nvidia-cap<number>

They come and go with the instances (MIG User Guide, "Device Nodes and Capabilities"), which are in the state and not in the
Recording. The kernel sends no uevents for them: procfs has none, and the nodes are made by nvidia-modprobe.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from discovery.mock import state, treefiles
from discovery.mock.view import View

_CAPABILITIES = "proc/driver/nvidia/capabilities"
_MINORS = "proc/driver/nvidia-caps/mig-minors"
_NODES = "dev/nvidia-caps"

_CONFIG, _MONITOR, _FIRST = 1, 2, 3
_GPUS = 32
_GPU_INSTANCES = 15
_COMPUTE_INSTANCES = 8
_OF_A_GPU_INSTANCE = 1 + _COMPUTE_INSTANCES
_OF_A_GPU = _GPU_INSTANCES * _OF_A_GPU_INSTANCE

_WORLD_READABLE = 0o444


def minor(gpu: int, instance: int, compute_instance: int | None = None) -> int:
    """The minor number of a capability, by the minor of its GPU and the ids of the instances."""
    number = _FIRST + gpu * _OF_A_GPU + instance * _OF_A_GPU_INSTANCE
    return number if compute_instance is None else number + 1 + compute_instance


@functools.cache
def minors() -> str:
    """mig-minors: the same on every node."""
    lines = [f"config {_CONFIG}", f"monitor {_MONITOR}"]
    for gpu in range(_GPUS):
        for instance in range(_GPU_INSTANCES):
            name = f"gpu{gpu}/gi{instance}"
            lines.append(f"{name}/access {minor(gpu, instance)}")
            lines += (f"{name}/ci{each}/access {minor(gpu, instance, each)}" for each in range(_COMPUTE_INSTANCES))
    return "".join(f"{line}\n" for line in lines)


def of_gpu(gpu: state.Gpu) -> dict[str, str]:
    """The files of the instances of a GPU: path -> text. None for one whose minor is not known."""
    files: dict[str, str] = {}
    if gpu.mig is None or gpu.minor is None:
        return files
    for instance in gpu.mig.instances:
        here = f"{_CAPABILITIES}/gpu{gpu.minor}/mig/gi{instance.id}"
        files.update(_capability(here, minor(gpu.minor, instance.id)))
        for each in instance.compute:
            files.update(_capability(f"{here}/ci{each.id}", minor(gpu.minor, instance.id, each.id)))
    return files


def come(root: Path, before: state.Gpu | None, after: state.Gpu) -> None:
    """Writes the files that a GPU has after a change and had not before it; before the change shows in NVML."""
    there = {} if before is None else of_gpu(before)
    for path, text in of_gpu(after).items():
        if path not in there:
            treefiles.replace(root, path, text)


def go(root: Path, before: state.Gpu, after: state.Gpu) -> None:
    """Removes the files that a GPU had before a change and has not after it."""
    for path in of_gpu(before).keys() - of_gpu(after).keys():
        treefiles.remove(root, path)


def fit(root: Path, view: View) -> bool:
    """Whether the files are those of the instances that NVML shows."""
    return set(_there(root)) == _wanted(view).keys()


def repair(root: Path, view: View) -> None:
    """Makes the files those of the instances that NVML shows, whatever stands there: after a rendering, when GPUs or the driver
    came or went, and where a process died between the state and the files. Under the lock of the machine.
    """
    wanted = _wanted(view)
    there = set(_there(root))
    for path in there - wanted.keys():
        treefiles.remove(root, path)
    for path, text in wanted.items():
        if path not in there:
            treefiles.replace(root, path, text)


def _wanted(view: View) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for gpu in view.gpus:
        wanted.update(of_gpu(gpu))
    if any(gpu.mig is not None for gpu in view.gpus):
        wanted[_MINORS] = minors()
    return wanted


def _capability(directory: str, number: int) -> Mapping[str, str]:
    text = f"DeviceFileMinor: {number}\nDeviceFileMode: {_WORLD_READABLE}\nDeviceFileModify: 1\n"
    return {f"{directory}/access": text, f"{_NODES}/nvidia-cap{number}": ""}


def _there(root: Path) -> Iterator[str]:
    for directory, _, names in os.walk(root / _CAPABILITIES):
        inner = Path(directory).relative_to(root)
        if "gi" in inner.name or "ci" in inner.name:
            yield from (f"{inner}/{name}" for name in names)
    if (root / _MINORS).exists():
        yield _MINORS
    nodes = root / _NODES
    if nodes.is_dir():
        for node in nodes.iterdir():
            number = node.name.removeprefix("nvidia-cap")
            if number.isdecimal() and int(number) >= _FIRST:
                yield f"{_NODES}/{node.name}"
