# SPDX-License-Identifier: Apache-2.0
"""Identifiers of a mock machine, derived from its name and a PCI address: the same in every rendering, and nobody's."""

from __future__ import annotations

import hashlib
import uuid

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "mock.nearfield.dev")


def uuid_of(machine: str, *what: object) -> str:
    """A UUID for a thing of a machine."""
    return str(uuid.uuid5(_NAMESPACE, "/".join((machine, *map(str, what)))))


def number_of(machine: str, *what: object, digits: int) -> str:
    """Decimal digits for a thing of a machine, such as a serial number."""
    seed = hashlib.sha256("/".join((machine, *map(str, what))).encode()).digest()
    return str(int.from_bytes(seed) % 10**digits).zfill(digits)


def mac_of(machine: str, *what: object) -> str:
    """A MAC address from the locally administered range."""
    seed = hashlib.sha256("/".join((machine, *map(str, what))).encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *seed[:5]))


def guid_of(machine: str, *what: object) -> str:
    """An InfiniBand GUID in the kernel's spelling, with the local bit of EUI-64 set."""
    seed = hashlib.sha256("/".join((machine, *map(str, what))).encode()).hexdigest()
    return ":".join(("02" + seed[:14])[start : start + 4] for start in (0, 4, 8, 12))
