# SPDX-License-Identifier: Apache-2.0
"""What of an installed NVIDIA driver a container needs: found in the driver root by layout, version and SONAME.

The user-mode libraries of one driver end in its version (`libcuda.so.580.65.06`) and lie in the library folder of the
distribution: /usr/lib/x86_64-linux-gnu (Debian, Ubuntu, and aarch64 alike), a folder below it that alternatives point to (Debian's own packages),
/usr/lib64 (RHEL, SUSE), lib64 of a root that has nothing but the driver (Container-Optimized OS). They must be those of the
loaded kernel module: the CUDA library refuses any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from driver.prepare import cdi, elf, rootfs

TRIPLETS: Mapping[str, str] = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Folder of a machine's libraries on Debian, by its name in uname(2)."""

_LIBRARY_FOLDERS = (
    "/usr/lib/{triplet}",
    "/usr/lib64",
    "/usr/lib/{triplet}/nvidia/current",
    "/usr/lib/{triplet}/nvidia",
    "/usr/lib64/nvidia",
    "/lib/{triplet}",
    "/lib64",
    "/usr/lib",
    "/usr/local/lib64",
)
_PROGRAM_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin")
_PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
_FIRMWARE_FOLDERS = ("/lib/firmware/nvidia", "/usr/lib/firmware/nvidia")
_DATA_FILES = (
    "/etc/OpenCL/vendors/nvidia.icd",
    "/etc/vulkan/icd.d/nvidia_icd.json",
    "/usr/share/vulkan/icd.d/nvidia_icd.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/usr/share/nvidia/nvoptix.bin",
)
REQUIRED = ("libcuda", "libnvidia-ml")
"""Without these no program of a container finds a GPU."""

_CUDA_LIBRARY = re.compile(r"libcuda\.so\.(?P<version>[0-9]+(?:\.[0-9]+)+)")


class NoDriverError(Exception):
    """The driver root has no usable driver; the text says what is missing and where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A driver as found. `watched`: paths inside that, when one of them changes, may make it another one."""

    version: str
    mounts: tuple[cdi.Mount, ...]
    watched: tuple[str, ...]
    missing: tuple[str, ...]
    """Optional programs and firmware that are not there."""


def find(root: rootfs.DriverRoot, *, machine: str, expected_version: str | None) -> Installation:
    """What there is in a driver root. `expected_version` is that of the loaded kernel module, None where that is not
    known; then the one that libcuda.so.1 leads to is taken. Raises NoDriverError.
    """
    triplet = TRIPLETS.get(machine)
    if triplet is None:
        raise NoDriverError(f"no library folders are known for machine {machine!r}")
    if root.directory("/") is None:
        raise NoDriverError(f"the driver root {root.mount} does not exist: see --driver-root and --driver-root-mount")
    folders = tuple(folder.format(triplet=triplet) for folder in _LIBRARY_FOLDERS)
    names = {
        folder: root.names(folder) for folder in dict.fromkeys(filter(None, (root.directory(path) for path in folders)))
    }
    version = _version(root, names, expected_version=expected_version)
    libraries = _libraries(root, names, version=version)
    for stem in REQUIRED:
        if not any(PurePosixPath(path).name.startswith(f"{stem}.so.") for path in libraries):
            raise NoDriverError(
                f"{stem}.so.{version} is not in the driver root {root.host} (looked in {', '.join(names)})"
            )
    targets = (f"/usr/lib/{triplet}", "/usr/lib64")
    mounts = {
        f"{target}/{name}": path for path, found in libraries.items() for target in targets for name in sorted(found)
    }
    optional, missing = _optional(root, version=version)
    mounts.update(optional)
    return Installation(
        version=version,
        mounts=tuple(
            cdi.Mount(host_path=root.on_host(path), container_path=container) for container, path in mounts.items()
        ),
        watched=(*folders, *_PROGRAM_FOLDERS, *_FIRMWARE_FOLDERS, *names, *dict.fromkeys(mounts.values())),
        missing=missing,
    )


def _version(root: rootfs.DriverRoot, names: Mapping[str, tuple[str, ...]], *, expected_version: str | None) -> str:
    """The version of the driver to use."""
    found = {
        match["version"]: None for folder in names for name in names[folder] if (match := _CUDA_LIBRARY.fullmatch(name))
    }
    linked = {
        match["version"]: None
        for folder in names
        if (path := root.file(f"{folder}/libcuda.so.1")) is not None
        and (match := _CUDA_LIBRARY.fullmatch(PurePosixPath(path).name))
    }
    versions = tuple({**linked, **found})
    if not versions:
        raise NoDriverError(
            f"no libcuda.so.<version> is in the driver root {root.host} (looked in {', '.join(names) or 'no folder'}): is "
            "the driver installed, and do --driver-root and --driver-root-mount name where?"
        )
    if expected_version is not None:
        if expected_version not in versions:
            raise NoDriverError(
                f"the driver root {root.host} has the libraries of driver {', '.join(versions)}, but the loaded kernel "
                f"module is {expected_version}: reload the module or reboot the node"
            )
        return expected_version
    if len(linked) == 1 or len(versions) == 1:
        return versions[0]
    raise NoDriverError(
        f"the driver root {root.host} has the libraries of several drivers ({', '.join(versions)}), and no link "
        "libcuda.so.1 says which is in use"
    )


def _libraries(
    root: rootfs.DriverRoot, names: Mapping[str, tuple[str, ...]], *, version: str
) -> dict[str, frozenset[str]]:
    """Resolved path of each library of the driver -> the names under which programs look for it."""
    suffix = f".so.{version}"
    found: dict[str, set[str]] = {}
    stems: dict[str, None] = {}
    for folder, name in _each(names):
        if name.startswith("lib") and name.endswith(suffix) and (path := root.file(f"{folder}/{name}")) is not None:
            stem = name.removesuffix(suffix)
            stems[stem] = None
            found.setdefault(path, set()).update(_names(root, path, name=name, stem=stem))
    for folder, name in _each(names):
        stem, dot_so, _ = name.partition(".so")
        if dot_so and stem in stems and (path := root.file(f"{folder}/{name}")) in found:
            found[path].add(name)
    # One name for one file: a leftover copy of the library in a later folder gives way to that of the first.
    taken: set[str] = set()
    kept = {}
    for path, aliases in found.items():
        kept[path] = frozenset(aliases - taken)
        taken |= aliases
    return {path: aliases for path, aliases in kept.items() if aliases}


def _each(names: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    return ((folder, name) for folder in names for name in names[folder])


def _names(root: rootfs.DriverRoot, path: str, *, name: str, stem: str) -> Iterable[str]:
    """File name (libraries of one driver open each other by it), development name, SONAME."""
    yield name
    yield f"{stem}.so"
    try:
        soname = elf.read_soname(root.seen(path))
    except OSError:
        soname = None
    if soname is not None:
        yield soname


def _optional(root: rootfs.DriverRoot, *, version: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Container path -> resolved path of programs, firmware and data, and what of the first two is missing."""
    mounts: dict[str, str] = {}
    missing = []
    for program in _PROGRAMS:
        places = (root.file(f"{folder}/{program}") for folder in _PROGRAM_FOLDERS)
        path = next(filter(None, places), None)
        if path is None:
            missing.append(program)
        else:
            mounts[f"/usr/bin/{program}"] = path
    folder = next(filter(None, (root.directory(f"{place}/{version}") for place in _FIRMWARE_FOLDERS)), None)
    firmware = [
        (name, path)
        for name in (root.names(folder) if folder else ())
        if (path := root.file(f"{folder}/{name}")) is not None
    ]
    if not firmware:
        missing.append(f"firmware of {version}")
    mounts.update({f"/lib/firmware/nvidia/{version}/{name}": path for name, path in firmware})
    mounts.update({file: path for file in _DATA_FILES if (path := root.file(file)) is not None})
    return mounts, tuple(missing)
