# SPDX-License-Identifier: Apache-2.0
"""A configuration file for the agent, as administrators bring it onto a cluster: in the ConfigMap of the overlay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import yaml

from tests.e2e.kit import agent as agents
from tests.e2e.kit import machines, waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site

NAME = "nearfield-config"
FILE = "agent.yaml"
AGAIN_S = 2.0
"""After so long the pod is changed once more."""


def apply(
    site: Site,
    *,
    machine: str = agents.MACHINE,
    env: Mapping[str, str] | None = None,
    edit: Callable[[Json], None] | None = None,
    **sections: object,
) -> None:
    """Start the agent with these sections of AgentConfig, on a cluster that is thrown away with them."""
    site.agent.apply_objects(objects(site, machine=machine, env=env, edit=edit, **sections))
    site.agent.wait_ready()


def objects(
    site: Site,
    *,
    machine: str = agents.MACHINE,
    env: Mapping[str, str] | None = None,
    edit: Callable[[Json], None] | None = None,
    **sections: object,
) -> list[Json]:
    """The manifests with these sections. `machine`: of the zoo, or a file of tests/e2e/machines; `edit` changes the pod template."""
    own = machine.endswith(".yaml")
    place = f"{machines.MOUNTED}/{machine}" if own else machine
    found = site.agent.manifests(machine=place, env=env, edit=edit)
    if own:
        (mock,) = (body for body in found if body["kind"] == "ConfigMap" and "machine" in body["data"])
        mock["data"][machine] = (machines.OWN / machine).read_text()
    (ours,) = (body for body in found if (body["kind"], body["metadata"]["name"]) == ("ConfigMap", NAME))
    ours["data"] = {FILE: _text(sections)}
    return found


def change(site: Site, **sections: object) -> None:
    """Other sections, under the agent that runs, once kubelet has brought them into the pod. It does so when the pod is changed, with
    what it knows of the ConfigMap then, which may be what it was before; left alone it would look again after a minute.
    """
    text = _text(sections)
    site.api.patch("ConfigMap", NAME, {"data": {FILE: text}}, agents.NAMESPACE)
    pod = site.agent.pod()["metadata"]
    volumes = site.disk.kubelet_dir / "pods" / pod["uid"] / "volumes/kubernetes.io~configmap"
    (file,) = volumes.glob(f"*/{FILE}")

    def brought() -> bool:
        metadata = {"annotations": {"e2e.nearfield.dev/config": str(time.monotonic())}}
        site.api.patch("Pod", pod["name"], {"metadata": metadata}, agents.NAMESPACE)
        waiting.until(lambda: file.read_text(encoding="utf-8") == text, "the new text", timeout_s=AGAIN_S)
        return True

    waiting.until(brought, "the configuration is in the pod")


def _text(sections: Mapping[str, object]) -> str:
    return yaml.safe_dump({"apiVersion": "config.nearfield.dev/v1alpha1", "kind": "AgentConfig", **sections})
