# SPDX-License-Identifier: Apache-2.0
"""The machine around the devices: CPUs, sockets, NUMA nodes, and what the NVIDIA kernel driver says in /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from discovery import errors, findings, model, sysfs
from discovery.address import PciAddress

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_GPUS = "proc/driver/nvidia/gpus"
_MEM_TOTAL = re.compile(r"^Node +[0-9]+ +MemTotal: +([0-9]{1,18}) kB$", re.MULTILINE)
_MODULE_VERSION = re.compile(r"^NVRM version:.*?\s([0-9]{3,}(?:\.[0-9]+){1,3})\s", re.MULTILINE)
_OPEN_MODULE = re.compile(r"^NVRM version:.*\bOpen Kernel Module\b", re.MULTILINE)
_KERNEL = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")
_DMA_BUF_KERNEL = (5, 12)
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_MEMORY_NODE = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGpu:
    """What /proc/driver/nvidia/gpus/<address> says of a GPU: `information`, and `numa_status` where it gives its memory to the
    kernel. The driver knows the UUID only once the GPU was initialised. `excluded`: kept from use by the driver's own
    configuration (NVreg_ExcludedGpus). `memory_node`: the NUMA node of its memory, while that is online.
    """

    uuid: str | None = None
    minor: int | None = None
    excluded: bool = False
    memory_node: int | None = None


def host(files: sysfs.Sysfs, memory_bytes: int | None, found: findings.Findings) -> model.Host:
    """The host; `memory_bytes` comes from elsewhere (host.py)."""
    cpus = sysfs.Directory(files, _CPUS, subject="host", found=found)
    online = cpus.cpu_list("online") or ()
    dmi = sysfs.Directory(files, "sys/class/dmi/id", subject="host", found=found)
    kernel = sysfs.Directory(files, "proc/sys/kernel", subject="host", found=found)
    release = kernel.text("osrelease")
    return model.Host(
        boot_id=kernel.text("random/boot_id"),
        kernel=release,
        memory_bytes=memory_bytes,
        online_cpus=online,
        sockets=_sockets(cpus, online),
        vendor=dmi.text("sys_vendor"),
        product=dmi.text("product_name"),
        gpu_direct=_gpu_direct(files, release, found),
    )


def numa_nodes(files: sysfs.Sysfs, found: findings.Findings) -> tuple[model.NumaNode, ...]:
    """The online NUMA nodes, each with its distances to them; none on a kernel without NUMA."""
    root = sysfs.Directory(files, _NODES, subject="host", found=found)
    online = root.cpu_list("online") or ()
    nodes = []
    for node in online:
        directory = root.below(f"node{node}")
        cpus = directory.cpu_list("cpulist")
        if cpus is None:
            found.warning(
                "numa-node-unreadable", f"node{node}", f"/{directory.path}/cpulist is missing: the node is left out"
            )
            continue
        memory = _MEM_TOTAL.search(directory.text("meminfo") or "")
        nodes.append(
            model.NumaNode(
                node=node,
                cpus=cpus,
                memory_bytes=int(memory[1]) * 1024 if memory else None,
                distances=_distances(directory, online, found),
            )
        )
    there = {node.node for node in nodes}
    return tuple(
        replace(node, distances={to: distance for to, distance in node.distances.items() if to in there})
        for node in nodes
    )


def nvidia_module_version(files: sysfs.Sysfs, found: findings.Findings) -> str | None:
    """The version of the NVIDIA kernel driver that is loaded; None when none is."""
    module = sysfs.Directory(files, "sys/module/nvidia", subject="nvidia", found=found).text("version")
    if module is not None:
        return module
    told = sysfs.Directory(files, "proc/driver/nvidia", subject="nvidia", found=found).text("version")
    match = _MODULE_VERSION.search(told or "")
    return match[1] if match else None


def driver_gpu(files: sysfs.Sysfs, where: PciAddress, found: findings.Findings) -> DriverGpu:
    """What the driver says of one GPU; all unknown where it does not know it."""
    directory = sysfs.Directory(files, f"{_GPUS}/{where}", subject=where, found=found)
    told, numa = _fields(directory.text("information")), _fields(directory.text("numa_status"))
    node = numa.get("Node", "")
    uuid, minor = told.get("GPU UUID", ""), told.get("Device Minor", "")
    return DriverGpu(
        uuid=uuid if _UUID.fullmatch(uuid) else None,
        minor=int(minor) if re.fullmatch(r"[0-9]{1,4}", minor) else None,
        excluded=told.get("GPU Excluded") == "Yes",
        memory_node=int(node) if numa.get("Status") == "online" and _MEMORY_NODE.fullmatch(node) else None,
    )


def note_gpu_direct(
    direct: model.GpuDirect, gpus: Iterable[model.PciFunction], nics: Iterable[model.Nic], found: findings.Findings
) -> None:
    """Notes that RDMA NICs cannot reach the memory of GPUs, where there are both."""
    wanted = any(gpu.driver == "nvidia" for gpu in gpus) and any(nic.rdma_devices for nic in nics)
    if wanted and direct.peer_memory is None and direct.dma_buf is not True:
        why = (
            "the NVIDIA driver is not of the open flavour, which dma-buf takes"
            if direct.dma_buf is False
            else "whether this kernel and driver share GPU memory as dma-buf is not known"
        )
        found.info(
            "gpu-direct-missing",
            "host",
            f"nvidia_peermem is not loaded, and {why}: data between NICs and GPUs may have to pass through the memory of the "
            "host; load nvidia_peermem, or use the open kernel modules on Linux 5.12 or newer",
        )


def _gpu_direct(files: sysfs.Sysfs, release: str | None, found: findings.Findings) -> model.GpuDirect:
    """By NVIDIA's documentation of GPUDirect RDMA (GPU Operator, "GPUDirect RDMA and GPUDirect Storage"): dma-buf takes the open
    kernel modules and Linux 5.12. An older kernel may have it all the same, as distributions port it back: unknown.
    """
    modules = (
        name
        for name in _PEER_MEMORY_MODULES
        if sysfs.Directory(files, f"sys/module/{name}", subject="host", found=found).names()
    )
    version = sysfs.Directory(files, "proc/driver/nvidia", subject="nvidia", found=found).text("version")
    kernel = _KERNEL.match(release or "")
    dma_buf = None
    if version is not None and _MODULE_VERSION.search(version + "\n"):
        if not _OPEN_MODULE.search(version):
            dma_buf = False
        elif kernel is not None and (int(kernel[1]), int(kernel[2])) >= _DMA_BUF_KERNEL:
            dma_buf = True
    return model.GpuDirect(peer_memory=next(modules, None), dma_buf=dma_buf)


def _fields(text: str | None) -> Mapping[str, str]:
    """The lines `key: value` of a file of the NVIDIA driver."""
    lines = (line.partition(":") for line in (text or "").splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _sockets(cpus: sysfs.Directory, online: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The online CPUs of each physical package. One CPU tells the others of its package (`core_siblings`, on kernels from 5.3
    on also `package_cpus`), so that hundreds of CPUs take a handful of reads.
    """
    sockets: dict[int, set[int]] = {}
    known: set[int] = set()
    for cpu in online:
        if cpu in known:
            continue
        topology = cpus.below(f"cpu{cpu}/topology")
        package = topology.number("physical_package_id")
        if package is not None and package >= 0:
            told = topology.cpu_mask("core_siblings") or topology.cpu_mask("package_cpus") or ()
            members = {cpu, *told}.intersection(online) - known
            sockets.setdefault(package, set()).update(members)
            known.update(members)
    return {package: tuple(sorted(members)) for package, members in sorted(sockets.items())}


def _distances(directory: sysfs.Directory, online: tuple[int, ...], found: findings.Findings) -> Mapping[int, int]:
    """The row of the SLIT: one distance for each node that is online, in their order."""
    text = directory.text("distance")
    if text is None:
        return {}
    row = text.split()
    if len(row) != len(online) or not all(re.fullmatch(r"[0-9]{1,3}", entry) for entry in row):
        found.failed(
            directory.name, errors.SourceError("sysfs", errors.MALFORMED, f"/{directory.path}/distance: {text[:40]!r}")
        )
        return {}
    return dict(zip(online, map(int, row), strict=True))
