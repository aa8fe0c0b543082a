# SPDX-License-Identifier: Apache-2.0
"""What happens to claims and sockets behind the agent's back.

- a pod is deleted by force while its container ignores SIGTERM, and the next pod gets the same GPU at once
- the CDI file of a prepared claim is removed
- a second agent is started on the sockets of the first, and one beside it
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from hack.realnode.errors import ClusterError
from tests.e2e.kit import agent as agents
from tests.e2e.kit import load, make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

STUBBORN_S = 4
"""How long the container that ignores SIGTERM lives on after its pod was deleted by force."""

UNTIL_END = "while [ ! -e /end ]; do sleep 0.1; done"


def only(device: str, site: Site) -> Json:
    """A request for this very GPU."""
    return make.request(where=f'device.attributes["{make.CLASS}"].uuid == "{site.disk.gpu(device).uuid}"')


def test_forced_deletion(site: Site, space: Space) -> None:
    device = site.agent.devices()[3]["name"]
    failed = site.kubelet.calls("NodePrepareResources") - site.kubelet.calls("NodePrepareResources", code="OK")
    space.create(
        make.template("that", only(device, site)),
        load.exclusive_pod("old", claims={"gpu": "template:that"}, ignores_term=True, grace_s=STUBBORN_S),
    )
    space.running("old")
    waiting.until(lambda: "mine" in space.logs("old"), "the old container has its GPU")
    space.delete("Pod", "old", force=True)
    space.create(load.exclusive_pod("new", claims={"gpu": "template:that"}))
    space.running("new")
    # The kernel gave the lock on the GPU to the new container, so the old one had ended before.
    waiting.until(lambda: "mine" in space.logs("new"), "the new container has its GPU alone")
    assert space.devices("new") == (device,)
    assert space.logs("new").split() == ["mine:", site.disk.gpu(device).uuid]
    # No Prepare failed: kubelet would have let the pod wait for over a minute.
    assert site.kubelet.calls("NodePrepareResources") - site.kubelet.calls("NodePrepareResources", code="OK") == failed
    assert load.failures(space, "new") == []
    (entry,) = site.disk.record()
    assert entry.claim.uid == space.claim_of("new", "gpu")["metadata"]["uid"]


def test_lost_cdi_file(site: Site, space: Space) -> None:
    space.create(
        make.template("one"), make.pod("p", claims={"gpu": "template:one"}, script=UNTIL_END, restart="Always")
    )
    space.running("p")
    uid = space.claim_of("p", "gpu")["metadata"]["uid"]
    (path,) = site.disk.claim_files()
    before = path.read_bytes()
    repaired = site.agent.metrics().total("nearfield_cdi_reconciled_total")

    path.unlink()
    waiting.until(path.exists, "the CDI file is back")

    assert path.read_bytes() == before
    assert site.disk.claim_file(uid)
    waiting.until(
        lambda: site.agent.metrics().total("nearfield_cdi_reconciled_total") == repaired + 1, "it is counted, once"
    )

    # A container that has to start in between: containerd refuses it, kubelet tries again.
    path.unlink()
    space.exec("p", "touch", "/end")
    space.api.wait(
        "Pod", "p", space.name, until=lambda pod: _restarts(pod) > 0 and _is_running(pod), what="running again"
    )
    (device,) = space.devices("p")
    assert space.look("p").gpu_nodes == (site.disk.gpu(device).node,)
    assert path.read_bytes() == before


def test_second_agent_on_the_same_sockets(site: Site, space: Space) -> None:
    """It ends and says why; the first one serves on and publishes on."""
    sockets = {path: path.stat().st_ino for path in site.disk.sockets()}
    restarts = site.agent.restarts()
    pod = site.agent.pod()["metadata"]["name"]

    said = _fails(
        site,
        *("exec", "-n", agents.NAMESPACE, pod, "-c", agents.CONTAINER, "--"),
        *("nearfield", "run", "--http=", "--inspect="),
    )

    assert "belongs to another running instance of the agent" in said
    assert "--pod-uid" in said
    assert {path: path.stat().st_ino for path in site.disk.sockets()} == sockets
    assert site.agent.restarts() == restarts
    assert site.agent.readyz()[0] == 200
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    # The epoch that the second one took is over with it: the first publishes again.
    space.api.delete("ResourceSlice", site.agent.slices()[0]["metadata"]["name"])
    waiting.until(site.agent.devices, "the slices are back")


def test_second_agent_beside_the_first(site: Site, space: Space) -> None:
    """Another pod of the agent on the node, as in a rolling update, serves until it goes; then the first one serves again."""
    first = site.agent.pod()
    with _another(site) as second:
        waiting.until(lambda: len(site.disk.sockets()) == 4, "both have their sockets")
        space.create(make.template("one"), make.pod("a", claims={"gpu": "template:one"}))
        space.running("a")
        # Kubelet asks the one that came last.
        assert _prepared(site, second) == 1
        site.agent.kill(second)
        space.create(make.pod("b", claims={"gpu": "template:one"}))
        space.running("b")
        assert load.failures(space, "b") == []
        (slice_,) = site.agent.slices()
    assert site.agent.pod()["metadata"]["uid"] == first["metadata"]["uid"]
    waiting.until(lambda: site.disk.sockets() == site.agent.socket_paths(), "the sockets of the second are gone")
    # Claims that the other one prepared are unprepared by the one that is left.
    space.delete("Pod", "a")
    assert {entry.claim.uid for entry in site.disk.record()} == {space.claim_of("b", "gpu")["metadata"]["uid"]}
    assert space.api.get("ResourceSlice", slice_["metadata"]["name"])["spec"] == slice_["spec"]


@contextlib.contextmanager
def _another(site: Site) -> Iterator[Json]:
    """A pod that runs the agent and belongs to nobody."""
    (daemonset,) = (item for item in site.agent.manifests() if item["kind"] == "DaemonSet")
    spec = copy.deepcopy(daemonset["spec"]["template"]["spec"])
    name = {"name": "another", "namespace": agents.NAMESPACE}
    site.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": {**spec, "nodeName": site.node_name}})
    try:
        yield site.api.wait("Pod", "another", agents.NAMESPACE, until=agents.is_ready, what="ready")
    finally:
        site.api.delete("Pod", "another", agents.NAMESPACE)
        site.api.wait_gone("Pod", "another", agents.NAMESPACE)


def _prepared(site: Site, pod: Json) -> int:
    """How many claims an instance has prepared."""
    found = site.agent.metrics(pod).total("nearfield_prepare_total", result="success")
    return int(found)


def _fails(site: Site, *arguments: str) -> str:
    try:
        said = site.cluster.kubectl(*arguments)
    except ClusterError as error:
        return str(error)
    raise AssertionError(f"it did not fail: {said}")


def _restarts(pod: Json) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


def _is_running(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("running" in status["state"] for status in statuses)
