# SPDX-License-Identifier: Apache-2.0
"""PCI configuration space of a mock function: header, bus numbers and the capabilities that say what a function is.

In the layout of the PCI Local Bus and PCI Express Base specifications (7.5.1, 7.5.3, 7.7.11): type 0 or 1 header, power
management at 0x40, the subsystem of a bridge at 0x50, PCI Express at 0x60; of ports that have access control services 4096
bytes, with error reporting at 0x100 and those services at 0x150. BARs are zero: no address of a real machine is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from discovery import pcie

if TYPE_CHECKING:
    from discovery.mock.pcitree import Function

SIZE = 256
EXTENDED_SIZE = 4096

_COMMAND = 0x0406  # memory space, bus master, interrupts off
_STATUS = 0x0010  # has capabilities
_POWER = 0x40
_SUBSYSTEM = 0x50
_EXPRESS = 0x60
_ERRORS = 0x100
_ACCESS = 0x150
_ACCESS_CAPABLE = 0x001F
"""Source validation, translation blocking, request and completion redirect, upstream forwarding."""
_ACCESS_REDIRECTING = 0x001D
"""What the kernel turns on (pci_std_enable_acs, drivers/pci/pci.c)."""
_PCI_EXPRESS = 0x10
_LINK_STATUS = 0x12
_WIDTH = 0x3F0
_EXPRESS_VERSION = 2
_SLOT_IMPLEMENTED = 1 << 8
_HOT_PLUG = 1 << 1 | 1 << 5 | 1 << 6  # power controller, surprise removal, hot-plug
_SLOT_NUMBERS = 1 << 13
_DOWNWARD = (4, 6)
"""Root ports and downstream ports have a slot."""


def config(function: Function, *, multifunction: bool) -> bytes:
    """The configuration space of a function. `multifunction`: whether its device has more than one."""
    space = bytearray(SIZE if function.redirects is None else EXTENDED_SIZE)
    _put(space, 0x00, 2, function.ids.vendor)
    _put(space, 0x02, 2, function.ids.device)
    _put(space, 0x04, 2, _COMMAND)
    _put(space, 0x06, 2, _STATUS)
    _put(space, 0x08, 1, function.part.revision or 0)
    _put(space, 0x09, 3, function.class_code)
    _put(space, 0x0E, 1, (0x01 if function.bridging else 0x00) | (0x80 if multifunction else 0x00))
    _put(space, 0x34, 1, _POWER)
    if function.bridging is not None:
        _put(space, 0x18, 1, function.bridging.primary)
        _put(space, 0x19, 1, function.bridging.secondary)
        _put(space, 0x1A, 1, function.bridging.subordinate)
        if function.part.subsystem is not None:
            _put(space, _SUBSYSTEM, 1, 0x0D)
            _put(space, _SUBSYSTEM + 1, 1, _EXPRESS)
            _put(space, _SUBSYSTEM + 4, 2, function.part.subsystem.vendor)
            _put(space, _SUBSYSTEM + 6, 2, function.part.subsystem.device)
    elif function.part.subsystem is not None:
        _put(space, 0x2C, 2, function.part.subsystem.vendor)
        _put(space, 0x2E, 2, function.part.subsystem.device)
    _put(space, _POWER, 1, 0x01)
    _put(space, _POWER + 1, 1, _SUBSYSTEM if space[_SUBSYSTEM] else _EXPRESS)
    _put(space, _POWER + 2, 2, 0x0003)
    _express(space, function)
    if function.redirects is not None:
        _put(space, _ERRORS, 4, _ACCESS << 20 | 2 << 16 | 0x0001)
        _put(space, _ACCESS, 4, 1 << 16 | 0x000D)
        _put(space, _ACCESS + 4, 2, _ACCESS_CAPABLE)
        _put(space, _ACCESS + 6, 2, _ACCESS_REDIRECTING if function.redirects else 0)
    return bytes(space)


def with_link_width(config: bytes, width: int) -> bytes:
    """A configuration space whose link status (7.5.3.8) says another width; as it was where it has no such register."""
    places, _ = pcie.capabilities(config)
    at = places.get(_PCI_EXPRESS, len(config)) + _LINK_STATUS
    if at + 2 > len(config):
        return config
    space = bytearray(config)
    status = int.from_bytes(space[at : at + 2], "little")
    _put(space, at, 2, status & ~_WIDTH | width << 4 & _WIDTH)
    return bytes(space)


def _express(space: bytearray, function: Function) -> None:
    port_type = int(function.port_type)
    flags = _EXPRESS_VERSION | port_type << 4 | (_SLOT_IMPLEMENTED if port_type in _DOWNWARD else 0)
    _put(space, _EXPRESS, 1, _PCI_EXPRESS)
    _put(space, _EXPRESS + 2, 2, flags)
    if function.hot_plug is not None:
        number = int(function.hot_plug) if function.hot_plug.isdecimal() else 0
        _put(space, _EXPRESS + 0x14, 4, _HOT_PLUG | (number % _SLOT_NUMBERS) << 19)
    if function.link is not None:
        _put(space, _EXPRESS + 0x0C, 4, function.link.max_generation | function.link.max_width << 4)
        _put(space, _EXPRESS + _LINK_STATUS, 2, function.link.generation | function.link.width << 4)
        _put(space, _EXPRESS + 0x2C, 4, ((1 << function.link.max_generation) - 1) << 1)


def _put(space: bytearray, offset: int, size: int, value: int) -> None:
    space[offset : offset + size] = value.to_bytes(size, "little")
