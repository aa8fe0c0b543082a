# SPDX-License-Identifier: Apache-2.0
"""What the numbers mean that NVML answers with (nvml.h, CUDA C++ Programming Guide). Pure."""

from __future__ import annotations

from typing import Any

from discovery import address, errors, limits, model
from discovery.address import PciAddress

NO_DOMAIN = 0xFFFFFFFF
"""The PCI domain of a far end without a PCI address: an NVSwitch outside this machine, or not passed to this VM."""

CORES_PER_MULTIPROCESSOR = {
    (3, 0): 192, (3, 5): 192, (3, 7): 192,
    (5, 0): 128, (5, 2): 128, (5, 3): 128,
    (6, 0): 64, (6, 1): 128, (6, 2): 128,
    (7, 0): 64, (7, 2): 64, (7, 5): 64,
    (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128, (10, 1): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip
"""FP32 cores of one streaming multiprocessor by compute capability (CUDA C++ Programming Guide, compute capabilities).
NVML counts cores and not multiprocessors. A capability that is not listed gives no number."""

ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip
"""nvmlDeviceArchitecture_t, spelled as NVIDIA's own DRA driver spells its `architecture` attribute."""

_NVLINK_GENERATIONS = {1: (1,), 2: (2,), 3: (2,), 4: (3, 2), 5: (3,), 6: (4, 3), 7: (5, 4), 8: (6, 5)}
"""What a number of nvmlDeviceGetNvLinkVersion can mean: by nvml.h (NVML_NVLINK_VERSION_*; 2.2 and 3.1 are variants of their
generation), and by the kernel driver (NV2080_CTRL_NVLINK_STATUS_NVLINK_VERSION_*), whose numbers are one higher from 2.2 on and
which NVML passes on: an H100 says 7."""

_NVLINK_OF_ARCHITECTURE = {4: 1, 5: 2, 6: 2, 7: 3, 9: 4, 10: 5, 13: 6}
"""The one generation that GPUs of an architecture have (nvmlDeviceArchitecture_t), which tells the meanings apart."""

REMOTE_KINDS = {0: model.RemoteKind.GPU, 1: model.RemoteKind.CPU, 2: model.RemoteKind.SWITCH}
COMPUTE_MODES = {
    0: limits.ComputeMode.DEFAULT, 1: limits.ComputeMode.EXCLUSIVE_THREAD,
    2: limits.ComputeMode.PROHIBITED, 3: limits.ComputeMode.EXCLUSIVE_PROCESS,
}  # fmt: skip
FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}

COMPUTE_OF_SLICES = {1: 0x0, 2: 0x1, 3: 0x2, 4: 0x3, 6: 0x6, 7: 0x4, 8: 0x5}
"""NVML_COMPUTE_INSTANCE_PROFILE_<n>_SLICE by n. NVML describes compute instances only where there is a GPU instance; that this
one takes all of it is verified when one is made."""

ONE_SLICE = 0x0
"""NVML_GPU_INSTANCE_PROFILE_1_SLICE."""

ONE_SLICE_REVISED = 0x7
"""NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1."""

_PROFILE_SUFFIXES = {
    0x7: "+me", 0x8: "+me", 0xF: "+me.all", 0x10: "+me.all", 0xD: "-me", 0xE: "-me",
    0xA: "+gfx", 0xB: "+gfx", 0xC: "+gfx", 0x11: "+gfx",
}  # fmt: skip
"""By NVML_GPU_INSTANCE_PROFILE_*: REV1 `+me`, ALL_ME `+me.all`, NO_ME `-me`, GFX `+gfx`; REV2 (twice the memory) has none."""


def bus_id(where: PciAddress) -> str:
    """An address as NVML writes it (NVML_DEVICE_PCI_BUS_ID_FMT); GPUs are function 0."""
    return f"{where.domain:08X}:{where.bus:02X}:{where.device:02X}.{where.function:X}"


def address_of(info: Any) -> PciAddress | None:
    """The address in an nvmlPciInfo_t; None for the all-ones that stand for none. Raises SourceError."""
    if info.domain == NO_DOMAIN:
        return None
    try:
        return address.parse(info.busId)
    except (ValueError, UnicodeDecodeError) as err:
        raise errors.SourceError("nvml", errors.MALFORMED, f"nvmlPciInfo_t.busId: {err}") from err


def nvlink_generation(number: int | None, architecture: int | None) -> int | None:
    """The generation of a GPU's NVLinks; None where the number does not tell it, or says what this architecture has not."""
    meanings = _NVLINK_GENERATIONS.get(number, ()) if number is not None else ()
    if architecture in _NVLINK_OF_ARCHITECTURE:
        own = _NVLINK_OF_ARCHITECTURE[architecture]
        return own if own in meanings else None
    return meanings[0] if len(meanings) == 1 else None


def profile_name(number: int, slices: int, *, part_bytes: int, whole_bytes: int) -> str:
    """The name of a GPU instance profile, for drivers that tell none, as go-nvlib composes it (mig_profile.go): the memory is
    that of the instance in eighths of the GPU, rounded up, of its GiB, rounded up.
    """
    eighths, gibibytes = -(-part_bytes * 8 // whole_bytes), -(-whole_bytes // (1 << 30))
    return f"{slices}g.{(eighths * gibibytes + 4) // 8}gb{_PROFILE_SUFFIXES.get(number, '')}"
