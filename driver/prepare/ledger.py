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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from discovery import address, mig
from driver import values
from driver.prepare import typed

VERSION = 2
"""Version of what is written."""

READABLE_SINCE = 1
"""The oldest reader that may read what is written."""

PARTITIONS_SINCE = 2
"""The oldest reader that may read an entry with a partition: an older one would give the whole GPU to another claim."""

DamagedError = typed.DamagedError
_MIG = "mig"
_MADE_AT = "madeAt"


class ClaimState(StrEnum):
    """How far a claim is. Only a completed one is answered from the record; all of them hold their devices."""

    STARTED = "started"
    """Hardware may have been changed for it; not answered yet."""
    COMPLETED = "completed"
    RELEASING = "releasing"
    """Kubelet was told that it is gone; hardware is still being put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device of a claim with what a container needs of it, so that neither hardware nor probe is asked again."""

    name: str
    address: str
    uuid: str
    """Empty in a started entry, for an instance that is still to be made."""
    nodes: tuple[str, ...]
    """Paths in the container, such as `/dev/nvidia0`."""
    caps: tuple[mig.CapabilityNode, ...] = ()
    """The nodes that give the right to use a MIG instance. They need not be on the host: their numbers are known."""
    place: mig.MigPlacement | None = None
    """The memory slices that it has of its GPU; None for the whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One allocation result of ours, as the scheduler wrote it. `request` is the full name, with a subrequest."""

    request: str
    pool: str
    device: str
    share_id: str | None = None
    consumed_capacity: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A claim in the record. `cdi_ids` has one tuple for each result; `hardware` says what must be put back:
    `{"mig": [{"gpu": "0000:1b:00.0", "profileID": 19, "start": 0}], "madeAt": 1764460800.0}`.
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
        """The devices that no other claim may have meanwhile: all but those of admin access."""
        return tuple(sorted({result.device for result in self.results if not result.admin}))

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


def overlap(one: HeldDevice, other: HeldDevice) -> bool:
    """Whether two devices need the same part of one GPU."""
    if values.gpu_of(one.name) != values.gpu_of(other.name):
        return False
    return one.place is None or other.place is None or one.place.overlaps(other.place)


def readable_since(entry: Entry) -> int:
    """The oldest reader that may read an entry."""
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
    devices = _dump([_device_object(device) for device in entry.devices])
    results = _dump([_result_object(result) for result in entry.results])
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


def held_devices(columns: Columns) -> frozenset[str]:
    """What the row's entry holds, for a look at very many rows. Raises DamagedError."""
    _require_intact(columns)
    results = [typed.mapping(result) for result in typed.items(typed.load(columns.results))]
    return frozenset(typed.string(result, "device") for result in results if result.get("adminAccess") is not True)


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


def _device_object(device: HeldDevice) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": device.name,
        "address": device.address,
        "uuid": device.uuid,
        "nodes": device.nodes,
    }
    if device.caps:
        document["caps"] = [{"path": cap.path, "major": cap.major, "minor": cap.minor} for cap in device.caps]
    if device.place is not None:
        document["place"] = [device.place.start, device.place.size]
    return document


def _result_object(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = {"request": result.request, "pool": result.pool, "device": result.device}
    if result.share_id is not None:
        document["shareID"] = result.share_id
    if result.consumed_capacity:
        document["consumedCapacity"] = dict(result.consumed_capacity)
    if result.admin:
        document["adminAccess"] = True
    return document


def _result(value: Any) -> Result:
    document = typed.mapping(value)
    return Result(
        request=typed.string(document, "request"),
        pool=typed.string(document, "pool"),
        device=typed.string(document, "device"),
        share_id=typed.string(document, "shareID") if "shareID" in document else None,
        consumed_capacity={
            name: typed.text(quantity) for name, quantity in typed.mapping(document.get("consumedCapacity", {})).items()
        },
        admin=document.get("adminAccess") is True,
    )


def _device(value: Any) -> HeldDevice:
    document = typed.mapping(value)
    return HeldDevice(
        name=typed.string(document, "name"),
        address=typed.string(document, "address"),
        uuid=typed.string(document, "uuid"),
        nodes=tuple(typed.text(node) for node in typed.items(document.get("nodes"))),
        caps=tuple(_capability(cap) for cap in typed.items(document.get("caps", []))),
        place=_place(document["place"]) if "place" in document else None,
    )


def _capability(value: Any) -> mig.CapabilityNode:
    document = typed.mapping(value)
    return mig.CapabilityNode(
        path=typed.string(document, "path"),
        major=typed.number(document.get("major")),
        minor=typed.number(document.get("minor")),
    )


def _place(value: Any) -> mig.MigPlacement:
    numbers = [typed.number(number) for number in typed.items(value)]
    if len(numbers) != 2:
        raise typed.DamagedError("a place has not a start and a size")
    return mig.MigPlacement(start=numbers[0], size=numbers[1])


def _partitions(hardware: Mapping[str, Any]) -> tuple[mig.Partition, ...]:
    return tuple(_partition(value) for value in typed.items(hardware.get(_MIG, [])))


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
        devices=tuple(_device(device) for device in typed.items(devices)),
        results=tuple(_result(result) for result in typed.items(results)),
        cdi_ids=tuple(tuple(typed.text(cdi_id) for cdi_id in typed.items(ids)) for ids in typed.items(cdi_ids)),
        hardware=typed.mapping(hardware),
    )
    _partitions(entry.hardware)
    _made_at(entry.hardware)
    known = {device.name for device in entry.devices}
    if len(entry.results) != len(entry.cdi_ids) or not all(entry.cdi_ids):
        raise typed.DamagedError("results and CDI ids do not belong together")
    if not all(result.device in known for result in entry.results):
        raise typed.DamagedError("a result names a device that is not among the devices")
    return entry
