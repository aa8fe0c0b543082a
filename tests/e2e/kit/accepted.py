# SPDX-License-Identifier: Apache-2.0
"""Whether an API server takes the slices of a machine as they are."""

from __future__ import annotations

import yaml

from tests.e2e.kit import machines
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site


def require(site: Site, *names: str) -> None:
    """`kubectl create --dry-run=server` accepts the slices of these machines, all their GPUs are in them, and no field is dropped."""
    sent: list[Json] = []
    for number, machine in enumerate(names):
        bodies = list(yaml.safe_load_all(machines.slices(machine, site.node_name)))
        assert sum(len(body["spec"]["devices"]) for body in bodies) == machines.gpus(machine)
        for body in bodies:
            # Not the name of the slice that the agent published here, which a dry run too must not take.
            body["metadata"]["name"] = f"dry-run-{number}-{body['metadata']['name']}"
        sent += bodies
    text = yaml.safe_dump_all(sent)
    answered = site.cluster.kubectl("create", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=text)
    assert [item["spec"] for item in yaml.safe_load_all(answered)] == [item["spec"] for item in sent]
