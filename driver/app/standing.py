# SPDX-License-Identifier: Apache-2.0
"""What was published, as the record has it, in the words of policies. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driver.publish import absent, attributes, devices
from driver.sharing import effective


def read(published: Mapping[str, Any]) -> tuple[effective.Standing, ...]:
    """The devices that were published. An entry that cannot be read is none, as it is for who publishes."""
    known, _ = absent.from_json(published)
    return tuple(map(_standing, known.values()))


def _standing(device: devices.Device) -> effective.Standing:
    part = device.attributes.get(attributes.TYPE) == attributes.TYPE_MIG
    return effective.Standing(
        name=device.name,
        address=device.address,
        mode=device.mode,
        profile=_text(device, attributes.PROFILE),
        uuid=_text(device, attributes.PARENT_UUID if part else attributes.UUID),
        product=_text(device, attributes.PRODUCT_NAME),
        shares=device.shares,
        enforcement=device.enforcement,
    )


def _text(device: devices.Device, name: str) -> str | None:
    value = device.attributes.get(name)
    return value if isinstance(value, str) else None
