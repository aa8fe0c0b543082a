# SPDX-License-Identifier: Apache-2.0
"""SR-IOV in a mock machine: the virtual functions that are switched on, and the files that tie them to their physical one.

Routing ids follow from offset and stride (PCIe base specification, 9.3.3.9); sysfs as drivers/pci/iov.c writes it. A virtual
function has no link of its own to show, and the vendor of its physical function.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Sequence

from discovery.address import PciAddress
from discovery.mock import products as parts
from discovery.mock.pcitree import Function, MachineError
from discovery.mock.recording import Entry, Link

KIND = "virtual"
"""Function.kind of a virtual function: nothing that counts GPUs or NICs of a machine counts it."""


def with_virtual(functions: Sequence[Function]) -> tuple[Function, ...]:
    """The functions with the virtual ones that are switched on, in order of address. MachineError where there is no room."""
    taken = {function.address: function for function in functions}
    for physical in functions:
        for virtual in _virtual(physical):
            if virtual.address in taken:
                raise MachineError(
                    (*physical.place, "virtualFunctions"), f"there is already a function at {virtual.address}"
                )
            taken[virtual.address] = virtual
    return tuple(function for _address, function in sorted(taken.items()))


def files(functions: Sequence[Function]) -> Iterator[tuple[str, Entry]]:
    """What sysfs adds to physical functions that can have virtual ones, and to these."""
    directories = {function.address: f"sys/devices/{function.directory}" for function in functions}
    for function in functions:
        here = directories[function.address]
        able = _able(function)
        if able is not None:
            yield f"{here}/sriov_totalvfs", f"{able.total}\n"
            yield f"{here}/sriov_numvfs", f"{function.slot.virtual_functions if function.slot else 0}\n"
            yield f"{here}/sriov_drivers_autoprobe", "1\n"
        if function.physical is not None:
            above = directories[function.physical]
            yield f"{here}/physfn", Link(posixpath.relpath(above, here))
            yield f"{above}/virtfn{function.ordinal}", Link(posixpath.relpath(here, above))


def _able(function: Function) -> parts.VirtualFunctions | None:
    """What a physical function can have."""
    if function.kind not in ("gpu", "nic"):
        return None
    assert isinstance(function.part, parts.Gpu | parts.Nic)
    return function.part.virtual_functions


def _virtual(physical: Function) -> Iterator[Function]:
    wanted = physical.slot.virtual_functions if physical.slot is not None and physical.kind in ("gpu", "nic") else 0
    able = _able(physical)
    if wanted > (able.total if able is not None else 0):
        raise MachineError(
            (*physical.place, "virtualFunctions"),
            f"{physical.part.name} has {able.total if able is not None else 'no'} virtual functions, not {wanted}",
        )
    at = physical.address
    for ordinal in range(wanted):
        assert able is not None
        place = (at.device << 3 | at.function) + able.offset + ordinal * able.stride
        if place > 0xFF:
            raise MachineError((*physical.place, "virtualFunctions"), f"no place is left on bus {at.bus:02x}")
        address = PciAddress(at.domain, at.bus, place >> 3, place & 7)
        yield dataclasses.replace(
            physical,
            kind=KIND,
            address=address,
            directory=f"{posixpath.dirname(physical.directory)}/{address}",
            ids=able.pci or physical.ids,
            link=None,
            name=None,
            vpd=None,
            physical=at,
            ordinal=ordinal,
        )
