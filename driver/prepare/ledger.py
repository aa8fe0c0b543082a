# SPDX-License-Identifier: Apache-2.0
"""What is known of a prepared claim, as a value and as the JSON that is kept of it. Pure.

One `Entry` is one row of the record and, as an annotation, part of the claim's CDI file. The names below are on disks of
running nodes: keys are added, never renamed and never given another meaning, and a reader ignores keys that it does not
know. `READABLE_SINCE` moves only when an older agent would hand out a device twice by reading what we write; where only some
entries would make it do that, those say so themselves (`readable_since`), and nodes without them can go back a version.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from discovery import address, mig
from driver import values
from driver.prepare import held, shareuse, typed

VERSION = 3
"""Version of what is written."""

READABLE_SINCE = 1
"""The oldest reader that may read what is written."""

PARTITIONS_SINCE = 2
"""The oldest reader that may read an entry with a partition: an older one would give the whole GPU to another claim."""

SHARES_SINCE = 3
"""The oldest reader that may read an entry with a share: an older one would give the device to one claim alone."""

DamagedError = typed.DamagedError
HeldDevice = held.HeldDevice
Result = held.Result
Room = shareuse.Room
ShareUse = shareuse.ShareUse
mps_share = held.mps_share
_MIG = "mig"
_MADE_AT = "madeAt"
_PODS = "pods"


class ClaimState(StrEnum):
    """How far a claim is. Only a completed one is answered from the record; all of them hold their devices."""

    STARTED = "started"
    """Hardware may have been changed for it; not answered yet."""
    COMPLETED = "completed"
    RELEASING = "releasing"
    """Kubelet was told that it is gone; hardware is still being put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A claim in the record. `cdi_ids` has one tuple for each result; `hardware` says what must be put back:
    `{"mig": [{"gpu": "0000:1b:00.0", "profileID": 19, "start": 0}], "madeAt": 1764460800.0}`, `{"pods": ["<UID>"]}` for pods whose
    cgroups have limits, and what was found where something else was set.
    """

    claim: values.ClaimRef
    state: ClaimState
    boot_id: str
    devices: tuple[HeldDevice, ...]
    results: tuple[Result, ...]
    cdi_ids: tuple[tuple[str, ...], ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> tuple[str, ...]:
        """The devices that are its own meanwhile, as a whole or in shares: all but those of admin access."""
        return tuple(sorted({result.device for result in self.results if not result.admin}))

    @property
    def held_in_shares(self) -> tuple[str, ...]:
        """Those of `holds` that others may have shares of, too."""
        return tuple(sorted({result.device for result in self.results if result.share is not None}))

    @property
    def shared(self) -> tuple[tuple[HeldDevice, Result], ...]:
        """The results that are shares, with their devices."""
        devices = {device.name: device for device in self.devices}
        return tuple((devices[result.device], result) for result in self.results if result.share is not None)

    @property
    def enforced(self) -> bool:
        """Whether something is set for its shares that has to be put back."""
        return any(result.share is not None and result.share.enforced for result in self.results)

    @property
    def pods(self) -> tuple[str, ...]:
        """UIDs of the pods whose cgroups have limits for its shares."""
        return _pods(self.hardware)

    def answers(self, boot_id: str) -> bool:
        """Whether a repeated Prepare is answered from this entry: what was prepared before a reboot is prepared again."""
        return self.state is ClaimState.COMPLETED and self.boot_id == boot_id

    @property
    def partitions(self) -> tuple[mig.Partition, ...]:
        """The MIG instances that were made for it, or may have been, and must be removed after it."""
        return _partitions(self.hardware)

    def partition_of(self, device: HeldDevice) -> mig.Partition | None:
        """The MIG instance that was made for a device of it, None where none was."""
        start = None if device.place is None else device.place.start
        parts = (part for part in self.partitions if str(part.gpu) == device.address and part.start == start)
        return next(parts, None)

    @property
    def made_at(self) -> float | None:
        """When its MIG instances were made, seconds since the epoch; None where none were."""
        return _made_at(self.hardware)

    def devices_held(self) -> tuple[HeldDevice, ...]:
        """The devices of `holds`."""
        names = frozenset(self.holds)
        return tuple(device for device in self.devices if device.name in names)


def hardware_of(partitions: Iterable[mig.Partition], *, made_at: float | None = None) -> Mapping[str, Any]:
    """What an entry says of the MIG instances that are made for it, and when they were there (seconds since the epoch)."""
    found = [{"gpu": str(part.gpu), "profileID": part.profile_id, "start": part.start} for part in sorted(partitions)]
    if not found:
        return {}
    return {_MIG: found} if made_at is None else {_MIG: found, _MADE_AT: made_at}


def with_pods(hardware: Mapping[str, Any], pods: Sequence[str]) -> Mapping[str, Any]:
    """What an entry says whose shares limit the cgroups of some pods."""
    return {**hardware, _PODS: list(pods)} if pods else hardware


def uses_of(entry: Entry, device: str) -> tuple[ShareUse, ...]:
    """The shares that an entry has of a device."""
    return tuple(result.share for result in entry.results if result.share is not None and result.device == device)


def overlap(one: HeldDevice, other: HeldDevice) -> bool:
    """Whether two devices need the same part of one GPU."""
    if values.gpu_of(one.name) != values.gpu_of(other.name):
        return False
    return one.place is None or other.place is None or one.place.overlaps(other.place)


def readable_since(entry: Entry) -> int:
    """The oldest reader that may read an entry."""
    if any(result.share is not None for result in entry.results):
        return SHARES_SINCE
    return PARTITIONS_SINCE if any(device.place is not None for device in entry.devices) else READABLE_SINCE


def base_request(request: str) -> str:
    """The name kubelet compares with the container's: `gpu` of `gpu/high-memory`."""
    return request.partition("/")[0]


def answer(entry: Entry) -> values.Prepared:
    """What kubelet is told of a completed claim; equal for equal entries."""
    return values.Prepared(
        devices=tuple(
            values.PreparedDevice(
                request_names=(base_request(result.request),),
                pool=result.pool,
                device=result.device,
                cdi_device_ids=cdi_ids,
                share_id=result.share_id,
            )
            for result, cdi_ids in zip(entry.results, entry.cdi_ids, strict=True)
        )
    )


class Columns(NamedTuple):
    """An entry as one row of the record: JSON text from `devices` on, and a checksum of all the texts as written, so that
    what a later version adds never makes an older row look damaged.
    """

    claim_uid: str
    namespace: str
    name: str
    state: str
    boot_id: str
    devices: str
    results: str
    cdi_ids: str
    hardware: str
    checksum: int


def to_columns(entry: Entry) -> Columns:
    """The row of an entry; equal for equal entries."""
    claim = entry.claim
    devices = _dump([held.device_object(device) for device in entry.devices])
    results = _dump([held.result_object(result) for result in entry.results])
    cdi_ids = _dump(entry.cdi_ids)
    hardware = _dump(entry.hardware) if entry.hardware else "{}"
    texts = (
        claim.uid,
        claim.namespace,
        claim.name,
        entry.state.value,
        entry.boot_id,
        devices,
        results,
        cdi_ids,
        hardware,
    )
    return Columns(*texts, _checksum(*texts))


def from_columns(columns: Columns) -> Entry:
    """The entry of a row. Raises DamagedError."""
    _require_intact(columns)
    try:
        devices, results, cdi_ids, hardware = typed.load(f"[{','.join(columns[5:9])}]")
    except ValueError as error:
        raise typed.DamagedError(f"the row of claim {columns.claim_uid!r} has other columns") from error
    return _entry(
        uid=columns.claim_uid,
        namespace=columns.namespace,
        name=columns.name,
        state=columns.state,
        boot_id=columns.boot_id,
        devices=devices,
        results=results,
        cdi_ids=cdi_ids,
        hardware=hardware,
    )


def held_devices(columns: Columns) -> tuple[frozenset[str], frozenset[str]]:
    """What the row's entry holds alone, and what in shares, for a look at very many rows. Raises DamagedError."""
    _require_intact(columns)
    alone: set[str] = set()
    shared: set[str] = set()
    for result in map(typed.mapping, typed.items(typed.load(columns.results))):
        if result.get("adminAccess") is not True:
            (shared if "share" in result else alone).add(typed.string(result, "device"))
    return frozenset(alone), frozenset(shared)


def _require_intact(columns: Columns) -> None:
    try:
        intact = columns.checksum == _checksum(*columns[:-1])
    except TypeError as error:
        raise typed.DamagedError("a column is of another type than text") from error
    if not intact:
        raise typed.DamagedError(f"the row of claim {columns.claim_uid!r} differs from its checksum")


def to_document(columns: Columns, *, since: int = READABLE_SINCE) -> tuple[str, str]:
    """The row of an entry as one JSON text, and the checksum of that text. `since`: `readable_since` of the entry. The version is
    that one, too, as what an older version wrote of the same entry must not look changed.
    """
    text = (
        f'{{"version":{since},"readableSince":{since},"uid":{_dump(columns.claim_uid)},'
        f'"namespace":{_dump(columns.namespace)},"name":{_dump(columns.name)},"state":{_dump(columns.state)},'
        f'"bootID":{_dump(columns.boot_id)},"devices":{columns.devices},"results":{columns.results},'
        f'"cdiIDs":{columns.cdi_ids},"hardware":{columns.hardware}}}'
    )
    return text, f"{_checksum(text):08x}"


def from_document(text: str, checksum: str) -> Entry:
    """The entry in a JSON text. Raises DamagedError, also where a newer version says that this one must not read it."""
    if checksum != f"{_checksum(text):08x}":
        raise typed.DamagedError("the text differs from its checksum")
    document = typed.mapping(typed.load(text))
    since = document.get("readableSince")
    if not isinstance(since, int) or since > VERSION:
        raise typed.DamagedError(
            f"it was written for readers of version {typed.shown(since)}, and this one is {VERSION}"
        )
    return _entry(
        uid=typed.string(document, "uid"),
        namespace=typed.string(document, "namespace"),
        name=typed.string(document, "name"),
        state=typed.string(document, "state"),
        boot_id=typed.string(document, "bootID"),
        devices=document.get("devices"),
        results=document.get("results"),
        cdi_ids=document.get("cdiIDs"),
        hardware=document.get("hardware"),
    )


def _checksum(*texts: str) -> int:
    """CRC-32: finds every single flipped bit and every burst of up to 32."""
    return zlib.crc32("\x00".join(texts).encode(errors="surrogateescape"))


_dump = json.JSONEncoder(separators=(",", ":")).encode


def _partitions(hardware: Mapping[str, Any]) -> tuple[mig.Partition, ...]:
    return tuple(_partition(value) for value in typed.items(hardware.get(_MIG, [])))


def _pods(hardware: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(typed.text(pod) for pod in typed.items(hardware.get(_PODS, [])))


def _made_at(hardware: Mapping[str, Any]) -> float | None:
    value = hardware.get(_MADE_AT)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise typed.DamagedError(f"{typed.shown(value)} stands where a time belongs")
    return value


def _partition(value: Any) -> mig.Partition:
    document = typed.mapping(value)
    try:
        gpu = address.parse(typed.string(document, "gpu"))
    except ValueError as error:
        raise typed.DamagedError(str(error)) from error
    return mig.Partition(
        gpu=gpu, profile_id=typed.number(document.get("profileID")), start=typed.number(document.get("start"))
    )


def _entry(
    *,
    uid: str,
    namespace: str,
    name: str,
    state: str,
    boot_id: str,
    devices: Any,
    results: Any,
    cdi_ids: Any,
    hardware: Any,
) -> Entry:
    try:
        claim_state = ClaimState(state)
    except ValueError as error:
        raise typed.DamagedError(f"{typed.shown(state)} is no state of a claim") from error
    entry = Entry(
        claim=values.ClaimRef(uid=values.ClaimUid(uid), namespace=namespace, name=name),
        state=claim_state,
        boot_id=boot_id,
        devices=tuple(held.device_of(device) for device in typed.items(devices)),
        results=tuple(held.result_of(result) for result in typed.items(results)),
        cdi_ids=tuple(tuple(typed.text(cdi_id) for cdi_id in typed.items(ids)) for ids in typed.items(cdi_ids)),
        hardware=typed.mapping(hardware),
    )
    _partitions(entry.hardware)
    _made_at(entry.hardware)
    _pods(entry.hardware)
    known = {device.name: device for device in entry.devices}
    if len(entry.results) != len(entry.cdi_ids) or not all(entry.cdi_ids):
        raise typed.DamagedError("results and CDI ids do not belong together")
    for result in entry.results:
        device = known.get(result.device)
        if device is None:
            raise typed.DamagedError("a result names a device that is not among the devices")
        if not result.admin and (result.share is None) != (device.room is None):
            raise typed.DamagedError("a result and its device do not agree whether it is a share")
        if result.admin and result.share is not None:
            raise typed.DamagedError("admin access has a share")
    return entry
