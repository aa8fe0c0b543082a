# SPDX-License-Identifier: Apache-2.0
"""The table that people know from `nvidia-smi topo -m`: GPUs and NICs against each other, with CPUs and NUMA node; and below
it, which nvidia-smi does not show, how NVMe controllers reach them. Pure.

GPU0, NIC0, ... count in order of PCI address; they name a row here and nothing else. Virtual functions (SR-IOV) stand with
their physical function, whose paths they share: a NIC may have hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from discovery import model, paths, topology
from discovery.address import PciAddress

SELF = "X"
UNKNOWN = "?"

GIVEN = "*"
"""Marks what comes from an overlay or a configuration file, and not from the machine."""

GIVEN_MEANING = "given by a person, as is what follows from it: paths to and from that device"

LEGEND: tuple[tuple[str, str], ...] = (
    (SELF, "the device itself"),
    ("NV#", "# NVLinks, direct or through NVSwitches"),
    ("PIX", "at most one PCIe switch"),
    ("PXB", "several PCIe switches, but no host bridge"),
    ("PHB", "a PCIe host bridge, as a rule the CPU"),
    ("NODE", "several host bridges of one NUMA node"),
    ("SYS", "the interconnect between NUMA nodes"),
    (UNKNOWN, "several host bridges, and the NUMA node of one of the two is unknown"),
)
"""What a path crosses, nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One device. `paths` has one entry for each column."""

    label: str
    pci: model.PciFunction
    description: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The columns are GPUs, then NICs; the rows are the same, then NVMe controllers: nobody needs the paths between two of those,
    and a storage server has dozens.
    """

    labels: tuple[str, ...]
    rows: tuple[Row, ...]


def build(snapshot: model.Snapshot) -> Matrix:
    """The matrix of a Snapshot."""
    shown = {pci.address for pci in topology.endpoints(snapshot.gpus, snapshot.nics, snapshot.nvmes)}
    virtual = Counter(
        device.pci.physical_function for devices in (snapshot.gpus, snapshot.nics, snapshot.nvmes) for device in devices
    )
    gpus = [gpu for gpu in snapshot.gpus if gpu.address in shown]
    nics = [nic for nic in snapshot.nics if nic.address in shown]
    nvmes = [nvme for nvme in snapshot.nvmes if nvme.address in shown]
    across = [
        *((f"GPU{index}", gpu.pci, _describe_gpu(gpu)) for index, gpu in enumerate(gpus)),
        *((f"NIC{index}", nic.pci, _describe_nic(nic, gpus)) for index, nic in enumerate(nics)),
    ]
    down = [
        *across,
        *(
            (f"NVMe{index}", nvme.pci, ", ".join(nvme.controllers) or _identity(nvme.pci))
            for index, nvme in enumerate(nvmes)
        ),
    ]
    between = {(path.a, path.b): path for path in paths.between_all(snapshot)}

    def spell(a: PciAddress, b: PciAddress) -> str:
        if a == b:
            return SELF
        path = between.get((min(a, b), max(a, b)))
        if path is not None and path.nvlinks:
            return f"NV{path.nvlinks}"
        if path is None or path.path_class is model.PathClass.UNKNOWN:
            return UNKNOWN
        return path.path_class.value

    return Matrix(
        labels=tuple(label for label, _, _ in across),
        rows=tuple(
            Row(
                label=label,
                pci=pci,
                description=description + _describe_virtual(virtual[pci.address]),
                paths=tuple(spell(pci.address, other.address) for _, other, _ in across),
            )
            for label, pci, description in down
        ),
    )


def node(pci: model.PciFunction) -> str | None:
    """The NUMA node of a device, marked where a person gave it."""
    return None if pci.numa_node is None else f"{pci.numa_node}{_mark(pci.numa_source)}"


def switch(pci: model.PciFunction) -> str | None:
    """The innermost switch above a device, marked where a person gave it."""
    return None if pci.switch is None else f"{pci.switch}{_mark(pci.switch_source)}"


def rail(nic: model.Nic) -> str | None:
    """The rail of a NIC, marked where a person gave it."""
    return None if nic.rail is None else f"{nic.rail}{_mark(nic.rail_source)}"


def is_given(pci: model.PciFunction) -> bool:
    """Whether a person said where a device is."""
    return model.Provenance.OVERLAY in (pci.numa_source, pci.switch_source)


def ranges(numbers: Iterable[int]) -> str:
    """CPUs as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _mark(source: model.Provenance | None) -> str:
    return GIVEN if source is model.Provenance.OVERLAY else ""


def _identity(pci: model.PciFunction) -> str:
    return f"device {pci.vendor_id:04x}:{pci.device_id:04x}"


def _describe_virtual(count: int) -> str:
    return f", {count} virtual function{'s' if count > 1 else ''}" if count else ""


def _describe_gpu(gpu: model.Gpu) -> str:
    name = gpu.product or f"NVIDIA device {gpu.pci.device_id:04x}"
    return name if gpu.state is model.GpuState.READY else f"{name} ({gpu.state})"


def _describe_nic(nic: model.Nic, gpus: Sequence[model.Gpu]) -> str:
    names = [*(device.name for device in nic.rdma_devices), *(interface.name for interface in nic.interfaces)]
    name = ", ".join(dict.fromkeys(names)) or _identity(nic.pci)
    if nic.data_direct is None:
        return name
    near = ", ".join(
        f"{gpu.nic.distance} to GPU{index}"
        for index, gpu in enumerate(gpus)
        if gpu.nic is not None and gpu.nic.data_direct == nic.data_direct.address
    )
    return f"{name}, Data Direct {nic.data_direct.address}" + (f" ({near})" if near else "")
