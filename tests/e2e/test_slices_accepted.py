# SPDX-License-Identifier: Apache-2.0
"""`nearfield slices -o yaml | kubectl create --dry-run=server -f -` works for every machine of the zoo, and for those made up here:
the server accepts what would be published, and keeps all of it. So do the servers of older releases (test_older_servers.py).

- whole, and as it is
- in shares: every product, and the MIG instances of those that have some
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from discovery.mock import zoo
from tests.e2e.kit import accepted, machines, portions
from tests.e2e.kit.sites import Site

EVERY_PRODUCT = "tests/e2e/machines/every-product.yaml"


@pytest.mark.parametrize("machine", machines.names())
def test_the_server_accepts_and_keeps_the_slices(site: Site, machine: str) -> None:
    accepted.require(site, machine)


SHARED = [
    *((machine, "shares") for machine in machines.names()),
    *((machine, "mig-static") for machine in machines.names() if machine.endswith("-mig")),
]


@pytest.mark.parametrize(("machine", "mode"), SHARED)
def test_the_server_accepts_and_keeps_the_slices_of_shared_gpus(
    site: Site, tmp_path: Path, machine: str, mode: str
) -> None:
    file = tmp_path / "agent.yaml"
    sharing = [portions.rule(mode=mode)]
    document = {"apiVersion": "config.nearfield.dev/v1alpha1", "kind": "AgentConfig", "sharing": sharing}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    devices = accepted.require_shared(site, machine, str(file))
    shared = [device for device in devices if device.get("allowMultipleAllocations")]
    kinds = {device["attributes"]["type"]["string"] for device in shared}
    assert kinds == {"gpu" if mode == "shares" else "mig"}
    assert mode != "shares" or len(shared) == machines.gpus(machine)
    for device in shared:
        assert all(capacity["requestPolicy"]["default"] for capacity in device["capacity"].values())


def test_there_is_a_machine_with_every_product() -> None:
    described = zoo.load(str(machines.ROOT / EVERY_PRODUCT))
    assert described.nvml is not None
    assert {gpu.name for gpu in described.nvml.gpus} == {gpu.name for gpu in zoo.catalogue().gpus.values()}
