# SPDX-License-Identifier: Apache-2.0
"""The document `Variant`: another machine, with faults of its own.

    apiVersion: mock.nearfield.dev/v1alpha1
    kind: Variant
    name: faulty-gpu-dead
    base: dgx-h100
    faults: [{kind: gpu-lost, target: gpu3}]

`base` is a machine of the zoo or a file beside the document, a Machine or again a Variant. Everything is as there but for what
stands here, which may be another `driver`, `kernel`, `cgroup` and `memoryAccounting`; the faults of the base are not kept, MIG of the GPUs that `mig` does not name is. UUIDs, MACs and serial numbers follow from the Variant's own name: it is another
node of the same build.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from discovery.mock import machine
from discovery.mock.products import Model


class Variant(Model):
    """The document."""

    api_version: Literal["mock.nearfield.dev/v1alpha1"]
    kind: Literal["Variant"]
    name: str = Field(pattern=machine.NAME)
    description: str = ""
    base: str = Field(min_length=1, max_length=4096)
    seed: int = 0
    faults: tuple[machine.Fault, ...] = ()
    mig: Mapping[str, tuple[machine.MigInstance, ...]] = {}
    driver: machine.Driver | None = None
    kernel: str | None = None
    cgroup: Literal["v1", "v2"] | None = None
    memory_accounting: Literal["dmem", "misc"] | None = None

    def of(self, base: machine.Machine) -> machine.Machine:
        """The machine that it is."""
        own = {"name": self.name, "description": self.description, "seed": self.seed, "faults": self.faults}
        host = {
            name: value
            for name in ("kernel", "cgroup", "memory_accounting")
            if (value := getattr(self, name)) is not None
        }
        return base.model_copy(
            update={
                **own,
                "mig": {**base.mig, **self.mig},
                "driver": self.driver or base.driver,
                "host": base.host.model_copy(update=host),
            }
        )
