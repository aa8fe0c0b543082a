# SPDX-License-Identifier: Apache-2.0
"""A running agent and GPUs that are divided: partitions that come and go with claims are no write; what an admin makes and removes
is seen, on a GPU that the agent divides and on one that it does not.

"No write" is seen by the count after the looks that every change of the hardware brings.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from discovery.address import parse
from discovery.mock import mig
from driver import values
from tests.fakes import agents

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME
DIVIDED, MADE = "gpu-0000-df-00-0", "gpu-0000-d1-00-0"
CONFIG = """
apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing:
- match: {address: "0000:df:00.0"}
  mode: mig-dynamic
- match: {address: "0000:d1:00.0"}
  mode: mig-static
"""


def names_of(pool: Sequence[dict[str, Any]]) -> list[str]:
    devices = [device for body in pool for device in body["spec"].get("devices", [])]
    return [device["name"] + ("!" if device.get("taints") else "") for device in devices]


class Bench:
    """An agent on a DGX H100 of which one GPU is divided for claims, and one by an admin, who has not begun."""

    def __init__(self, node: agents.Node) -> None:
        self.node = node
        config = node.directory / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        self.agent = node.start("--config", str(config), mock="dgx-h100")
        node.wait_for_devices(7 + 25)

    def looked(self) -> None:
        """Two looks at the hardware that began after now: what the first has found is published, or is being."""
        last = "nearfield_probe_last_success_timestamp_seconds"
        for _ in range(2):
            now = time.time()
            agents.until(lambda since=now: self.value(last) > since, "a look")  # type: ignore[misc]

    def value(self, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", self.agent.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def names(self) -> list[str]:
        return names_of(self.node.slices())

    def names_once(self, counter: str, value: str) -> list[str] | None:
        """The devices of the pool in which a counter of the GPU that the agent divides has a value."""
        pool = self.node.slices()
        sets = [entry for body in pool for entry in body["spec"].get("sharedCounters", [])]
        found = next((entry["counters"][counter]["value"] for entry in sets if entry["name"] == DIVIDED), None)
        return names_of(pool) if found == value else None

    def until_names(self, *expected: str) -> None:
        """Wait for these partitions of the GPU that an admin divides."""
        agents.until(lambda: [name for name in self.names() if name.startswith(MADE)] == list(expected), f"{expected}")


@pytest.fixture(name="bench")
def fixture_bench() -> Iterator[Bench]:
    with agents.node() as node:
        yield Bench(node)


def test_twenty_claims_for_partitions_are_no_write(bench: Bench) -> None:
    kubelet = bench.node.kubelet()
    kubelet.wait_registered(DRIVER)
    agents.until(bench.agent.ready, "ready")
    before, names = bench.node.api.writes("resourceslices"), bench.names()
    for turn in range(20):
        claim = bench.node.claim(f"c{turn}", f"{DIVIDED}-mig-1g-10gb-19-{turn % 7}")
        answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
        assert isinstance(answer, values.Prepared), answer
        if turn in {0, 10}:
            # With the instance there, and MIG enabled.
            bench.looked()
        assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
        bench.node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c{turn}")
    bench.looked()
    assert (bench.node.api.writes("resourceslices"), bench.names()) == (before, names)
    assert "mig-instance-foreign" not in bench.agent.said()


def test_what_an_admin_makes_on_a_gpu_that_the_agent_divides_is_left_alone(bench: Bench) -> None:
    address = parse("0000:df:00.0")
    mig.admin_mode(bench.node.mock_dir, address, True)
    mig.admin_create(bench.node.mock_dir, address, "3g.40gb", 4)
    names = agents.until(lambda: bench.names_once("memory-slice-4", "0"), "the counters go down")
    assert DIVIDED not in names
    assert f"{DIVIDED}-mig-4g-40gb-5-0" in names
    assert f"{DIVIDED}-mig-3g-40gb-9-4" not in names
    agents.until(lambda: "(mig-instance-foreign)" in bench.agent.said(), "it is said")
    mig.admin_destroy(bench.node.mock_dir, address, "3g.40gb", 4)
    assert DIVIDED in agents.until(lambda: bench.names_once("memory-slice-4", "1"), "the counters go up")


def test_what_an_admin_makes_and_removes_appears_and_vanishes(bench: Bench) -> None:
    address, folder = parse("0000:d1:00.0"), bench.node.mock_dir
    kubelet = bench.node.kubelet()
    kubelet.wait_registered(DRIVER)
    small, big = f"{MADE}-mig-1g-10gb-19-0", f"{MADE}-mig-3g-40gb-9-4"
    mig.admin_mode(folder, address, True)
    agents.until(lambda: "(mig-no-instances)" in bench.agent.said(), "MIG without instances is said")
    mig.admin_create(folder, address, "1g.10gb", 0)
    mig.admin_create(folder, address, "3g.40gb", 4)
    bench.until_names(small, big)
    claim = bench.node.claim("c", big)
    answer = kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Prepared), answer
    mig.admin_destroy(folder, address, "3g.40gb", 4)
    bench.until_names(small, f"{big}!")
    assert isinstance(kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    bench.node.api.remove("resourceclaims", f"{agents.NAMESPACE}/c")
    bench.until_names(small)
