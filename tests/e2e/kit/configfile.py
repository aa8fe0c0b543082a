# SPDX-License-Identifier: Apache-2.0
"""A configuration file for the agent, as administrators bring it onto a cluster: a ConfigMap that is mounted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import yaml

from tests.e2e.kit import agent as agents
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site

NAME = "nearfield-config"
FOLDER = "/etc/nearfield-config"
FILE = "agent.yaml"


@contextlib.contextmanager
def applied(site: Site, **sections: Json) -> Iterator[None]:
    """For the block, an agent that was started with these sections of AgentConfig. It runs without a file afterwards."""
    text = yaml.safe_dump({"apiVersion": "config.nearfield.dev/v1alpha1", "kind": "AgentConfig", **sections})
    metadata = {"name": NAME, "namespace": agents.NAMESPACE}
    site.api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {FILE: text}})
    try:
        site.agent.apply(env={"NEARFIELD_CONFIG": f"{FOLDER}/{FILE}"}, edit=_mount)
        yield
    finally:
        site.agent.apply()
        site.api.delete("ConfigMap", NAME, agents.NAMESPACE)


def _mount(template: Json) -> None:
    template["spec"]["volumes"].append({"name": "config", "configMap": {"name": NAME}})
    agents.agent_container(template)["volumeMounts"].append({"name": "config", "mountPath": FOLDER, "readOnly": True})
