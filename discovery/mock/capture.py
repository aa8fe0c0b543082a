# SPDX-License-Identifier: Apache-2.0
"""Making a Recording of a real node, or of a rendered one: the files that discovery may read and the state behind NVML.

An allow-list says what is taken, so that nothing else can leak: no command line but what concerns IOMMU and PCI, no addresses
of networks, of virtual interfaces only where they stand (`capturenet`), of vital product data only which are the same. What
identifies the machine is replaced (`redact`). A file that cannot be read is left out, as it would be for the probe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from discovery import address, datadirect, endpoints, errors, findings, nvmllibrary, pci, sysfs
from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import capturenet, dmem, identity, nvmlcapture, recording, vital
from discovery.mock.recording import Entry, Link, Tree
from discovery.mock.redact import Redaction

_FUNCTION_FILES = (
    *("vendor", "device", "subsystem_vendor", "subsystem_device", "class", "revision"),
    *("numa_node", "local_cpulist", "local_cpus", "enable", "driver_override", "power_state"),
    *("max_link_speed", "max_link_width", "current_link_speed", "current_link_width"),
    *("sriov_totalvfs", "sriov_numvfs", "sriov_drivers_autoprobe"),
    *("aer_dev_correctable", "aer_dev_fatal", "aer_dev_nonfatal"),
)
_FUNCTION_LINKS = ("driver", "iommu_group", "physfn", "subsystem")
_CLASSES = {
    "net": (
        *("type", "operstate", "carrier", "speed", "mtu", "dev_port", "dev_id", "phys_port_name", "ifindex", "flags"),
        "address",
    ),
    "infiniband": ("node_type", "node_guid", "sys_image_guid", "fw_ver", "board_id", "hca_type"),
    "infiniband_verbs": ("ibdev", "dev"),
    "nvme": ("address", "model", "serial", "firmware_rev", "transport", "state", "numa_node", "dev"),
}
_PORT_FILES = ("state", "phys_state", "rate", "link_layer", "gid_attrs/ndevs/0")
_CPU_FILES = ("online", "present", "possible", "isolated")
_TOPOLOGY_FILES = (
    *("physical_package_id", "die_id", "cluster_id", "core_id"),
    *("thread_siblings", "thread_siblings_list", "core_siblings", "core_siblings_list"),
)
_NODE_LISTS = ("online", "possible", "has_cpu", "has_memory")
_NODE_FILES = ("cpulist", "cpumap", "distance", "meminfo")
_FIRMWARE = ("sys_vendor", "product_name", "bios_version")
_PROC_FILES = (
    "proc/devices",
    "proc/meminfo",
    "proc/sys/kernel/osrelease",
    "proc/sys/kernel/random/boot_id",
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/params",
    "proc/driver/nvidia-caps/mig-minors",
    "proc/driver/nvidia-caps/sys-minors",
)
_CGROUPS = "sys/fs/cgroup"
_GPU_FILES = ("information", "numa_status")
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_peermem", "gdrdrv", "mlx5_core", "vfio_pci")
_DEVICE_NODES = re.compile(r"nvidia[a-z0-9-]*|nvme[0-9]+")
_DEVICE_FOLDERS = ("nvidia-caps", "nvidia-caps-imex-channels", "infiniband", "vfio")
_KERNEL_OPTIONS = re.compile(r"(?:iommu|intel_iommu|amd_iommu|iommu\.[a-z]+|pci|pcie_[a-z]+|arm-smmu[a-z0-9._-]*)=\S*")
_CPU_LINES = ("processor", "model name", "physical id", "core id", "cpu cores")

_CONFIG_BYTES = 4096
_HEADER_BYTES = 256
_SECRET_CAPABILITIES = (0x03, 0x09)
"""Vital product data, vendor specific."""
_SECRET_EXTENDED = (0x0003, 0x000B, 0x0023)
"""Device serial number (a MAC address more often than not), vendor specific, designated vendor specific."""

_MACHINE = "redacted"
_NETWORK = 0x02
_DISPLAY = "0x03"
_NVIDIA = "0x10de"
_MAX_CONTENT = recording.MAX_BYTES // 2
_MAX_FILE = 4 << 20
"""/proc/cpuinfo of a thousand CPUs."""


def capture(
    *,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    library: object | None = None,
    driver_root: Path = Path("/"),
    name: str = "captured",
    redaction: Redaction | None = None,
) -> recording.Recording:
    """The Recording of a node. `library`: the functions of libnvidia-ml; if None, they are looked for by the dynamic linker, or in
    the `driver_root` where that is another one.

    `redaction` learns what was replaced, for those who have to replace the same elsewhere. DocumentError when there is too
    much, or when the tree leads out of itself; ProbeError when a root is no directory.
    """
    files = sysfs.Sysfs(sys=sys, proc=proc)
    files.check_roots()
    taken = _Taken(files)
    _functions(taken)
    for class_name, wanted in _CLASSES.items():
        _class(taken, class_name, wanted)
    known = redaction if redaction is not None else Redaction()
    networks, known.interfaces = capturenet.files(files, taken.entries)
    taken.entries.update(networks)
    _vital(taken)
    _host(taken)
    _proc(taken)
    for node in _device_nodes(dev):
        taken.entries[f"dev/{node}"] = ""
    found = library if library is not None else _loaded(driver_root)
    nvml = (
        None
        if found is None
        else nvmlcapture.read(found, _gpus(taken), cgroup=str(sys / "fs/cgroup"), by_kernel=_counted(taken))
    )
    known.learn(taken.entries, nvml)
    return recording.Recording(
        name=name, description="Captured from a node", files=known.files(taken.entries), nvml=known.nvml(nvml)
    )


class _Taken:
    """The files taken so far. Bounded."""

    def __init__(self, files: sysfs.Sysfs) -> None:
        self.files = files
        self.entries: dict[str, Entry] = {}
        self._bytes = 0

    def read(self, path: str) -> bytes | None:
        """The content of a file, None where it is not to be had."""
        with contextlib.suppress(errors.SourceError):
            return self.files.read(path, limit=_MAX_FILE)
        return None

    def file(self, path: str, *, content: bytes | None = None) -> None:
        """Takes a file, if it is there and readable, or what is left of it."""
        if content is None:
            content = self.read(path)
        if content is not None:
            try:
                self._add(path, content.decode())
            except UnicodeDecodeError:
                self._add(path, content)

    def every(self, directory: str, names: Iterable[str]) -> None:
        """Takes files of a directory."""
        for name in names:
            self.file(f"{directory}/{name}")

    def link(self, path: str) -> str | None:
        """Takes a link; where it leads, lexically. DocumentError when that is out of the trees."""
        target = None
        with contextlib.suppress(errors.SourceError):
            target = self.files.link(path)
        if target is None:
            return None
        for problem in recording.path_problems({path: Link(target)}):
            raise DocumentError(f"cannot be captured: {problem}")
        self._add(path, Link(target))
        return Tree(self.entries).resolve(path)

    def names(self, path: str) -> tuple[str, ...]:
        """What a directory holds."""
        try:
            return self.files.names(path)
        except errors.SourceError:
            return ()

    def _add(self, path: str, entry: Entry) -> None:
        self._bytes += len(path) + (len(entry.target) if isinstance(entry, Link) else len(entry))
        if self._bytes > _MAX_CONTENT:
            raise DocumentError(f"{path}: with this file the recording would be larger than {_MAX_CONTENT >> 20} MiB")
        self.entries[path] = entry


def _functions(taken: _Taken) -> None:
    for name in taken.names("sys/bus/pci/devices"):
        here = taken.link(f"sys/bus/pci/devices/{name}")
        if here is None or not here.startswith("sys/devices/"):
            continue
        taken.every(here, _FUNCTION_FILES)
        config = taken.read(f"{here}/config")
        if config is not None:
            taken.file(f"{here}/config", content=_without_secrets(config))
        for link in (*_FUNCTION_LINKS, *(name for name in taken.names(here) if re.fullmatch("virtfn[0-9]+", name))):
            target = taken.link(f"{here}/{link}")
            if link == "driver" and target is not None:
                taken.link(f"{target}/{name}")
            elif link == "iommu_group" and target is not None:
                taken.file(f"{target}/type")
                taken.link(f"{target}/devices/{name}")
    for root in taken.names("sys/class/pci_bus"):
        here = taken.link(f"sys/class/pci_bus/{root}")
        if here is not None:
            taken.every(here, ("cpuaffinity", "cpulistaffinity"))


def _without_secrets(config: bytes) -> bytes:
    """Configuration space without the capabilities that identify a card."""
    space = bytearray(config[:_CONFIG_BYTES])
    seen: set[int] = set()
    at = space[0x34] & 0xFC if len(space) >= _HEADER_BYTES else 0
    while at and at not in seen and at + 8 <= _HEADER_BYTES:
        seen.add(at)
        if space[at] in _SECRET_CAPABILITIES:
            length = space[at + 2] if space[at] == 0x09 else 8
            space[at + 2 : at + max(2, length)] = bytes(max(0, min(length, _HEADER_BYTES - at) - 2))
        at = space[at + 1] & 0xFC
    at = _HEADER_BYTES
    while at and at not in seen and at + 4 <= len(space):
        seen.add(at)
        header = int.from_bytes(space[at : at + 4], "little")
        following = header >> 20 & 0xFFC
        if header & 0xFFFF in _SECRET_EXTENDED:
            end = following if following > at else min(at + 256, len(space))
            space[at + 4 : end] = bytes(max(0, end - at - 4))
        at = following
    return bytes(space[: len(config)])


def _class(taken: _Taken, class_name: str, wanted: Iterable[str]) -> None:
    for device in taken.names(f"sys/class/{class_name}"):
        link = f"sys/class/{class_name}/{device}"
        here = taken.link(link)
        if here is None or not here.startswith("sys/devices/") or here.startswith("sys/devices/virtual/"):
            taken.entries.pop(link, None)
            continue
        taken.every(here, wanted)
        taken.link(f"{here}/device")
        if class_name == "infiniband":
            for port in taken.names(f"{here}/ports"):
                taken.every(f"{here}/ports/{port}", _PORT_FILES)


def _vital(taken: _Taken) -> None:
    """Vital product data that mean as much as those of the node, and name nobody's card: the same serial number or UUID in two
    of them is the same one again. Read where the probe reads them.
    """
    found = findings.Findings()
    try:
        functions = pci.functions(taken.files, endpoints.class_devices(taken.files, "infiniband", found), found)
    except errors.ProbeError:
        return  # functions are not for us to read, and their cards even less
    located = map(pci.Locator(taken.files, found).describe, functions)
    nics = [function for function in located if function is not None and function.class_code >> 16 == _NETWORK]
    spelt: dict[str, str] = {}
    for where, told in sorted((datadirect.read(taken.files, functions, nics, found) or {}).items()):
        fields = {}
        if told.serial is not None:
            fields["SN"] = spelt.setdefault(told.serial, identity.number_of(_MACHINE, where, "SN", digits=13))
        if told.unique is not None:
            fields["V3"] = spelt.setdefault(told.unique, identity.uuid_of(_MACHINE, where, "V3").replace("-", ""))
        here = taken.link(f"sys/bus/pci/devices/{where}")
        if here is not None:
            taken.file(f"{here}/vpd", content=vital.build(_MACHINE, fields))


def _host(taken: _Taken) -> None:
    cpu, node = "sys/devices/system/cpu", "sys/devices/system/node"
    taken.every(cpu, _CPU_FILES)
    for name in taken.names(cpu):
        if re.fullmatch("cpu[0-9]+", name):
            taken.every(f"{cpu}/{name}/topology", _TOPOLOGY_FILES)
            for link in taken.names(f"{cpu}/{name}"):
                if re.fullmatch("node[0-9]+", link):
                    taken.link(f"{cpu}/{name}/{link}")
    taken.every(node, _NODE_LISTS)
    for name in taken.names(node):
        if re.fullmatch("node[0-9]+", name):
            taken.every(f"{node}/{name}", _NODE_FILES)
    firmware = taken.link("sys/class/dmi/id")
    if firmware is not None:
        taken.every(firmware, _FIRMWARE)
    taken.every(_CGROUPS, ("cgroup.controllers", dmem.CAPACITY))
    taken.every(_CGROUPS, (f"{name}/notify_on_release" for name in taken.names(_CGROUPS)))
    taken.every("sys/module", (f"{module}/version" for module in _MODULES))
    for client in taken.names("sys/kernel/mm/memory_peers"):
        taken.file(f"sys/kernel/mm/memory_peers/{client}/version")


def _proc(taken: _Taken) -> None:
    for path in _PROC_FILES:
        taken.file(path)
    for gpu in taken.names("proc/driver/nvidia/gpus"):
        taken.every(f"proc/driver/nvidia/gpus/{gpu}", _GPU_FILES)
    _capabilities(taken, "proc/driver/nvidia/capabilities", depth=0)
    options = _lines(taken, "proc/cmdline")
    taken.file("proc/cmdline", content=(" ".join(_KERNEL_OPTIONS.findall(options)) + "\n").encode())
    lines = _lines(taken, "proc/cpuinfo").splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.strip() or line.split(":")[0].strip() in _CPU_LINES)
    taken.file("proc/cpuinfo", content=kept.encode())


def _lines(taken: _Taken, path: str) -> str:
    return (taken.read(path) or b"").decode(errors="replace")


def _capabilities(taken: _Taken, directory: str, *, depth: int) -> None:
    """The driver's capability files, which lie up to five levels deep."""
    for name in taken.names(directory):
        path = f"{directory}/{name}"
        taken.file(path)
        if path not in taken.entries and depth < 6:
            _capabilities(taken, path, depth=depth + 1)


def _device_nodes(dev: Path) -> list[str]:
    found: list[str] = []
    for folder in ("", *_DEVICE_FOLDERS):
        try:
            names = sorted(entry.name for entry in os.scandir(dev / folder) if not entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        found += [f"{folder}/{name}" if folder else name for name in names if folder or _DEVICE_NODES.fullmatch(name)]
    return [name for name in found if name.isascii() and name.isprintable()]


def _loaded(driver_root: Path) -> object | None:
    with contextlib.suppress(errors.SourceError, OSError):
        return nvmllibrary.load(driver_root) or ctypes.CDLL("libnvidia-ml.so.1")
    return None


def _counted(taken: _Taken) -> bool:
    """Whether the kernel counts the memory of GPUs."""
    return "nvidia/" in (Tree(taken.entries).text(f"{_CGROUPS}/{dmem.CAPACITY}") or "")


def _gpus(taken: _Taken) -> list[PciAddress]:
    """The NVIDIA GPUs on the bus."""
    tree = Tree(taken.entries)
    found = []
    for link in tree.below("sys/bus/pci/devices"):
        here = tree.resolve(link)
        class_code = tree.text(f"{here}/class") or ""
        if tree.text(f"{here}/vendor") == _NVIDIA and class_code.startswith(_DISPLAY):
            with contextlib.suppress(ValueError):
                found.append(address.parse(posixpath.basename(link)))
    return found
