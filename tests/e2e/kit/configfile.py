# SPDX-License-Identifier: Apache-2.0
"""A configuration file for the agent, as administrators bring it onto a cluster: a ConfigMap that is mounted."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from tests.e2e.kit import agent as agents
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site

NAME = "nearfield-config"
FOLDER = "/etc/nearfield-config"
FILE = "agent.yaml"


def apply(site: Site, *, env: Mapping[str, str] | None = None, **sections: Json) -> None:
    """Start the agent with these sections of AgentConfig, on a cluster that is thrown away with them."""
    text = yaml.safe_dump({"apiVersion": "config.nearfield.dev/v1alpha1", "kind": "AgentConfig", **sections})
    objects = site.agent.manifests(env={"NEARFIELD_CONFIG": f"{FOLDER}/{FILE}", **(env or {})}, edit=_mount)
    metadata = {"name": NAME, "namespace": agents.NAMESPACE}
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {FILE: text}})
    site.agent.apply_objects(objects)
    site.agent.wait_ready()


def _mount(template: Json) -> None:
    template["spec"]["volumes"].append({"name": "config", "configMap": {"name": NAME}})
    agents.agent_container(template)["volumeMounts"].append({"name": "config", "mountPath": FOLDER, "readOnly": True})
