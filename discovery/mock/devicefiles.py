# SPDX-License-Identifier: Apache-2.0
"""The files that drivers add to PCI functions: RDMA devices, NVMe controllers, NVIDIA's procfs, /dev; and the ports of NICs, whose
interfaces `netfiles` writes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from discovery.mock import identity, machine
from discovery.mock import products as parts
from discovery.mock.pcifiles import up
from discovery.mock.pcitree import Function
from discovery.mock.recording import Entry, Link

_MLX5 = "mlx5_core"
_LINK_LAYERS = {"Unspecified": "Unknown"}
"""As sysfs writes them, where that is another word (link_layer_show, drivers/infiniband/core/sysfs.c)."""

_IB_RATES = {100: "EDR", 200: "HDR", 400: "NDR", 800: "XDR"}

_NVIDIA_MAJOR = 195
"""Fixed (Documentation/admin-guide/devices.txt); the others are handed out at load time."""

_MAJORS = {"nvidia": _NVIDIA_MAJOR, "nvidia-modeset": _NVIDIA_MAJOR, "nvidiactl": _NVIDIA_MAJOR}
_DYNAMIC = ("nvidia-nvlink", "nvidia-caps", "nvidia-caps-imex-channels", "nvidia-nvswitch", "nvidia-uvm")
_FIRST_DYNAMIC = 511
_OTHER_MAJORS = {"mem": 1, "misc": 10, "infiniband_verbs": 231}


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPort:
    """One function of a NIC with all that is derived: names, link, rate. `device`: what its interface hangs on."""

    function: Function
    device: str
    interface: str | None
    rdma: str | None
    link: str
    rate: int
    up: bool


def nic_ports(functions: Sequence[Function]) -> tuple[NicPort, ...]:
    """The bound NIC functions, virtual ones last. RDMA devices are numbered as mlx5_core does, in order of address; others are
    named by their place, as rdma-core does.
    """
    nics = [function for function in functions if isinstance(function.part, parts.Nic)]
    nics.sort(key=lambda function: (function.physical is not None, function.address))
    sharing = Counter((f.address.domain, f.address.bus, f.address.device) for f in nics if f.physical is None)
    rdma = (f"mlx5_{number}" for number in itertools.count())
    virtio = (f"virtio{number}" for number in itertools.count())
    ports = []
    for function in nics:
        part = function.part
        assert isinstance(part, parts.Nic)
        if function.driver != part.driver:
            continue
        first = function.physical or function.address
        usual = part.functions[first.function]
        said = function.port or machine.Port.model_construct()
        link = said.link or usual.link
        several = sharing[first.domain, first.bus, first.device] > 1
        given = said if function.physical is None else machine.Port.model_construct()
        ports.append(
            NicPort(
                function=function,
                device=f"{function.directory}/{next(virtio)}" if part.virtio else function.directory,
                interface=given.interface or _interface(function, link, several=several) if part.netdev else None,
                rdma=given.rdma or (next(rdma) if part.driver == _MLX5 else _rdma_name(function))
                if part.rdma
                else None,
                link=link,
                rate=said.rate or usual.rate,
                up=said.up,
            )
        )
    return tuple(ports)


def _interface(function: Function, link: str, *, several: bool) -> str:
    """The name that systemd gives by the PCI path (systemd.net-naming-scheme(7)); mlx5 calls its port p<function>."""
    at = function.physical or function.address
    domain = f"P{at.domain}" if at.domain else ""
    name = f"{'en' if link == 'Ethernet' else 'ib'}{domain}p{at.bus}s{at.device}"
    if several:
        name += f"f{at.function}"
    if function.physical is not None:
        return f"{name}v{function.ordinal}"[:15]
    if link == "Ethernet" and function.driver == _MLX5:
        name += f"np{at.function}"
    return name[:15]


def _rdma_name(function: Function) -> str:
    """The name that rdma_rename of rdma-core gives by the PCI path to what is neither InfiniBand nor Ethernet (`rdmap79s0`)."""
    at = function.address
    domain = f"P{at.domain}" if at.domain else ""
    return f"rdma{domain}p{at.bus}s{at.device}" + (f"f{at.function}" if at.function else "")


def rdma_files(name: str, ports: Sequence[NicPort]) -> dict[str, Entry]:
    """RDMA devices of a machine called `name`."""
    tree: dict[str, Entry] = {}
    verbs = itertools.count()
    for port in ports:
        if port.rdma is not None:
            tree.update(_rdma(name, port, verbs=next(verbs)))
    if any(port.rdma for port in ports):
        tree["dev/infiniband/rdma_cm"] = ""
    return tree


def _rdma(name: str, port: NicPort, *, verbs: int) -> dict[str, Entry]:
    inner = f"{port.function.directory}/infiniband/{port.rdma}"
    here = f"sys/devices/{inner}"
    guid = identity.guid_of(name, port.function.address)
    fields = {
        "node_guid": guid,
        "sys_image_guid": identity.guid_of(name, port.function.place),
        "node_type": "7: unspecified" if port.link == "Unspecified" else "1: CA",
        "ports/1/state": "4: ACTIVE" if port.up else "1: DOWN",
        "ports/1/phys_state": "5: LinkUp" if port.up else "2: Polling",
        "ports/1/link_layer": _LINK_LAYERS.get(port.link, port.link),
        "ports/1/rate": f"{port.rate} Gb/sec (4X {_IB_RATES.get(port.rate, 'EDR')})",
        "ports/1/lid": "0x1" if port.link == "InfiniBand" and port.up else "0x0",
        "ports/1/gids/0": f"fe80:0000:0000:0000:{guid}",
        "ports/1/gid_attrs/types/0": "IB/RoCE v1",
    }
    if port.interface is not None:
        fields["ports/1/gid_attrs/ndevs/0"] = port.interface
    tree: dict[str, Entry] = {f"{here}/{field}": f"{value}\n" for field, value in fields.items()}
    tree[f"{here}/device"] = Link(f"../../../{port.function.address}")
    tree[f"{here}/subsystem"] = Link(f"{up(inner)}class/infiniband")
    tree[f"sys/class/infiniband/{port.rdma}"] = Link(f"../../devices/{inner}")
    device = f"{port.function.directory}/infiniband_verbs/uverbs{verbs}"
    tree[f"sys/devices/{device}/ibdev"] = f"{port.rdma}\n"
    tree[f"sys/devices/{device}/dev"] = f"{_OTHER_MAJORS['infiniband_verbs']}:{192 + verbs}\n"
    tree[f"sys/class/infiniband_verbs/uverbs{verbs}"] = Link(f"../../devices/{device}")
    tree[f"dev/infiniband/uverbs{verbs}"] = ""
    return tree


def nvme_files(name: str, functions: Sequence[Function]) -> dict[str, Entry]:
    """NVMe controllers, numbered in order of address."""
    tree: dict[str, Entry] = {}
    bound = (f for f in functions if isinstance(f.part, parts.Nvme) and f.driver == "nvme")
    for number, function in enumerate(bound):
        inner = f"{function.directory}/nvme/nvme{number}"
        fields = {
            "address": function.address,
            "model": function.part.name,
            "serial": identity.number_of(name, function.address, digits=14),
            "transport": "pcie",
            "state": "live",
            "numa_node": -1 if function.numa is None else function.numa,
            "dev": f"{239}:{number}",
        }
        tree.update({f"sys/devices/{inner}/{field}": f"{value}\n" for field, value in fields.items()})
        tree[f"sys/devices/{inner}/device"] = Link(f"../../../{function.address}")
        tree[f"sys/devices/{inner}/subsystem"] = Link(f"{up(inner)}class/nvme")
        tree[f"sys/class/nvme/nvme{number}"] = Link(f"../../devices/{inner}")
        tree[f"dev/nvme{number}"] = ""
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGpu:
    """A GPU that the NVIDIA driver holds."""

    function: Function
    uuid: str
    minor: int
    numa_node: int | None


def nvidia_files(
    driver: machine.Driver, architecture: str, gpus: Sequence[BoundGpu], functions: Sequence[Function]
) -> dict[str, Entry]:
    """What the NVIDIA driver shows while it is loaded: modules, procfs, device nodes."""
    nvswitches = sum(function.driver == "nvidia-nvswitch" for function in functions)
    modules = ["nvidia", "nvidia_uvm", "nvidia_modeset", *(["nvidia_peermem"] if driver.peer_memory else ())]
    tree: dict[str, Entry] = {f"sys/module/{module}/version": f"{driver.version}\n" for module in modules}
    if driver.peer_memory:
        tree["sys/kernel/mm/memory_peers/nv_mem/version"] = f"{driver.version}\n"
    flavour = f"Open Kernel Module for {architecture}" if driver.open_kernel_module else f"{architecture} Kernel Module"
    tree["proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX {flavour}  {driver.version}  Release Build\nGCC version:  gcc version 13.3.0\n"
    )
    tree["proc/driver/nvidia/params"] = (
        "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
    )
    for number, capability in enumerate(("mig/config", "mig/monitor"), start=1):
        tree[f"proc/driver/nvidia/capabilities/{capability}"] = (
            f"DeviceFileMinor: {number}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
        )
        tree[f"dev/nvidia-caps/nvidia-cap{number}"] = ""
    for gpu in gpus:
        tree.update(_information(driver, gpu))
    nodes = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", *(f"nvidia{gpu.minor}" for gpu in gpus)]
    if nvswitches:
        nodes += ["nvidia-nvswitchctl", *(f"nvidia-nvswitch{number}" for number in range(nvswitches))]
    tree.update({f"dev/{node}": "" for node in nodes})
    return tree


def _information(driver: machine.Driver, gpu: BoundGpu) -> Iterator[tuple[str, Entry]]:
    here = f"proc/driver/nvidia/gpus/{gpu.function.address}"
    fields = {
        "Model": gpu.function.part.name,
        "IRQ": 16 + gpu.minor,
        "GPU UUID": gpu.uuid,
        "Video BIOS": "??.??.??.??.??",
        "Bus Type": "PCIe",
        "DMA Size": "52 bits",
        "DMA Mask": "0xfffffffffffff",
        "Bus Location": gpu.function.address,
        "Device Minor": gpu.minor,
        "GPU Firmware": driver.version,
        "GPU Excluded": "No",
    }
    yield f"{here}/information", "".join(f"{key + ':':<15}\t {value}\n" for key, value in fields.items())
    if gpu.numa_node is not None:
        yield f"{here}/numa_status", f"Node: {gpu.numa_node}\nStatus: online\n"


def device_numbers(*, nvidia: bool, rdma: bool) -> str:
    """/proc/devices."""
    majors = {"mem": 1, "misc": 10}
    if rdma:
        majors["infiniband_verbs"] = _OTHER_MAJORS["infiniband_verbs"]
    if nvidia:
        majors |= _MAJORS | {name: _FIRST_DYNAMIC - number for number, name in enumerate(_DYNAMIC)}
    lines = "".join(
        f"{major:3d} {name}\n" for name, major in sorted(majors.items(), key=lambda item: (item[1], item[0]))
    )
    return f"Character devices:\n{lines}\nBlock devices:\n  7 loop\n259 blkext\n"
