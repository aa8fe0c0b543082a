# SPDX-License-Identifier: Apache-2.0
"""What the agent asks of the MPS supervisor, and what a container needs to reach its share. Pure.

A daemon belongs to one published device, a whole GPU or a MIG instance, and is named by it. With MPS v3 every share has a namespace of
its own, whose limits the server holds, and a container gets the folder of that namespace and nothing else. With legacy MPS all
shares of a device have the daemon's folder, and their limits in their environment.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

SOCKET = "supervisor.sock"
"""In the supervisor's folder."""

SERVER = "shares"
"""Name of the one server of a daemon of MPS v3."""

_PIPES = "pipes"
SHM = "shm"
"""In the folder of a device: what a legacy daemon and its clients share as /dev/shm."""
_CLIENT_SHM = "/dev/shm"  # noqa: S108 - where a client looks for it, in its container
_NAMESPACE = "s"
_DIGITS = 24


class Protocol(StrEnum):
    """Which interface of nvidia-cuda-mps-control."""

    V3 = "v3"
    LEGACY = "legacy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One share of a device. `device`: its published name; `uuid`: of the GPU or MIG instance, as NVML and CUDA spell it; `share_id`: as
    the scheduler gave it. `memory` in bytes, `compute` in percent of the device, None: no limit. `below_normal`: its work waits
    for that of others.
    """

    device: str
    uuid: str
    share_id: str
    protocol: Protocol
    memory: int | None = None
    compute: int | None = None
    below_normal: bool = False

    @property
    def namespace(self) -> str:
        """The name of its namespace: lower-case letters and digits, at most 64 (MPS v3 interface, CLI Command Structure)."""
        return _NAMESPACE + hashlib.sha256(self.share_id.encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What a container needs: variables, and folders of the host by their paths in the container."""

    environment: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    """(host path, container path), writable: a socket is written to."""


def folder(directory: PurePosixPath, device: str) -> PurePosixPath:
    """What belongs to the daemon of a device."""
    return directory / device


def pipes(directory: PurePosixPath, device: str) -> PurePosixPath:
    """CUDA_MPS_PIPE_DIRECTORY of the daemon of a device."""
    return folder(directory, device) / _PIPES


def shm(directory: PurePosixPath, device: str) -> PurePosixPath:
    """What a legacy daemon and its clients share as /dev/shm."""
    return folder(directory, device) / SHM


def edits(directory: PurePosixPath, share: Share) -> Edits:
    """What a container needs to be a client of its share. The host path and the path in the container are the same."""
    pipe = pipes(directory, share.device)
    if share.protocol is Protocol.V3:
        place = str(pipe / SERVER / share.namespace)
        return Edits(environment=(("CUDA_MPS_PIPE_DIRECTORY", place),), mounts=((place, place),))
    environment = [("CUDA_MPS_PIPE_DIRECTORY", str(pipe))]
    if share.compute is not None:
        environment.append(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(share.compute)))
    if share.memory is not None:
        environment.append(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"{share.uuid}={share.memory >> 20}M"))
    if share.below_normal:
        environment.append(("CUDA_MPS_CLIENT_PRIORITY", "1"))
    memory = str(shm(directory, share.device))
    return Edits(environment=tuple(environment), mounts=((str(pipe), str(pipe)), (memory, _CLIENT_SHM)))
