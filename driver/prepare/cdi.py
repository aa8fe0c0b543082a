# SPDX-License-Identifier: Apache-2.0
"""CDI specs: which ids a claim's devices have, and what stands in the files behind them. Pure.

Rules of the Container Device Interface (tags.cncf.io/container-device-interface, SPEC.md and its validation): a kind is
`vendor/class`; a device name may start with a digit from version 0.5.0 on, `hostPath` of a device node came with 0.5.0 and
annotations with 0.6.0, which containerd has known since 1.7.14; annotation keys follow the rules of Kubernetes and all of them
together have at most 256 KiB; a device without edits is refused; a runtime skips a file that has one unknown key.
A runtime applies the edits of an id once for each time it is named, and a later mount, node or variable of the same name
takes the place of the earlier one.

A MIG instance is the node of its GPU and two nodes of capabilities, of the GPU instance and of its compute instance. A container
with two instances of one GPU has the nodes of both, but CUDA uses one MIG instance in a process: the first that it finds, or
the one whose UUID is in CUDA_VISIBLE_DEVICES (MIG User Guide, "CUDA Device Enumeration"). The UUIDs are in the variables.

A share is the node of its GPU, or those of its instance, and where MPS holds it the variables and the folder of its server. A process
is a client of one MPS server: of several such shares in a container the one that is named last is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from discovery import mig
from driver.mps import shares as mps
from driver.prepare import ledger, metadata

CDI_VERSION = "0.6.0"
"""The lowest version that knows annotations."""

NODE_DEVICE = "driver"
NULL_DEVICE = "/dev/null"
"""What stands behind every device node of a mock machine: a node without the hardware still starts the container."""

MPS_DIRECTORY = PurePosixPath("/run/nearfield/mps")

FILE_MAX_BYTES = 1 << 20
"""Far above any file of ours: 32 results need about 20 KiB."""

_CLAIM_FILE = re.compile(r"(?P<uid>[0-9A-Za-z][0-9A-Za-z-]*)\.json")
_NO_VARIABLE = re.compile(r"[^0-9A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file of the host in a container, read-only."""

    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEdits:
    """What every container with a GPU of this node gets: device nodes by their path in the container, and mounts."""

    device_nodes: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How specs of this agent are spelled: its driver name, and whether its devices are those of a mock machine. `mps`: the folder of
    the MPS supervisor.
    """

    driver: str
    mock: bool
    mps: PurePosixPath = MPS_DIRECTORY

    @property
    def node_id(self) -> str:
        """The CDI id of the driver's libraries, programs and common device nodes."""
        return f"{self.driver}/node={NODE_DEVICE}"

    @property
    def node_file(self) -> str:
        """The file of `node_id`. No claim's file can have this name: they go on with `_`."""
        return f"{self.driver}-node.json"

    def device_id(self, claim_uid: str, device: str, share_id: str | None) -> str:
        """The CDI id of a device of a claim: unique, as kubelet tells devices' health apart by it, and never used again
        with other content, as runtimes keep what they have read.
        """
        return f"{self.driver}/claim={claim_uid}-{device}" + (f"-{share_id}" if share_id else "")

    def claim_file(self, claim_uid: str) -> str:
        """The file of a claim."""
        return f"{self.driver}_{claim_uid}.json"

    def claim_of(self, file_name: str) -> str | None:
        """The claim UID that a file name spells, None where it is no claim's file of ours."""
        prefix = f"{self.driver}_"
        match = _CLAIM_FILE.fullmatch(file_name.removeprefix(prefix)) if file_name.startswith(prefix) else None
        return match["uid"] if match else None

    def claim_spec(
        self, entry: ledger.Entry, columns: ledger.Columns | None = None, *, described: str | None = None
    ) -> bytes:
        """The file of a claim, from its entry alone, so that it can be written again at any time. `columns`: the entry as
        text, where that is known already. `described`: the folder of its metadata files on the host, None where they are not there.
        """
        text, checksum = ledger.to_document(columns or ledger.to_columns(entry), since=ledger.readable_since(entry))
        devices = {device.name: device for device in entry.devices}
        named = {
            _name_of(ids[0]): (devices[result.device], result)
            for result, ids in zip(entry.results, entry.cdi_ids, strict=True)
        }
        mounted = {} if described is None else self._descriptions(entry, described)
        return _encode(
            {
                "cdiVersion": CDI_VERSION,
                "kind": f"{self.driver}/claim",
                "annotations": {self._record_key: text, self._checksum_key: checksum},
                "devices": [
                    {"name": name, "containerEdits": self._claim_edits(name, device, result, mounted.get(name, []))}
                    for name, (device, result) in named.items()
                ],
                # The variable keeps NVIDIA's own container runtime, where one is installed, from adding all GPUs.
                "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
            }
        )

    def _claim_edits(
        self, name: str, device: ledger.HeldDevice, result: ledger.Result, described: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """What a container gets of one device of a claim: the nodes, the way to MPS where that holds its share, and the files that
        describe its devices, by their paths on the host and in the container.
        """
        edits: dict[str, Any] = {
            "env": [f"{_variable(name)}={device.uuid}"],
            "deviceNodes": [*self._device_nodes(device.nodes), *self._capabilities(device.caps)],
        }
        mounts = [_mount(host, place, "ro") for host, place in described]
        share = ledger.mps_share(device, result)
        if share is not None:
            client = mps.edits(self.mps, share)
            edits["env"] += [f"{variable}={value}" for variable, value in client.environment]
            mounts += [_mount(host, place, "rw") for host, place in client.mounts]
        return edits | {"mounts": mounts} if mounts else edits

    def _descriptions(self, entry: ledger.Entry, folder: str) -> dict[str, list[tuple[str, str]]]:
        """The metadata files of a claim, by the name of the CDI device that mounts them. A device that a claim has twice, once for
        admin access, is one of CDI.
        """
        found: dict[str, list[tuple[str, str]]] = {}
        for result, ids in zip(entry.results, entry.cdi_ids, strict=True):
            if result.described is not None:
                request = ledger.base_request(result.request)
                place = metadata.container_path(result.described, request, self.driver)
                found.setdefault(_name_of(ids[0]), []).append((f"{folder}/{metadata.file_name(request)}", place))
        return found

    def node_spec(self, edits: NodeEdits) -> bytes:
        """The file of `node_id`."""
        container: dict[str, Any] = {"deviceNodes": self._device_nodes(edits.device_nodes)}
        if edits.mounts:
            container["mounts"] = [
                {
                    "hostPath": mount.host_path,
                    "containerPath": mount.container_path,
                    "options": ["ro", "nosuid", "nodev", "bind"],
                }
                for mount in edits.mounts
            ]
        return _encode(
            {
                "cdiVersion": CDI_VERSION,
                "kind": f"{self.driver}/node",
                "devices": [{"name": NODE_DEVICE, "containerEdits": container}],
            }
        )

    def entry_of(self, data: bytes) -> ledger.Entry:
        """The entry that a claim's file carries. Raises DamagedError."""
        try:
            spec = json.loads(data)
            annotations: Mapping[str, Any] = spec["annotations"]
            text, checksum = annotations[self._record_key], annotations[self._checksum_key]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ledger.DamagedError(f"it carries no record: {error}") from error
        if not isinstance(text, str) or not isinstance(checksum, str):
            raise ledger.DamagedError("its annotations are no text")
        return ledger.from_document(text, checksum)

    @property
    def _record_key(self) -> str:
        return f"{self.driver}/record"

    @property
    def _checksum_key(self) -> str:
        return f"{self.driver}/record-crc32"

    def _device_nodes(self, paths: Sequence[str]) -> list[dict[str, str]]:
        if self.mock:
            return [{"path": path, "hostPath": NULL_DEVICE} for path in paths]
        return [{"path": path} for path in paths]

    def _capabilities(self, caps: Sequence[mig.CapabilityNode]) -> list[dict[str, str | int]]:
        """Type and numbers make a runtime create the node without looking for one on the host."""
        if self.mock:
            return [{"path": cap.path, "hostPath": NULL_DEVICE} for cap in caps]
        return [{"path": cap.path, "type": "c", "major": cap.major, "minor": cap.minor} for cap in caps]


def _variable(device_name: str) -> str:
    """The environment variable of a CDI device; unique, as the device's name is."""
    return "NEARFIELD_DEVICE_" + _NO_VARIABLE.sub("_", device_name.upper())


def _name_of(cdi_id: str) -> str:
    """The name of a CDI device, without its kind."""
    return cdi_id.partition("=")[2]


def _mount(host: str, place: str, access: str) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": place, "options": [access, "nosuid", "nodev", "noexec", "bind"]}


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _encode(document: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(document).encode()
