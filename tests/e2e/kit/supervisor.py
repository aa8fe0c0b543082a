# SPDX-License-Identifier: Apache-2.0
"""The supervisor of MPS daemons as the component of our manifests has it, but for what real hardware needs: its programs are stand-ins."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.e2e.kit import agent as agents
from tests.e2e.kit import driverroot, make, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site

FILE = Path(__file__).parents[3] / "deploy/daemonset/components/mps/daemonset.yaml"
NAME = "nearfield-mps"
FOLDER = "/run/nearfield/mps"
LABELS = f"app.kubernetes.io/name={NAME}"

PROGRAM = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
while True:
    subprocess.Popen([sys.executable, "-m", "discovery.mock.mpsclient"], stdin=subprocess.PIPE).wait()
    time.sleep(0.5)
"""
"""Connects as a program of CUDA would, prints what it was given, and stays; begins anew when MPS has ended it."""


def mount(template: Json) -> None:
    """The agent reaches the supervisor, as with the component."""
    container = agents.agent_container(template)
    container["volumeMounts"].append({"name": "mps", "mountPath": FOLDER, "readOnly": True})
    template["spec"]["volumes"].append({"name": "mps", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}})


def apply(site: Site) -> None:
    """Bring it onto the cluster, and wait until it is ready."""
    daemonset = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container["image"] = make.AGENT_IMAGE
    container["securityContext"] |= {"privileged": False}
    container["volumeMounts"] = [
        {key: value for key, value in mount.items() if key != "mountPropagation"}
        for mount in container["volumeMounts"]
        if mount["name"] != "dev"
    ]
    container["volumeMounts"].append({"name": "machine", "mountPath": driverroot.MACHINE, "readOnly": True})
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "dev"]
    (root,) = (volume for volume in spec["volumes"] if volume["name"] == "driver-root")
    root["hostPath"]["path"] = driverroot.ROOT
    spec["volumes"].append({"name": "machine", "hostPath": {"path": driverroot.MACHINE, "type": "Directory"}})
    (variable,) = (item for item in container["env"] if item["name"] == "NEARFIELD_DRIVER_ROOT")
    variable["value"] = driverroot.ROOT
    site.cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(daemonset))
    site.api.wait("DaemonSet", NAME, agents.NAMESPACE, until=_ready, what="ready")
    # The DaemonSet may still tell of a pod that has gone.
    waiting.until(lambda: agents.is_ready(pod(site)), "its pod is ready")


def _ready(item: Json) -> bool:
    status = item["status"]
    return (status.get("desiredNumberScheduled"), status.get("numberReady")) == (1, 1)


def pod(site: Site) -> Json:
    """Its one pod that is not being deleted."""
    found = [
        item
        for item in site.api.items("Pod", agents.NAMESPACE, labels=LABELS)
        if "deletionTimestamp" not in item["metadata"]
    ]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def run(site: Site, *command: str) -> str:
    """What a program in its container writes."""
    name = pod(site)["metadata"]["name"]
    return site.cluster.kubectl("exec", "-n", agents.NAMESPACE, name, "-c", "mps", "--", *command)


def client(name: str, *, claim: str) -> Json:
    """A pod with a claim of its own by this template, and a program that uses its GPU by MPS."""
    container = make.container(image=make.AGENT_IMAGE, command=["python3", "-c", PROGRAM], claims=["gpu"])
    return make.pod(name, claims={"gpu": f"template:{claim}"}, containers=[container])
