# SPDX-License-Identifier: Apache-2.0
"""The whole agent: what claims carry for it, and what containers can read of their devices.

- the file of a request is mounted where the pod's spec says, tells what is published of the device, and goes with the claim
- a share has the limits of its ClaimConfig, and its container can read them; what cannot be is refused with the way out
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver import values
from tests.fakes import agents, claimconfigs

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME
SHARES = (
    "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\nsharing:\n"
    "- match: {count: 1}\n  mode: shares\n  shares: {memory: none, compute: none}\n"
)
SHARE_ID = "11111111-2222-4333-8444-555555555555"
INSIDE = "/var/run/kubernetes.io/dra-device-attributes"


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


def claim(
    node: agents.Node, name: str, result: dict[str, Any], *, pod_claim: str | None = None, config: Any = None
) -> values.ClaimRef:
    """An allocated claim with what templates and users write into it."""
    annotations = {} if pod_claim is None else {"resource.kubernetes.io/pod-claim-name": pod_claim}
    entries = [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": config}}] if config else []
    body = {
        "metadata": {"name": name, "namespace": agents.NAMESPACE, "annotations": annotations},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}},
        "status": {
            "allocation": {
                "devices": {
                    "results": [{"request": "gpu", "driver": DRIVER, "pool": agents.NODE, **result}],
                    "config": entries,
                }
            },
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "00000000-0000-4000-8000-000000000001"}],
        },
    }
    stored = node.api.seed("resourceclaims", body)
    return values.ClaimRef(uid=values.ClaimUid(stored["metadata"]["uid"]), namespace=agents.NAMESPACE, name=name)


def mounted(node: agents.Node, ref: values.ClaimRef) -> dict[str, Path]:
    """What the containers of a claim see, by their paths."""
    spec = json.loads((node.cdi_dir / f"{DRIVER}_{ref.uid}.json").read_text(encoding="utf-8"))
    mounts = [mount for device in spec["devices"] for mount in device["containerEdits"].get("mounts", [])]
    return {mount["containerPath"]: Path(mount["hostPath"]) for mount in mounts}


def attributes(file: Path) -> dict[str, Any]:
    """Of the one device in a file, which both versions of the format say."""
    newest, oldest = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert {**oldest, "apiVersion": newest["apiVersion"]} == newest
    ((device,),) = (request["devices"] for request in newest["requests"])
    found: dict[str, Any] = device["attributes"]
    return found


def shared(node: agents.Node, memory: str, *, compute: str = "25") -> dict[str, Any]:
    """A share of the GPU that has some, as the scheduler allocates it."""
    devices = agents.until(
        lambda: [device for device in node.devices() if device.get("allowMultipleAllocations")], "a shared GPU"
    )
    consumed = {"memory": memory, "compute": compute, "shares": "1"}
    return {"device": devices[0]["name"], "shareID": SHARE_ID, "consumedCapacity": consumed}


def sharing(node: agents.Node) -> Any:
    """An agent whose first GPU is shared, and its kubelet."""
    path = node.directory / "agent.yaml"
    path.write_text(SHARES, encoding="utf-8")
    node.start("--config", str(path))
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    node.wait_for_devices(8)
    return kubelet


def test_containers_can_read_what_is_published_of_their_device(node: agents.Node) -> None:
    node.start()
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER)
    published = node.wait_for_devices(8)[2]
    ref = claim(node, "c1-x7k2p", {"device": published["name"]}, pod_claim="gpus")
    answer = kubelet.prepare(DRIVER, [ref])[ref.uid]
    assert isinstance(answer, values.Prepared)
    ((place, file),) = mounted(node, ref).items()
    assert place == f"{INSIDE}/resourceclaimtemplates/gpus/gpu/{DRIVER}-metadata.json"
    assert attributes(file) == published["attributes"]

    # What an admin removes is back before kubelet starts another container.
    shutil.rmtree(file.parents[1])
    assert kubelet.prepare(DRIVER, [ref])[ref.uid] == answer
    assert attributes(file) == published["attributes"]
    assert isinstance(kubelet.unprepare(DRIVER, [ref])[ref.uid], values.Unprepared)
    assert not file.parent.exists()


def test_a_share_is_held_to_its_configuration_and_says_so(node: agents.Node) -> None:
    kubelet = sharing(node)
    config = {**claimconfigs.HEADER, "memory": {"limit": "4Gi"}, "compute": {"limit": 20}}
    ref = claim(node, "share", shared(node, "8Gi"), config=config)
    assert isinstance(kubelet.prepare(DRIVER, [ref])[ref.uid], values.Prepared)
    ((place, file),) = mounted(node, ref).items()
    assert place == f"{INSIDE}/resourceclaims/share/gpu/{DRIVER}-metadata.json"
    assert {
        "shareID": {"string": SHARE_ID},
        "memoryEnforcement": {"string": "none"},
        "computeEnforcement": {"string": "none"},
        "memoryLimit": {"int": 4 << 30},
        "computeLimit": {"int": 20},
    }.items() <= attributes(file).items()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loosens": ({"memory": {"limit": "9Gi"}}, "more than the 8Gi that it was allocated"),
    "requires": ({"require": {"memory": "mps"}}, "requires memory to be kept apart by mps or stronger"),
    "malformed": ({"memory": {"limit": "4GB"}}, 'memory.limit is "4GB", not a quantity'),
    "unknown": ({"sharing": {"strategy": "MPS"}}, 'has a field "sharing"'),
}


def test_what_a_share_cannot_have_is_refused_with_the_way_out(node: agents.Node) -> None:
    kubelet = sharing(node)
    share = shared(node, "8Gi")
    for name, (config, said) in REFUSED.items():
        ref = claim(node, name, share, config={**claimconfigs.HEADER, **config})
        answer = kubelet.prepare(DRIVER, [ref])[ref.uid]
        assert isinstance(answer, values.Failed), name
        assert said in answer.message
        assert f"ResourceClaim {agents.NAMESPACE}/{name}" in answer.message
        assert not (node.kubelet_dir / "plugins" / DRIVER / "dra-device-metadata" / ref.uid).exists()


def test_a_limit_on_a_whole_gpu_is_refused_with_the_way_out(node: agents.Node) -> None:
    kubelet = sharing(node)
    whole = next(device["name"] for device in node.devices() if not device.get("allowMultipleAllocations"))
    limited = claim(node, "limited", {"device": whole}, config={**claimconfigs.HEADER, "memory": {"limit": "4Gi"}})
    answer = kubelet.prepare(DRIVER, [limited])[limited.uid]
    assert isinstance(answer, values.Failed)
    assert "REQUEST/SUBREQUEST" in answer.message
    strict = claim(node, "strict", {"device": whole}, config={**claimconfigs.HEADER, "require": {"memory": "whole"}})
    assert isinstance(kubelet.prepare(DRIVER, [strict])[strict.uid], values.Prepared)
