# SPDX-License-Identifier: Apache-2.0
"""The catalogue of products that machines are built of (products.yaml): facts of data sheets and of pci.ids, with sources.

Strict models: an unknown key or a wrong type is an error that names its place. The same models read the `products` of a
Machine, so that a machine with new parts needs no change here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic.alias_generators import to_camel

from discovery.mock import abi, cpulists

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15}) ?(B|KiB|MiB|GiB|TiB)")
_PCI_ID = re.compile(r"([0-9a-f]{4}):([0-9a-f]{4})")

SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
"""GT/s of a PCIe generation, as the kernel writes them (pci_speed_string)."""


class PciId(NamedTuple):
    """A pair of PCI identifiers: vendor and device, or subsystem vendor and subsystem device."""

    vendor: int
    device: int


def text(pattern: str) -> Any:
    """What a validator of ours takes, for the JSON Schema."""
    return Annotated[str, Field(pattern=pattern)]


def _size(value: object) -> object:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no size; write a number and B, KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2]]


def _pci_id(value: object) -> object:
    match = _PCI_ID.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is no pair of PCI ids; write "10de:2330", in quotes')
    return PciId(int(match[1], 16), int(match[2], 16))


def _hex(digits: int, example: str) -> PlainValidator:
    """So many hexadecimal digits, as text: unquoted, YAML would take `18` for eighteen."""
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")

    def read(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f'{value!r} is not {digits} hexadecimal digits in quotes, such as "{example}"')
        return int(value, 16)

    return PlainValidator(read, json_schema_input_type=text(f"^{pattern.pattern}$"))


def _version(value: object) -> object:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) != 2 or not all(part.isdecimal() and len(part) <= 4 for part in parts):
        raise ValueError(f'{value!r} is no version; write "9.0", in quotes')
    return (int(parts[0]), int(parts[1]))


def _cpus(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is no list of CPUs; write "0-55,112-167", in quotes')  # noqa: TRY004 - pydantic's way
    return cpulists.parse(value)


Size = Annotated[int, PlainValidator(_size, json_schema_input_type=text(f"^{_SIZE.pattern}$"))]
Ids = Annotated[PciId, PlainValidator(_pci_id, json_schema_input_type=text(f"^{_PCI_ID.pattern}$"))]
Class = Annotated[int, _hex(6, "030200")]
Revision = Annotated[int, _hex(2, "a1")]
Bus = Annotated[int, _hex(2, "1b")]
Version = Annotated[tuple[int, int], PlainValidator(_version, json_schema_input_type=text(r"^[0-9]{1,4}\.[0-9]{1,4}$"))]
Numbers = Annotated[
    tuple[int, ...], PlainValidator(_cpus, json_schema_input_type=text(r"^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$"))
]
Generation = Annotated[int, Field(ge=1, le=6)]
Width = Literal[1, 2, 4, 8, 12, 16, 32]
LinkLayer = Literal["InfiniBand", "Ethernet", "Unspecified"]
"""Unspecified: an RDMA device of neither kind, such as EFA's."""


class Model(BaseModel):
    """What all documents of people have in common: exact types, no unknown keys, camelCase."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class Pcie(Model):
    """The best link a function can train to."""

    generation: Generation
    width: Width


class Part(Model):
    """Any PCI function. `source` says where the facts are published; a link that is not published is left out."""

    source: str
    name: str
    pci: Ids
    subsystem: Ids | None = None
    revision: Revision | None = None
    pcie: Pcie | None = None


class NvLinks(Model):
    """The NVLinks of a GPU. `version` as in nvmlNvlinkVersion_t's names."""

    version: str = Field(pattern="^(" + "|".join(abi.NVLINK_VERSIONS) + ")$")
    links: int = Field(ge=1, le=abi.NVLINK_MAX_LINKS)


class Companion(Model):
    """A further function of a card, such as the HDMI audio of a GPU."""

    pci: Ids
    class_: Class = Field(alias="class")
    driver: str | None = None


class VirtualFunctions(Model):
    """SR-IOV of one function (PCIe base specification, 9.3.3): how many it can have, and how routing ids follow from its own.
    `pci` is theirs where it is another one; they have the vendor of their physical function.
    """

    total: int = Field(ge=1, le=1023)
    offset: int = Field(default=1, ge=1, le=0xFF)
    stride: int = Field(default=1, ge=1, le=0xFF)
    pci: Ids | None = None


class MigProfile(Model):
    """A GPU instance profile: a line of `nvidia-smi mig -lgip`, under the headings of that table, with its line of `-lgipp`.

    `kind` is the name behind NVML_GPU_INSTANCE_PROFILE_; `most` the instances of it at once; `at` the memory slices where one
    of them can begin, `size` how many it takes. Engines that are not named are none.
    """

    id: int = Field(ge=0)
    kind: str = Field(pattern="^(" + "|".join(abi.GPU_INSTANCE_PROFILES) + ")$")
    name: str = Field(pattern=r"^[1-8]g\.[0-9]{1,4}gb([+-][a-z]+(\.[a-z]+)?)?$")
    memory: Size
    sm: int = Field(ge=1)
    ce: int = Field(default=0, ge=0)
    dec: int = Field(default=0, ge=0)
    enc: int = Field(default=0, ge=0)
    jpeg: int = Field(default=0, ge=0)
    ofa: int = Field(default=0, ge=0)
    most: int = Field(ge=1)
    at: Numbers = Field(min_length=1)
    size: int = Field(ge=1)

    @property
    def slices(self) -> int:
        """Its compute slices."""
        return int(self.kind[0])

    @model_validator(mode="after")
    def _fits(self) -> MigProfile:
        if not self.name.startswith(self.kind[0]):
            raise ValueError(f"{self.name} is no profile of {self.slices} slices, which {self.kind} says")
        if self.memory % _UNITS["MiB"]:
            raise ValueError(f"the memory of {self.name} is no whole number of MiB, in which NVML tells it")
        apart = [
            start for number, start in enumerate(self.at) if number == 0 or start - self.at[number - 1] >= self.size
        ]
        if self.most > len(apart):
            raise ValueError(
                f"{self.most} instances of {self.name} have no room at {len(apart)} places that do not overlap"
            )
        return self


class Mig(Model):
    """Multi-Instance GPU. Without `profiles` they are not known, and NVML answers that it supports none.

    `compute` are the compute instances that take a part of a GPU instance: compute slices -> multiprocessors. Every GPU
    instance has those that are smaller than itself, and one that takes all of it (`migstate`).
    """

    source: str | None = None
    devices: int = Field(ge=1, le=14)
    """The most at once (nvmlDeviceGetMaxMigDeviceCount)."""
    profiles: tuple[MigProfile, ...] = Field(default=(), max_length=len(abi.GPU_INSTANCE_PROFILES))
    compute: Mapping[Annotated[int, Field(ge=1, le=4)], Annotated[int, Field(ge=1)]] = {}

    @model_validator(mode="after")
    def _told_apart(self) -> Mig:
        for key in ("id", "kind", "name"):
            values = [getattr(profile, key) for profile in self.profiles]
            if len(set(values)) != len(values):
                raise ValueError(f"two profiles have the same {key}")
        if self.profiles and self.source is None:
            raise ValueError("profiles need their source")
        slices = max((start + profile.size for profile in self.profiles for start in profile.at), default=0)
        for profile in self.profiles:
            if slices % profile.size or any(start % profile.size for start in profile.at):
                raise ValueError(f"{profile.name} is no half, quarter or eighth of {slices} memory slices")
        return self


class Gpu(Part):
    """A GPU. `memory` is the total that NVML gives. `c2c`: whether it reaches its CPU by NVLink-C2C."""

    class_: Class = Field(alias="class")
    brand: str = Field(default="nvidia", pattern="^(" + "|".join(abi.BRANDS) + ")$")
    architecture: str = Field(pattern="^(" + "|".join(abi.ARCHITECTURES) + ")$")
    compute_capability: Version
    memory: Size
    reserved_memory: Size = 0
    multiprocessors: int = Field(ge=1)
    cores: int = Field(ge=1)
    power_limit_watts: int = Field(ge=1)
    ecc: bool = True
    nvlink: NvLinks | None = None
    c2c: bool = Field(default=False, alias="c2c")
    virtual_functions: VirtualFunctions | None = None
    mig: Mig | None = None
    companions: tuple[Companion, ...] = ()


class Bridge(Part):
    """A root port, or the ports of a switch."""

    pcie: Pcie


class NicFunction(Model):
    """One PCI function of a NIC and its port. `rate` in Gbit/s."""

    link: LinkLayer = "Ethernet"
    rate: int = Field(ge=1)


class Nic(Part):
    """A NIC. `rdma`, `netdev`: whether its driver registers RDMA devices and network interfaces; `virtio`: whether these hang on a
    device of the virtio bus, which the function makes.
    """

    driver: str = "mlx5_core"
    rdma: bool = True
    netdev: bool = True
    virtio: bool = False
    functions: tuple[NicFunction, ...] = Field(max_length=8)
    virtual_functions: VirtualFunctions | None = None


class Nvme(Part):
    """An NVMe controller."""


class Device(Part):
    """Any other function: NVSwitch, data-direct function, management controller."""

    class_: Class = Field(alias="class")
    driver: str | None = None


class Products(Model):
    """All sections of a catalogue."""

    gpus: Mapping[str, Gpu] = {}
    bridges: Mapping[str, Bridge] = {}
    nics: Mapping[str, Nic] = {}
    nvmes: Mapping[str, Nvme] = {}
    devices: Mapping[str, Device] = {}

    def over(self, other: Products) -> Products:
        """This catalogue, with the entries of another for what this one has not."""
        names = type(self).model_fields
        return self.model_copy(update={name: {**getattr(other, name), **getattr(self, name)} for name in names})


class ProductsDocument(Products):
    """The file."""

    api_version: Literal["mock.nearfield.dev/v1alpha1"]
    kind: Literal["Products"]
