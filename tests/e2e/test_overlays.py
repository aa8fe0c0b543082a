# SPDX-License-Identifier: Apache-2.0
"""The manifests as an administrator applies them, put together by kustomize.

Aspects: what the mock overlay's container may do; the base on a node without a GPU, with what it sees and hears of the host; the machine by
label, as on kind, and a label that is wrong; a machine of one's own and other folders, as docs/install.md says; what stays after
uninstalling; the overlays and components that need more than this node has, as text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from discovery.mock import shelf
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import ApiError, Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/daemonset"
LABEL = "mock.nearfield.dev/machine"
PLUGIN = "/var/lib/kubelet/plugins/gpu.nearfield.dev"
REGISTRY = "/var/lib/kubelet/plugins_registry"
HARDWARE = ("/", "/driver-root", "/dev", "/host/sys", "/host/proc")
KUBELETS_OWN = {
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/dev/termination-log",
    "/run/termination-log",
    "/dev/shm",
}
"""What kubelet and the runtime mount into every container to be written."""


def rendered(site: Site, folder: Path) -> list[Json]:
    """The objects of a kustomization, with the image that is on the node."""
    objects = [body for body in yaml.safe_load_all(site.cluster.kubectl("kustomize", str(folder))) if body is not None]
    for body in objects:
        if body["kind"] == "DaemonSet":
            agents.agent_container(body["spec"]["template"])["image"] = make.AGENT_IMAGE
    return objects


def daemonset(objects: list[Json]) -> Json:
    (found,) = (body for body in objects if body["kind"] == "DaemonSet")
    return found


@pytest.fixture
def restored(site: Site) -> Iterator[None]:
    """Afterwards the node is as before: no label, the mock overlay, all its devices."""
    before = len(site.agent.devices())
    yield
    site.api.patch("Node", site.node_name, {"metadata": {"labels": {LABEL: None}}})
    site.agent.apply()
    waiting.until(lambda: len(site.agent.devices()) == before, "the devices of before")


def label(site: Site, machine: str) -> None:
    site.api.patch("Node", site.node_name, {"metadata": {"labels": {LABEL: machine}}})


def products(site: Site) -> set[str]:
    return {device["attributes"]["productName"]["string"] for device in site.agent.devices()}


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def mounted(pid: int) -> dict[str, tuple[str, str, str]]:
    """Where a process has something mounted -> mode, propagation, type of the file system; the uppermost counts."""
    found = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines():
        head, _, tail = line.partition(" - ")
        _, _, _, _, place, flags, *optional = head.split()
        found[place] = (flags.split(",")[0], " ".join(optional), tail.split()[0])
    return found


def nics(sysfs: Path) -> dict[str, str]:
    """Network devices and their addresses, as a sysfs shows them."""
    devices = [path for path in (sysfs / "class/net").iterdir() if path.name != "lo"]
    return {path.name: (path / "address").read_text(encoding="ascii").strip() for path in devices}


def written(pid: int) -> set[str]:
    """The mounts with files of the node, the pod or the image that a process may write to, but for those below the driver root."""
    made = {"proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs"}
    found = {place: (mode, kind) for place, (mode, _, kind) in mounted(pid).items() if place not in KUBELETS_OWN}
    return {
        "/var/run/cdi" if place == "/run/cdi" else place
        for place, (mode, kind) in found.items()
        if mode == "rw" and (kind not in made or place.endswith("/cdi")) and not place.startswith("/driver-root/")
    }


def test_the_mock_agent_has_no_privilege_and_writes_only_its_folders(site: Site) -> None:
    pids = site.agent.pids()
    assert len(pids) > 1, "the agent and what looks at its hardware"
    for pid in pids:
        seen = status(pid)
        assert {seen[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0000000000000000"}
        assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
        assert written(pid) == {PLUGIN, REGISTRY, "/var/run/cdi", "/tmp"}
        assert mounted(pid)["/"][0] == "ro"


def test_folders_of_the_host_are_all_that_the_mock_agent_asks_for_beyond_a_plain_pod(site: Site, space: Space) -> None:
    """As the Pod Security level `baseline` judges it."""
    space.label({"pod-security.kubernetes.io/enforce": "baseline"})
    spec = daemonset(site.agent.manifests())["spec"]["template"]["spec"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent", "namespace": space.name},
        "spec": {**spec, "serviceAccountName": "default"},
    }
    with pytest.raises(ApiError) as raised:
        site.api.create(pod, dry_run=True)
    violation = raised.value.message.partition('violates PodSecurity "baseline:latest": ')[2]
    assert violation == 'hostPath volumes (volumes "plugin", "registry", "cdi")'


@pytest.mark.usefixtures("restored")
def test_the_base_on_a_node_without_a_gpu(site: Site) -> None:
    site.agent.apply_objects(rendered(site, DEPLOY / "base"))
    site.agent.wait_ready()
    (empty,) = waiting.until(
        lambda: found if not site.agent.devices() and (found := site.agent.slices()) else None, "no device"
    )
    assert empty["spec"]["pool"]["name"] == site.node_name
    assert site.agent.readyz()[0] == 200

    assert "Listening to uevents" in site.agent.logs()
    trigger = next(iter(sorted(Path("/sys/bus/pci/devices").glob("*/uevent"))))
    waiting.until(
        lambda: trigger.write_text("change") and site.agent.metrics().one("nearfield_uevents_total", result="heeded"),
        "it hears of a PCI function of the node",
    )

    (pid, *_) = site.agent.pids()
    assert written(pid) == {PLUGIN, REGISTRY, "/var/run/cdi", "/tmp"}
    seen = mounted(pid)
    assert {place: seen[place][0] for place in HARDWARE} == dict.fromkeys(HARDWARE, "ro")
    assert "master:" in seen["/driver-root"][1], "what is mounted later has to show"
    root = Path("/proc", str(pid), "root")
    assert (root / "driver-root/etc/os-release").exists()
    assert nics(root / "host/sys") == nics(Path("/sys")) != nics(root / "sys")
    pod = site.agent.pod()["metadata"]["name"]
    seen_there = json.loads(
        site.cluster.kubectl("exec", "-n", agents.NAMESPACE, pod, "--", "nearfield", "topo", "-o", "json")
    )
    assert "default-route-unknown" not in {finding["code"] for finding in seen_there["findings"]}
    management = [nic.get("management") for nic in seen_there["nics"]]
    assert not management or True in management, "the node's own routes, and not the pod's"


@pytest.mark.usefixtures("restored")
def test_labels_choose_the_machine_as_on_kind_and_a_wrong_one_stops_nothing(site: Site) -> None:
    site.agent.apply_objects(rendered(site, DEPLOY / "overlays/kind"))
    waiting.until(lambda: not site.agent.pods(), "no agent on a node without a label")

    label(site, "gb200-tray")
    site.agent.wait_ready()
    waiting.until(lambda: products(site) == {"NVIDIA GB200"}, "the machine of the label")
    serving = site.agent.pod()["metadata"]["name"]

    label(site, "dgx-h200")
    site.agent.roll()
    waiting.until(lambda: len(site.agent.pods()) == 2, "the new agent")
    (new,) = (pod["metadata"]["name"] for pod in site.agent.pods() if pod["metadata"]["name"] != serving)
    ended = site.api.wait("Pod", new, agents.NAMESPACE, until=_exit_message, what="ended with a message")
    code, message = _exit_message(ended) or (0, "")
    assert code == 2
    assert f"Label {LABEL}=dgx-h200 of Node {site.node_name}" in message
    assert f"there are {', '.join(shelf.names())}" in message
    assert products(site) == {"NVIDIA GB200"}
    assert site.agent.get("/readyz", site.api.get("Pod", serving, agents.NAMESPACE))[0] == 200

    label(site, "l40s-8-pcie")
    site.agent.wait_ready()
    waiting.until(lambda: products(site) == {"NVIDIA L40S"}, "the machine of the label")


def _exit_message(pod: Json) -> tuple[int, str] | None:
    for container in pod["status"].get("containerStatuses", []):
        for state in (container.get("state", {}), container.get("lastState", {})):
            if (ended := state.get("terminated")) is not None:
                return ended["exitCode"], ended.get("message", "")
    return None


OWN = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - {deploy}/overlays/mock
  - paths.yaml
components:
  - {deploy}/components/paths
configMapGenerator:
  - name: nearfield-mock
    namespace: nearfield-system
    behavior: merge
    literals:
      - machine=/etc/nearfield/machine.yaml
    files: [machine.yaml]
"""


def of_the_page(page: str, first: str) -> str:
    """The YAML block of a page of the docs that begins so."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(first))
    return str(found)


@pytest.mark.usefixtures("restored")
def test_a_machine_of_ones_own_below_another_kubelet_folder(site: Site, space: Space, tmp_path: Path) -> None:
    """The folders are other names of this node's own, so that whoever is told a path by the agent has to find it there."""
    other = site.cluster.layout.host_path("/var/lib/other")
    other.symlink_to("kubelet")
    try:
        (tmp_path / "kustomization.yaml").write_text(OWN.format(deploy=os.path.relpath(DEPLOY, tmp_path)))
        paths = of_the_page("install.md", "# paths.yaml")
        (tmp_path / "paths.yaml").write_text(
            paths.replace("/var/lib/k0s/kubelet", "/var/lib/other").replace("/var/run/cdi", "/run/cdi")
        )
        (tmp_path / "machine.yaml").write_text(
            of_the_page("machines.md", "apiVersion: mock.nearfield.dev/v1alpha1\nkind: Machine\n").split("faults:")[0]
        )
        objects = rendered(site, tmp_path)
        assert not [body for body in objects if body["metadata"]["name"] == "nearfield-paths"]
        site.agent.apply_objects(objects)
        site.agent.wait_ready()
        waiting.until(lambda: len(site.agent.devices()) == 2, "the two GPUs of the machine")
        assert "--kubelet-dir" not in site.agent.logs()
        assert "/var/lib/other/plugins/gpu.nearfield.dev" in site.agent.logs()

        space.create(make.template("both", make.request(count=2)), make.pod("p", claims={"gpu": "template:both"}))
        space.running("p")
        assert space.look("p").gpu_nodes == ("/dev/nvidia0", "/dev/nvidia1")
        space.delete("Pod", "p")
    finally:
        other.unlink()


@pytest.mark.usefixtures("restored")
def test_what_stays_on_a_node_after_uninstalling(site: Site, space: Space) -> None:
    """And after a claim, which brings the folder of metadata files."""
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    space.delete("Pod", "p")
    site.cluster.kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(site.agent.manifests()))
    waiting.until(lambda: not site.agent.slices(), "kubelet has removed the slices")
    assert site.api.find("Namespace", agents.NAMESPACE) is None
    assert site.disk.sockets() == frozenset()
    assert sorted(path.name for path in site.disk.plugin_dir.iterdir()) == ["dra-device-metadata", "state"]
    assert list((site.disk.plugin_dir / "dra-device-metadata").iterdir()) == []
    assert [path.name for path in site.disk.cdi_dir.iterdir()] == ["gpu.nearfield.dev-node.json"]


def test_the_podmonitor_takes_the_place_of_the_annotations(site: Site) -> None:
    objects = rendered(site, DEPLOY / "overlays/podmonitor")
    assert "PodMonitor" in {body["kind"] for body in objects}
    annotations = daemonset(objects)["spec"]["template"]["metadata"]["annotations"]
    assert [name for name in annotations if name.startswith("prometheus.io/")] == []


def test_a_driver_container_is_seen_where_it_mounts_its_root(site: Site, tmp_path: Path) -> None:
    deploy = os.path.relpath(DEPLOY, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{deploy}/base]\ncomponents: [{deploy}/components/driver-container]\n"
    )
    template = daemonset(rendered(site, tmp_path))["spec"]["template"]
    container = agents.agent_container(template)
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["NEARFIELD_DRIVER_ROOT"] == variables["NEARFIELD_DRIVER_ROOT_MOUNT"] == "/run/nvidia/driver"
    (mount,) = (item for item in container["volumeMounts"] if item["name"] == "driver-root")
    assert mount == {
        "name": "driver-root",
        "mountPath": "/run/nvidia",
        "readOnly": True,
        "mountPropagation": "HostToContainer",
    }
    (volume,) = (item for item in template["spec"]["volumes"] if item["name"] == "driver-root")
    assert volume["hostPath"] == {"path": "/run/nvidia", "type": "DirectoryOrCreate"}
