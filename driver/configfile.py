# SPDX-License-Identifier: Apache-2.0
"""The configuration file: strict models of what people write in it, and the way from there to `config.AgentConfig`.

Everything unknown is an error that names the line, so that a misspelt policy never means "no policy". The JSON Schema
made from the same models is published in docs/configuration.schema.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from discovery import address, document, strict
from discovery.errors import DocumentError
from driver import config
from driver.errors import ConfigError

KIND = "AgentConfig"
PATH_MAX = 4095
"""What the kernel takes as a path (limits.h)."""


class Publish(strict.Section):
    """What is published, and in which form."""

    numa_node: Literal["scalar", "list"] = "scalar"
    """Form of the attribute resource.kubernetes.io/numaNode. `list` needs the cluster's feature DRAListTypeAttributes."""

    pcie_switches: bool = False
    """Publish all PCIe switches above a GPU, innermost first. Needs the cluster's feature DRAListTypeAttributes."""


class Topology(strict.Section):
    """What an admin knows about the machine and the machine does not tell."""

    overlay_file: Annotated[str, pydantic.Field(max_length=PATH_MAX)] = ""
    """A TopologyOverlay (YAML) or a NCCL topology (XML), by its path from the folder of this file; empty: none."""

    rails: tuple[strict.Rail, ...] = pydantic.Field(default=(), strict=False)
    """Rails of NICs, over those of the overlay. With any, a NIC that is not named has none; without, paired NICs are counted."""

    @pydantic.field_validator("overlay_file")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path has no NUL byte")
        return value


class AgentConfig(strict.Section):
    """Configuration of the Nearfield agent."""

    api_version: strict.ApiVersion
    kind: Literal["AgentConfig"]
    publish: Publish = Publish()
    topology: Topology = Topology()
    sharing: Annotated[tuple[Any, ...], pydantic.Field(max_length=0, strict=False)] = ()
    """Must be empty: this version shares no GPU."""

    @pydantic.field_validator("sharing", mode="before")
    @classmethod
    def _is_empty(cls, value: object) -> object:
        if isinstance(value, list) and value:
            raise ValueError("must be empty: this version has no sharing mode, every GPU is handed out whole")
        return value


def load(path: Path) -> config.AgentConfig:
    """The configuration in a file. ConfigError with one line for every problem."""
    try:
        return parse(document.read(path), folder=path.parent.absolute())
    except DocumentError as err:
        raise ConfigError(str(err)) from err


def parse(source: document.Document, *, folder: Path) -> config.AgentConfig:
    """The configuration in a document that was read. `folder`: that of its file, in which the files that it names are found.
    ConfigError with one line for every problem.
    """
    try:
        read = strict.validate(AgentConfig, source)
    except DocumentError as err:
        raise ConfigError(str(err)) from err
    rails: dict[address.PciAddress, int] = {}
    twice: list[str] = []
    for index, entry in enumerate(read.topology.rails):
        nic = address.parse(entry.nic)
        if nic in rails:
            twice.append(
                f"{source.where(('topology', 'rails', index, 'nic'))}: {nic} has a rail already ({rails[nic]})"
            )
        rails.setdefault(nic, entry.rail)
    if twice:
        raise ConfigError("\n".join(twice))
    overlay_file = folder / read.topology.overlay_file if read.topology.overlay_file else None
    return config.AgentConfig(
        publish=config.PublishConfig(
            numa_node=config.NumaNodeForm(read.publish.numa_node), pcie_switches=read.publish.pcie_switches
        ),
        topology=config.TopologyConfig(overlay_file=overlay_file, rails=rails),
    )


def to_json(effective: config.AgentConfig) -> dict[str, object]:
    """A configuration as a document with nothing left out, which `parse` reads back."""
    return {
        "apiVersion": strict.API_VERSION,
        "kind": KIND,
        "publish": {
            "numaNode": effective.publish.numa_node.value,
            "pcieSwitches": effective.publish.pcie_switches,
        },
        "topology": {
            "overlayFile": str(effective.topology.overlay_file or ""),
            "rails": [{"nic": str(nic), "rail": rail} for nic, rail in sorted(effective.topology.rails.items())],
        },
        "sharing": [],
    }


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the file."""
    return strict.json_schema(AgentConfig)
