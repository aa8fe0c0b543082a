# SPDX-License-Identifier: Apache-2.0
"""What an API server makes of ResourceSlices that are sent to it, release by release: which fields it drops, what it refuses.

The same table is asked of the stand-in and of the real server, so that what is built on the one holds on the other. Everything
is sent with dryRun, and stores nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from driver import errors
from driver.kube import client
from driver.publish import slices

RELEASES = ("1.35", "1.36", "1.37")
NODE = "cases"
TIMEOUT_S = 20.0

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A slice. `lost`: release -> fields that do not come back; `refused`: release -> part of the refusal. A release that is
    in neither keeps everything.
    """

    name: str
    spec: Body
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Body:
        """The whole object."""
        spec = {
            "driver": "cases.nearfield.dev",
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            **copy.deepcopy(self.spec),
        }
        return {
            "apiVersion": slices.API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": self.name},
            "spec": spec,
        }


def outcome(case: Case, kube: client.KubeClient) -> str:
    """What a server says to it, in the words of `expected`."""
    try:
        stored = kube.create_slice(case.body, dry_run=True, timeout_s=TIMEOUT_S)
    except errors.ApiError as error:
        if error.status != 422:
            raise
        return f"refused: {error}"
    lost = slices.lost_fields(case.body, stored)
    return f"lost: {', '.join(lost)}" if lost else "kept"


def agrees(case: Case, release: str, said: str) -> bool:
    """Whether this is what a server of the release should have said."""
    if release in case.refused:
        return said.startswith("refused: ") and case.refused[release] in said
    lost = case.lost.get(release)
    return said == (f"lost: {', '.join(lost)}" if lost else "kept")


def disagreements(kube: client.KubeClient, release: str) -> dict[str, str]:
    """The cases that a server answers otherwise than one of its release should, and what it says."""
    said = {case.name: (case, outcome(case, kube)) for case in CASES}
    return {name: words for name, (case, words) in said.items() if not agrees(case, release, words)}


def _device(**fields: Any) -> Body:
    return {"devices": [{"name": "d", **fields}]}


def _everywhere(text: str) -> Mapping[str, str]:
    return dict.fromkeys(RELEASES, text)


def _from_1_36(text: str) -> Mapping[str, str]:
    """Where counters are on by default."""
    return {release: text for release in RELEASES if release != "1.35"}


TAINT = {"key": "cases.nearfield.dev/absent", "effect": "NoSchedule"}
COUNTERS = {"a": {"value": "2"}}
POLICY = {"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi", "max": "4Gi"}}

CASES = (
    Case(name="no-devices", spec={"devices": []}),
    Case(
        name="attributes",
        spec=_device(
            attributes={
                "i": {"int": 3},
                "s": {"string": "x"},
                "b": {"bool": False},
                "v": {"version": "1.2.3"},
                "example.com/q": {"string": "y"},
            },
            capacity={"memory": {"value": "80Gi"}},
        ),
    ),
    Case(name="taints", spec=_device(taints=[TAINT]), lost={"1.35": ["devices[0].taints"]}),
    Case(
        name="shares",
        spec=_device(allowMultipleAllocations=True, capacity={"memory": {"value": "4Gi", "requestPolicy": POLICY}}),
        lost={"1.35": ["devices[0].allowMultipleAllocations", "devices[0].capacity.memory.requestPolicy"]},
    ),
    Case(
        name="counters",
        spec={"sharedCounters": [{"name": "c", "counters": COUNTERS}]},
        lost={"1.35": ["sharedCounters"]},
    ),
    Case(
        name="partition",
        spec=_device(consumesCounters=[{"counterSet": "c", "counters": COUNTERS}]),
        lost={"1.35": ["devices[0].consumesCounters"]},
    ),
    Case(
        name="whole-and-partition",
        spec={
            "devices": [
                {"name": name, "consumesCounters": [{"counterSet": "c", "counters": {"a": {"value": amount}}}]}
                for name, amount in (("whole", "2"), ("part", "1"))
            ]
        },
        lost={"1.35": ["devices[0].consumesCounters", "devices[1].consumesCounters"]},
    ),
    Case(
        name="counter-below-zero",
        spec={"sharedCounters": [{"name": "c", "counters": {"a": {"value": "-1"}}}]},
        lost={"1.35": ["sharedCounters"]},
    ),
    Case(
        name="counters-beside-devices",
        spec={"devices": [{"name": "d"}], "sharedCounters": [{"name": "c", "counters": COUNTERS}]},
        lost={"1.35": ["sharedCounters"]},
        refused=_from_1_36("only one of `sharedCounters` or `devices` is allowed"),
    ),
    Case(
        name="no-counters-beside-devices",
        spec={"devices": [{"name": "d"}], "sharedCounters": []},
        refused=_from_1_36("only one of `sharedCounters` or `devices` is allowed"),
    ),
    Case(
        name="counter-set-of-nothing",
        spec={"sharedCounters": [{"name": "c", "counters": {}}]},
        lost={"1.35": ["sharedCounters"]},
        refused=_from_1_36("spec.sharedCounters[0].counters"),
    ),
    Case(
        name="counter-set-twice",
        spec={"sharedCounters": [{"name": "c", "counters": COUNTERS}] * 2},
        lost={"1.35": ["sharedCounters"]},
        refused=_from_1_36("Duplicate value"),
    ),
    Case(
        name="many-counter-sets",
        spec={"sharedCounters": [{"name": f"c{n}", "counters": COUNTERS} for n in range(9)]},
        lost={"1.35": ["sharedCounters"]},
        refused=_from_1_36("spec.sharedCounters"),
    ),
    Case(
        name="many-counters",
        spec={"sharedCounters": [{"name": "c", "counters": {f"a{n}": {"value": "1"} for n in range(33)}}]},
        lost={"1.35": ["sharedCounters"]},
        refused=_from_1_36("spec.sharedCounters[0].counters"),
    ),
    Case(
        name="partition-of-three-gpus",
        spec=_device(consumesCounters=[{"counterSet": f"c{n}", "counters": COUNTERS} for n in range(3)]),
        lost={"1.35": ["devices[0].consumesCounters"]},
        refused=_from_1_36("spec.devices[0].consumesCounters"),
    ),
    Case(
        name="many-partitions",
        spec={
            "devices": [
                {"name": f"d{n}", "consumesCounters": [{"counterSet": "c", "counters": COUNTERS}]} for n in range(65)
            ]
        },
        lost={
            "1.35": [
                f"devices[{n}].consumesCounters"
                for n in sorted(range(65), key=lambda n: f"devices[{n}].consumesCounters")
            ]
        },
        refused=_from_1_36("spec.devices"),
    ),
    Case(
        name="binding",
        spec=_device(bindsToNode=True, bindingConditions=["cases/ready"], bindingFailureConditions=["cases/failed"]),
        lost={
            "1.35": [
                "devices[0].bindingConditions",
                "devices[0].bindingFailureConditions",
                "devices[0].bindsToNode",
            ]
        },
    ),
    Case(
        name="list-alone",
        spec=_device(attributes={"n": {"ints": [0, 1]}}),
        refused=_everywhere("spec.devices[0].attributes[n]"),
    ),
    Case(
        name="list-beside-others",
        spec=_device(attributes={"n": {"strings": ["a"]}, "i": {"int": 1}}),
        refused=_everywhere("spec.devices[0].attributes[n]"),
    ),
    Case(name="upper-case-device", spec={"devices": [{"name": "D"}]}, refused=_everywhere("spec.devices[0].name")),
    Case(name="twice", spec={"devices": [{"name": "d"}, {"name": "d"}]}, refused=_everywhere("Duplicate value")),
    Case(
        name="long-string",
        spec=_device(attributes={"s": {"string": "x" * 65}}),
        refused=_everywhere("spec.devices[0].attributes[s]"),
    ),
    Case(
        name="loose-version",
        spec=_device(attributes={"v": {"version": "580.65.06"}}),
        refused=_everywhere("spec.devices[0].attributes[v].version"),
    ),
    Case(
        name="many-attributes",
        spec=_device(attributes={f"a{n}": {"int": n} for n in range(33)}),
        refused=_everywhere("spec.devices[0]"),
    ),
    Case(
        name="many-devices",
        spec={"devices": [{"name": f"d{n}"} for n in range(129)]},
        refused=_everywhere("spec.devices"),
    ),
    Case(
        name="many-tainted-devices",
        spec={"devices": [{"name": f"d{n}", "taints": [TAINT]} for n in range(65)]},
        lost={"1.35": [f"devices[{n}].taints" for n in sorted(range(65), key=lambda n: f"devices[{n}].taints")]},
        refused={"1.36": "spec.devices", "1.37": "spec.devices"},
    ),
    Case(
        name="bad-pool",
        spec={"devices": [], "pool": {"name": "UPPER", "generation": 1, "resourceSliceCount": 1}},
        refused=_everywhere("spec.pool.name"),
    ),
    Case(
        name="no-count",
        spec={"devices": [], "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 0}},
        refused=_everywhere("spec.pool.resourceSliceCount"),
    ),
    Case(name="no-place", spec={"devices": [], "nodeName": None}, refused=_everywhere("exactly one of")),
    Case(
        name="bad-bus-id",
        spec=_device(attributes={"resource.kubernetes.io/pciBusID": {"string": "not an address"}}),
    ),
)
