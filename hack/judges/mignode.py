# SPDX-License-Identifier: Apache-2.0
"""A node whose GPUs are divided by MIG at need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from discovery import mig
from driver import values
from hack.judges import agentnode

CONFIGURATION = """apiVersion: config.nearfield.dev/v1alpha1
kind: AgentConfig
sharing:
- mode: mig-dynamic
"""
"""The rules of `nodes.DIVIDED`, as an admin writes them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance of a profile is."""

    gpu: str
    profile_id: int
    start: int

    @classmethod
    def of(cls, part: str) -> Place:
        """The place that the name of a part speaks of."""
        _, profile_id, start = part.rsplit("-", 2)
        return cls(values.gpu_of(part), int(profile_id), int(start))


class DividedNode(agentnode.AgentNode):
    """With what the mock has of MIG."""

    def instances(self) -> dict[str, list[mig.MigPlacement]]:
        """Where the mock has MIG instances, by the device name of their GPU."""
        return {
            values.gpu_device_name(gpu.pci): [
                mig.MigPlacement(start=one.placement.start, size=one.placement.size) for one in gpu.mig.instances
            ]
            for gpu in self.gpus()
            if gpu.mig is not None
        }

    def places(self) -> frozenset[Place]:
        """The same with their profiles."""
        return frozenset(
            Place(values.gpu_device_name(gpu.pci), one.profile_id, one.placement.start)
            for gpu in self.gpus()
            if gpu.mig is not None
            for one in gpu.mig.instances
        )


@contextlib.contextmanager
def divided(machine: str) -> Iterator[DividedNode]:
    """A node of a machine of the zoo for the block; its agent is not started yet."""
    with agentnode.room() as (directory, api, plugins):
        node = DividedNode(directory, machine, api, plugins, configuration=CONFIGURATION)
        try:
            yield node
        finally:
            node.kill()
