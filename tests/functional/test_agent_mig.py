# SPDX-License-Identifier: Apache-2.0
"""The whole agent as a process, on a mock machine whose first GPU is divided at need and takes a second for it. Aspects: killed in the
middle of making an instance, told to end in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import pytest

from discovery.mock import faults
from discovery.mock import mig as admin
from discovery.mock.fault import Fault, Kind
from driver import values
from driver.standin import kubelet as standin
from tests.fakes import agents, mockmachine

pytestmark = pytest.mark.timeout(300)

DRIVER = values.DRIVER_NAME
CONFIG = """\
apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing: [{match: {count: 1}, mode: mig-dynamic}]
"""
PART = values.partition_device_name(mockmachine.GPU0, profile="3g.40gb", profile_id=9, start=4)
THERE = [(9, 4)]
HANG = Fault(kind=Kind.NVML_HANG, target=mockmachine.GPU0, function="nvmlDeviceCreateGpuInstanceWithPlacement")


class Divided:
    """A node with the machine, and its kubelet."""

    def __init__(self, node: agents.Node) -> None:
        self.node = node
        self._config, self._machine = node.directory / "config.yaml", node.directory / "machine.yaml"
        self._config.write_text(CONFIG)
        self._machine.write_text(mockmachine.TEXT.replace("driver: {", "driver: {migTimes: {create: 1.0}, "))
        self.agent = self.start()
        self.kubelet: standin.StandInKubelet = node.kubelet()
        self.kubelet.wait_registered(DRIVER)
        agents.until(lambda: PART in {device["name"] for device in node.devices()}, "the partitions")

    def start(self) -> agents.Agent:
        """An agent, which `agent` is from now on."""
        self.agent = self.node.start("--config", str(self._config), mock=str(self._machine))
        return self.agent

    def restart(self) -> None:
        """The next agent, once kubelet has it."""
        self.start()
        agents.until(self.agent.ready, "the next agent")

    def instances(self) -> list[tuple[int, int]]:
        """(profile, start) on the GPU."""
        found = admin.instances(self.node.mock_dir)[mockmachine.GPU0] or ()
        return sorted((instance.profile_id, instance.placement.start) for instance in found)

    def begun(self) -> bool:
        """Whether MIG is on: the hardware is at work, or done."""
        return admin.instances(self.node.mock_dir)[mockmachine.GPU0] is not None


@pytest.fixture(name="divided")
def fixture_divided() -> Iterator[Divided]:
    with agents.node() as node:
        yield Divided(node)


def test_killed_while_an_instance_is_made_the_next_agent_finds_it(divided: Divided) -> None:
    claim = divided.node.claim("c1", PART)
    # It takes until after the kill, however long that takes.
    faults.apply(divided.node.mock_dir, [HANG])
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(divided.kubelet.prepare, DRIVER, [claim])
        agents.until(divided.begun, "the work")
        divided.agent.kill()
        faults.apply(divided.node.mock_dir, [])
        assert asked.exception(agents.WAIT_S) is not None or not isinstance(asked.result()[claim.uid], values.Prepared)
    divided.restart()
    answer = divided.kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert isinstance(answer, values.Prepared)
    assert divided.instances() == THERE
    assert divided.kubelet.prepare(DRIVER, [claim])[claim.uid] == answer
    assert isinstance(divided.kubelet.unprepare(DRIVER, [claim])[claim.uid], values.Unprepared)
    assert divided.instances() == []


def test_told_to_end_while_an_instance_is_made_it_answers_first(divided: Divided) -> None:
    claim = divided.node.claim("c1", PART)
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(divided.kubelet.prepare, DRIVER, [claim])
        agents.until(divided.begun, "the work")
        assert divided.agent.terminate() == 0
        answer = asked.result(agents.WAIT_S)[claim.uid]
    assert isinstance(answer, values.Prepared)
    assert divided.instances() == THERE
    divided.restart()
    assert divided.kubelet.prepare(DRIVER, [claim])[claim.uid] == answer
    whole = divided.node.claim("c2", values.gpu_device_name(mockmachine.GPU0))
    divided.kubelet.unprepare(DRIVER, [claim])
    assert isinstance(divided.kubelet.prepare(DRIVER, [whole])[whole.uid], values.Prepared)
    assert not divided.begun()
