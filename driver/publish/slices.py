# SPDX-License-Identifier: Apache-2.0
"""From devices to the ResourceSlices that should stand on the server, and from what stands there to the writes. Pure.

Rules (kubernetes: dynamic-resource-allocation, resourceslice controller and scheduler):
- A pool is usable when exactly `resourceSliceCount` slices of its highest generation are there. Slices that do not belong
  are deleted first, then slices are replaced, then created; those of other pools go last.
- The generation stays as long as one write makes the new state (no slice is new, at most one changes); otherwise it is one
  above the highest ever seen and every slice is written. It never goes back, also not to one that was seen and deleted.
- Slices are laid out for 64 devices always: one taint would make 65 of them invalid, exactly when a GPU fails. Counter sets
  have slices of their own, as the API wants, behind those of the devices.
- Names begin with a fixed-width index, as the scheduler walks slices in order of name, and are the same every time: a
  repair that was lost or is seen twice makes no second slice. The hash at the end keeps nodes and drivers apart whose
  names are long, or run together.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from driver.publish import devices, limits, wire

API_VERSION = "resource.k8s.io/v1"
DEVICES_A_SLICE = limits.MAX_DEVICES_WITH_ADVANCED_FEATURES
MAX_GENERATION = 2**62
"""A higher one was not counted up to, somebody wrote it: such slices are deleted, as nothing could follow them."""

_INDEX_DIGITS = 5
_HASH_DIGITS = 10
_MAX_NAME = 253

Body = dict[str, Any]
"""A ResourceSlice as JSON."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose slices these are. The pool has the node's name; `node_uid` is None where slices are only to be looked at."""

    driver_name: str
    node_name: str
    node_uid: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this very object. `stray`: it is of another pool and stands in nobody's way."""

    name: str
    uid: str
    resource_version: str
    stray: bool = False


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace an object; the body carries the resource version that it replaces."""

    body: Body


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object."""

    body: Body


Action = Delete | Replace | Create


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The writes that are needed, in order, and the slices that stand when all are done."""

    actions: tuple[Action, ...] = ()
    result: tuple[Body, ...] = ()


def build_slices(offered: Sequence[devices.Device], *, place: Place, generation: int = 1) -> tuple[Body, ...]:
    """The slices of a pool as they would be created: the devices, then the counter sets that they consume in slices of their own;
    one without anything where there is nothing.
    """
    contents: list[Body] = [
        {"devices": [wire.device_to_json(device, driver_name=place.driver_name) for device in chunk]}
        for chunk in _chunks(offered, DEVICES_A_SLICE)
    ]
    contents += [
        {"sharedCounters": chunk} for chunk in _chunks(wire.counter_sets_to_json(offered), limits.MAX_COUNTER_SETS)
    ]
    contents = contents or [{}]
    return tuple(
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name(index, place=place)} | _owner(place),
            "spec": {
                "driver": place.driver_name,
                "nodeName": place.node_name,
                "pool": {"name": place.node_name, "generation": generation, "resourceSliceCount": len(contents)},
                **content,
            },
        }
        for index, content in enumerate(contents)
    )


def _chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def slice_name(index: int, *, place: Place, salt: int = 0) -> str:
    """The name of a pool's slice. `salt` gives another one, for the case that somebody else has taken the first."""
    identity = "\0".join((place.driver_name, place.node_name, *([str(salt)] if salt else [])))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_HASH_DIGITS]
    head = f"{index:0{_INDEX_DIGITS}x}-{place.driver_name}-{place.node_name}"
    return f"{head[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-.')}-{digest}"


def is_ours(body: Mapping[str, Any], *, place: Place) -> bool:
    """Whether a slice claims to be of this driver and node."""
    spec = body.get("spec")
    return (
        isinstance(spec, Mapping)
        and spec.get("driver") == place.driver_name
        and spec.get("nodeName") == place.node_name
    )


def highest_generation(actual: Sequence[Mapping[str, Any]]) -> int:
    """Of the slices that are ours; 0 where there is none."""
    return max((generation for body in actual if (generation := generation_of(body)) < MAX_GENERATION), default=0)


def plan(
    offered: Sequence[devices.Device] | None,
    actual: Sequence[Body],
    *,
    place: Place,
    seen_generation: int = 0,
    salt: int = 0,
    accepts: Callable[[Body, Body], bool] = lambda _wanted, _stored: False,
    leave: Collection[str] = (),
) -> Plan:
    """What must be written so that `offered` (None: nothing at all) is what stands on the server.

    `actual`: the slices of this driver and node that stand there. `seen_generation`: the highest that ever did. `accepts`:
    whether a stored slice is the best that can be had of a wanted one. `leave`: UIDs of slices that are not to be deleted.
    """
    wanted = build_slices(offered, place=place) if offered is not None else ()
    if salt:
        for index, body in enumerate(wanted):
            body["metadata"]["name"] = slice_name(index, place=place, salt=salt)
    current, obsolete = _match(wanted, actual, place)
    generation = max(seen_generation, highest_generation(actual))
    new = [index for index in range(len(wanted)) if index not in current]
    for index, body in current.items():
        _settle(wanted[index], body, generation)
    changed = [
        index for index, body in current.items() if not (_same(wanted[index], body) or accepts(wanted[index], body))
    ]
    if new or len(changed) > 1:
        generation += 1
        changed = list(current)
    for body in wanted:
        body["spec"]["pool"]["generation"] = generation
    names = {body["metadata"]["name"] for body in wanted}
    deletes = [
        _delete(body, stray=not (_in_pool(body, place) or body["metadata"]["name"] in names))
        for body in obsolete
        if body["metadata"].get("uid") not in leave
    ]
    actions: list[Action] = [delete for delete in deletes if not delete.stray]
    actions += [Replace(wanted[index]) for index in sorted(changed)]
    actions += [Create(wanted[index]) for index in new]
    # A server may refuse these, as the agent has no business outside its pool; its own pool does not wait for that.
    actions += [delete for delete in deletes if delete.stray]
    result = tuple(body if index in new or index in changed else current[index] for index, body in enumerate(wanted))
    return Plan(actions=tuple(actions), result=result)


def lost_fields(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Which fields of the spec that were sent the server did not keep as they were: `devices[0].taints`. Times that the
    server adds are none.
    """
    return tuple(sorted(_lost(sent.get("spec"), stored.get("spec"), "")))


def rehearsal(body: Body) -> Body:
    """A slice as it would be created under a name that nothing has. What is stored keeps fields that a server drops from what is
    new (the ratchet of dropDisabledFields), so only something new tells.
    """
    name = body["metadata"]["name"]
    digest = hashlib.sha256(f"rehearsal\0{name}".encode()).hexdigest()[:_HASH_DIGITS]
    metadata = {"name": f"{name[:-_HASH_DIGITS]}{digest}"}
    owners = body["metadata"].get("ownerReferences")
    return {**body, "metadata": metadata | ({"ownerReferences": owners} if owners else {})}


def _owner(place: Place) -> Body:
    if place.node_uid is None:
        return {}
    return {
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": place.node_name, "uid": place.node_uid, "controller": True}
        ]
    }


def generation_of(body: Mapping[str, Any]) -> int:
    """The pool generation of a slice; 0 where it has none."""
    pool = body.get("spec", {}).get("pool")
    generation = pool.get("generation") if isinstance(pool, Mapping) else None
    return generation if isinstance(generation, int) else 0


def _match(wanted: Sequence[Body], actual: Sequence[Body], place: Place) -> tuple[dict[int, Body], list[Body]]:
    """Which stored slice stands for which wanted one, by the name; the others do not belong."""
    by_name = {body["metadata"]["name"]: index for index, body in enumerate(wanted)}
    current: dict[int, Body] = {}
    obsolete: list[Body] = []
    for body in actual:
        index = by_name.get(body["metadata"]["name"])
        if index is not None and _in_pool(body, place) and generation_of(body) < MAX_GENERATION:
            current[index] = body
        else:
            obsolete.append(body)
    return current, obsolete


def _settle(wanted: Body, current: Body, generation: int) -> None:
    """Give a wanted slice what it takes over from the stored one: identity, labels of others, when a taint was added."""
    metadata = copy.deepcopy(current["metadata"])
    if "ownerReferences" in wanted["metadata"]:
        metadata["ownerReferences"] = wanted["metadata"]["ownerReferences"]
    wanted["metadata"] = metadata
    wanted["spec"]["pool"]["generation"] = generation
    stored = {
        (device.get("name"), taint.get("key"), taint.get("value") or "", taint.get("effect")): taint.get("timeAdded")
        for device in _objects(current["spec"].get("devices"))
        for taint in _objects(device.get("taints"))
    }
    for device in _objects(wanted["spec"].get("devices")):
        for taint in _objects(device.get("taints")):
            added = stored.get((device["name"], taint["key"], taint.get("value") or "", taint["effect"]))
            if added is not None:
                # Sent without, the server would start the clock of tolerations anew.
                taint["timeAdded"] = added


def _objects(value: object) -> list[Body]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _same(wanted: Body, current: Body) -> bool:
    """Whether a stored slice needs no write. Labels and annotations are not ours to look at."""
    owners = "ownerReferences"
    # Most are spelled alike too, which is told far sooner.
    alike = wanted["spec"] == current["spec"] or wire.equal(wanted["spec"], current["spec"])
    return alike and wire.equal(wanted["metadata"].get(owners), current["metadata"].get(owners))


def _delete(body: Body, *, stray: bool) -> Delete:
    metadata = body["metadata"]
    return Delete(metadata["name"], metadata.get("uid", ""), metadata.get("resourceVersion", ""), stray=stray)


def _in_pool(body: Body, place: Place) -> bool:
    pool = body["spec"].get("pool")
    return isinstance(pool, Mapping) and pool.get("name") == place.node_name


def _lost(sent: object, stored: object, path: str) -> list[str]:
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        found: list[str] = []
        for key in sent.keys() | stored.keys():
            if key == "timeAdded" and key not in sent:
                continue
            if not wire.equal({key: sent.get(key)}, {key: stored.get(key)}):
                found += _lost(sent.get(key), stored.get(key), f"{path}.{key}" if path else key)
        return found
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [
            lost
            for index, (one, other) in enumerate(zip(sent, stored, strict=True))
            for lost in _lost(one, other, f"{path}[{index}]")
        ]
    return [] if wire.equal(sent, stored) else [path]
