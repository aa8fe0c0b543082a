# SPDX-License-Identifier: Apache-2.0
"""The configuration file: strict models of what people write in it, and the way from there to `config.AgentConfig`.

Everything unknown is an error that names the line, so that a misspelt policy never means "no policy". The JSON Schema
made from the same models is published in docs/configuration.schema.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from discovery import address, document, strict
from discovery.errors import DocumentError
from driver import config, configshares
from driver.errors import ConfigError
from driver.sharing import globs, hiding, rules

KIND = "AgentConfig"
PATH_MAX = 4095
"""What the kernel takes as a path (limits.h)."""

RULES_MAX = 100
PROFILES_MAX = 32
PRODUCT_MAX = 96
"""NVML gives no longer name (NVML_DEVICE_NAME_V2_BUFFER_SIZE)."""

PROFILE_MAX = 64
NUMA_MAX = 1023
"""The kernel has no higher node (CONFIG_NODES_SHIFT is at most 10)."""

COUNT_MAX = 1024
UUID_PATTERN = r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


def _is_something(value: object) -> object:
    if value is None:
        raise ValueError("must not be null: give a value, or leave it out")
    return value


def _is_a_uuid(value: str) -> str:
    if re.fullmatch(UUID_PATTERN, value) is None:
        raise ValueError(f"{value[:64]!r} is not the UUID of a GPU, as nvidia-smi -L prints it (GPU-...)")
    return value


def _is_a_pattern(value: str) -> str:
    globs.check(value)
    return value


def _is_a_short_list(value: object) -> object:
    if value == []:
        raise ValueError("must not be empty: leave it out where every profile is offered")
    if isinstance(value, list) and len(value) > PROFILES_MAX:
        raise ValueError(f"has more than {PROFILES_MAX} patterns")
    return value


def _is_not_too_long(value: object) -> object:
    if isinstance(value, list) and len(value) > RULES_MAX:
        raise ValueError(f"has more than {RULES_MAX} rules")
    return value


_NOT_NULL = pydantic.BeforeValidator(_is_something)

Pattern = Annotated[str, pydantic.Field(min_length=1), pydantic.AfterValidator(_is_a_pattern)]
Profiles = Annotated[
    tuple[Annotated[Pattern, pydantic.Field(max_length=PROFILE_MAX)], ...],
    pydantic.Field(strict=False, json_schema_extra={"minItems": 1, "maxItems": PROFILES_MAX}),
]
Uuid = Annotated[
    str, pydantic.AfterValidator(_is_a_uuid), pydantic.Field(json_schema_extra={"pattern": f"^{UUID_PATTERN}$"})
]


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


class Match(strict.Section):
    """The GPUs that a rule is for: all that is given must hold. Without anything, every GPU."""

    address: Annotated[strict.Address | None, _NOT_NULL] = None
    """PCI address of the GPU, such as 0000:1b:00.0."""

    uuid: Annotated[Uuid | None, _NOT_NULL] = None
    """UUID of the GPU, as `nvidia-smi -L` prints it."""

    product: Annotated[Annotated[Pattern, pydantic.Field(max_length=PRODUCT_MAX)] | None, _NOT_NULL] = None
    """Pattern of the product name with `*`, `?` and `[...]`: `*H100*`."""

    numa_node: Annotated[Annotated[int, pydantic.Field(ge=0, le=NUMA_MAX)] | None, _NOT_NULL] = None
    """The NUMA node of the GPU."""

    count: Annotated[Annotated[int, pydantic.Field(ge=1, le=COUNT_MAX)] | None, _NOT_NULL] = None
    """Only the first so many by PCI address, of those that no earlier rule took."""


class SharingRule(strict.Section):
    """How some GPUs are shared."""

    match: Annotated[Match | None, _NOT_NULL] = None
    """Which GPUs the rule is for; without it, all that no earlier rule took."""

    mode: Literal["exclusive", "mig-static", "mig-dynamic", "shares"]
    """exclusive: the whole GPU. mig-static: MIG instances that somebody made. mig-dynamic: the whole, or instances made at need. shares: portions of it."""

    fallback: Literal["whole", "none"] = "whole"
    """What is offered where the API server drops the fields that parts or shares need: the GPU, or the instance, as a whole, or none."""

    profiles: Annotated[Profiles | None, _NOT_NULL, pydantic.BeforeValidator(_is_a_short_list)] = None
    """Patterns of the MIG profiles that are offered of a mig-dynamic GPU: `1g.*`; without it, all."""

    shares: Annotated[configshares.Shares | None, _NOT_NULL] = None
    """In which shares memory and compute are given out; needed by mode shares, and allowed with mig-static."""


class AgentConfig(strict.Section):
    """Configuration of the Nearfield agent."""

    api_version: strict.ApiVersion
    kind: Literal["AgentConfig"]
    publish: Publish = Publish()
    topology: Topology = Topology()
    sharing: Annotated[
        tuple[SharingRule, ...],
        pydantic.BeforeValidator(_is_not_too_long),
        pydantic.Field(strict=False, json_schema_extra={"maxItems": RULES_MAX}),
    ] = ()
    """Rules by which GPUs are shared: the first that matches a GPU wins, and a GPU without one is handed out whole."""


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
    rails, problems = _rails(read.topology, source)
    sharing = tuple(map(_rule, read.sharing))
    problems += _sharing_problems(sharing, source)
    if problems:
        raise ConfigError(document.listed(source.name, problems))
    overlay_file = folder / read.topology.overlay_file if read.topology.overlay_file else None
    return config.AgentConfig(
        publish=config.PublishConfig(
            numa_node=config.NumaNodeForm(read.publish.numa_node), pcie_switches=read.publish.pcie_switches
        ),
        topology=config.TopologyConfig(overlay_file=overlay_file, rails=rails),
        sharing=sharing,
    )


def _rails(topology: Topology, source: document.Document) -> tuple[dict[address.PciAddress, int], list[str]]:
    """The rails, and those that are given to a NIC a second time."""
    rails: dict[address.PciAddress, int] = {}
    problems: list[str] = []
    for index, entry in enumerate(topology.rails):
        nic = address.parse(entry.nic)
        if nic in rails:
            problems.append(
                f"{source.where(('topology', 'rails', index, 'nic'))}: {nic} has a rail already ({rails[nic]})"
            )
        rails.setdefault(nic, entry.rail)
    return rails, problems


def _rule(read: SharingRule) -> rules.Rule:
    match = read.match if read.match is not None else Match()
    return rules.Rule(
        match=rules.Match(
            address=None if match.address is None else address.parse(match.address),
            uuid=match.uuid,
            product=match.product,
            numa_node=match.numa_node,
            count=match.count,
        ),
        mode=rules.Mode(read.mode),
        fallback=rules.Fallback(read.fallback),
        profiles=read.profiles or (),
        shares=None if read.shares is None else configshares.value(read.shares),
    )


def _sharing_problems(sharing: Sequence[rules.Rule], source: document.Document) -> list[str]:
    """What rules say that cannot be meant."""
    problems = [
        f"{source.where(('sharing', index, 'profiles'))}: only mode mig-dynamic makes instances of profiles, not {rule.mode}"
        for index, rule in enumerate(sharing)
        if rule.profiles and rule.mode is not rules.Mode.MIG_DYNAMIC
    ]
    for index, rule in enumerate(sharing):
        problems += configshares.problems(rule, source, ("sharing", index))
    problems += [
        f"{source.where(('sharing', index))}: has no effect: every GPU that it matches is taken by sharing[{before}] (line"
        f" {source.line(('sharing', before))}) before it; put it in front of that, or remove it"
        for index, before in hiding.hidden(sharing)
    ]
    return problems


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
        "sharing": [_rule_to_json(rule) for rule in effective.sharing],
    }


def _rule_to_json(rule: rules.Rule) -> dict[str, object]:
    match = {
        "address": None if rule.match.address is None else str(rule.match.address),
        "uuid": rule.match.uuid,
        "product": rule.match.product,
        "numaNode": rule.match.numa_node,
        "count": rule.match.count,
    }
    return (
        {
            "match": {name: value for name, value in match.items() if value is not None},
            "mode": rule.mode.value,
            "fallback": rule.fallback.value,
        }
        | ({"profiles": list(rule.profiles)} if rule.profiles else {})
        | ({"shares": configshares.to_json(rule.shares)} if rule.shares is not None else {})
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the file."""
    return strict.json_schema(AgentConfig)


def main() -> int:
    """Read the file that the command line names, for another process: what is in effect as JSON, or the problems, a line each."""
    try:
        effective = load(Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(to_json(effective)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
