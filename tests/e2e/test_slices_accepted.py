# SPDX-License-Identifier: Apache-2.0
"""`nearfield slices -o yaml | kubectl create --dry-run=server -f -` works for every machine of the zoo, and for those made up here:
the server accepts what would be published, and keeps all of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from discovery.mock import zoo
from tests.e2e.kit import machines
from tests.e2e.kit.sites import Site

ROOT = Path(__file__).parents[2]
NEARFIELD = Path(sys.executable).with_name("nearfield")
OWN = sorted(str(path.relative_to(ROOT)) for path in machines.OWN.glob("*.yaml"))
MACHINES = (*zoo.names(), *OWN, "hack/bench/machines/sixteen-gpus.yaml")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_server_accepts_and_keeps_the_slices(site: Site, machine: str) -> None:
    command = [str(NEARFIELD), "slices", "--mock", machine, "--node-name", site.node_name, "-o", "yaml"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sent = list(yaml.safe_load_all(text))
    answered = site.cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=_renamed(sent))
    kept = yaml.safe_load(answered)
    items = kept["items"] if kept["kind"] == "List" else [kept]
    assert [item["spec"] for item in items] == [item["spec"] for item in sent]
    assert sum(len(item["spec"]["devices"]) for item in sent) == _gpus(machine)


def _renamed(bodies: list[dict[str, object]]) -> str:
    """With other names than those of the slices that the agent published here, which a dry run too must not take."""
    for body in bodies:
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        metadata["name"] = f"dry-run-{metadata['name']}"
    return yaml.safe_dump_all(bodies)


def _gpus(machine: str) -> int:
    nvml = zoo.load(str(ROOT / machine) if "/" in machine else machine).nvml
    assert nvml is not None
    return len(nvml.gpus)
