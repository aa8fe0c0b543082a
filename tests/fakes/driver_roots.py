# SPDX-License-Identifier: Apache-2.0
"""Made-up roots in which an NVIDIA driver is installed the way distributions do it, with shared libraries that have a real
dynamic section.
"""

from __future__ import annotations

import struct
from pathlib import Path

VERSION = "580.65.06"

SONAMES = {
    "libcuda": "libcuda.so.1",
    "libnvidia-ml": "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-glcore": f"libnvidia-glcore.so.{VERSION}",
}
"""Stem -> SONAME of some libraries of the driver; the last is looked for under its file name, as real ones are."""


def library(soname: str | None, *, machine: int = 62) -> bytes:
    """A shared library of nothing but a dynamic section (62: EM_X86_64, 183: EM_AARCH64)."""
    base, dynamic_at = 0x1000, 64 + 2 * 56
    strings = b"\0" + (soname or "").encode() + b"\0"
    entries = [(5, base + 0x200), (10, len(strings)), *([(14, 1)] if soname else []), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    programs = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, 0x400, 0x400, 0x1000)
    programs += struct.pack(
        "<IIQQQQQQ", 2, 6, dynamic_at, base + dynamic_at, base + dynamic_at, len(dynamic), len(dynamic), 8
    )
    data = bytearray(0x400)
    data[: len(header + programs)] = header + programs
    data[dynamic_at : dynamic_at + len(dynamic)] = dynamic
    data[0x200 : 0x200 + len(strings)] = strings
    return bytes(data)


def file(root: Path, inside: str, data: bytes = b"x") -> None:
    """A file in a root."""
    path = root / inside.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def link(root: Path, inside: str, target: str) -> None:
    """A link in a root."""
    path = root / inside.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def install(root: Path, folder: str, *, version: str = VERSION, links: bool = True) -> None:
    """The libraries of a driver in one folder, as its installer and ldconfig leave them."""
    for stem, soname in SONAMES.items():
        name = f"{stem}.so.{version}"
        file(root, f"{folder}/{name}", library(soname.replace(VERSION, version)))
        if links and soname != f"{stem}.so.{VERSION}":
            link(root, f"{folder}/{soname}", name)
    if links:
        link(root, f"{folder}/libcuda.so", "libcuda.so.1")


def debian(root: Path) -> Path:
    """Debian or Ubuntu with merged /usr and NVIDIA's own packages."""
    link(root, "/lib", "usr/lib")
    link(root, "/bin", "usr/bin")
    install(root, "/usr/lib/x86_64-linux-gnu")
    file(root, "/usr/lib/x86_64-linux-gnu/libc.so.6", library("libc.so.6"))
    for program in ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-persistenced"):
        file(root, f"/usr/bin/{program}")
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        file(root, f"/usr/lib/firmware/nvidia/{VERSION}/{name}")
    file(root, "/etc/vulkan/icd.d/nvidia_icd.json")
    return root


def debian_alternatives(root: Path) -> Path:
    """Debian's own packages: files in a folder of their own, reached by absolute links over /etc/alternatives."""
    own = "/usr/lib/x86_64-linux-gnu/nvidia/current"
    for stem, soname in SONAMES.items():
        file(root, f"{own}/{stem}.so.{VERSION}", library(soname))
    link(root, "/etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu", f"{own}/libcuda.so.1")
    link(root, f"{own}/libcuda.so.1", f"libcuda.so.{VERSION}")
    link(root, "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu")
    file(root, "/usr/lib/nvidia/current/nvidia-smi")
    link(root, "/etc/alternatives/nvidia--nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
    link(root, "/usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi")
    return root


def rhel(root: Path) -> Path:
    """RHEL, SUSE and driver containers built on them."""
    link(root, "/lib64", "usr/lib64")
    link(root, "/lib", "usr/lib")
    link(root, "/sbin", "usr/sbin")
    install(root, "/usr/lib64")
    file(root, f"/usr/lib/libcuda.so.{VERSION}", b"\x7fELF\x01\x01\x01 of 32 bits")
    file(root, "/usr/bin/nvidia-smi")
    file(root, f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    return root
