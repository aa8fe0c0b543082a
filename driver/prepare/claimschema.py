# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of kind ClaimConfig, for editors and other checkers. Pure.

It is made of the same values as the reader's (`claimconfig`), and takes whatever that takes. What JSON Schema cannot say, how much
memory a quantity is, only the reader and the admission policy check.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driver.prepare import claimconfig
from driver.sharing import shares

_QUANTITY = {"type": "string", "pattern": f"^{claimconfig.QUANTITY_PATTERN}$"}


def json_schema() -> dict[str, Any]:
    """The schema, as docs/claimconfig.schema.json has it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": claimconfig.KIND,
        "description": "Configuration of a ResourceClaim or DeviceClass for devices of this driver. It only tightens what the claim is "
        "allocated. Of several that apply to a device the strictest of each field holds.",
        **_object(
            {
                "apiVersion": {"const": claimconfig.API_VERSION},
                "kind": {"const": claimconfig.KIND},
                "memory": {
                    "description": "Memory of a share.",
                    **_object(
                        {
                            "limit": {
                                "description": "At most so much device memory, at least 1Mi, not more than the share has.",
                                **_QUANTITY,
                            },
                            "softLimit": {
                                "description": "So much of it is sure where memory is kept apart by cgroup; what is above may be "
                                "evicted when others need theirs. Not more than the limit; without it, the limit.",
                                **_QUANTITY,
                            },
                        }
                    ),
                },
                "compute": {
                    "description": "Compute of a share.",
                    **_object(
                        {
                            "limit": {
                                "description": "At most so many percent of the multiprocessors of the whole GPU, not more than the share "
                                "has.",
                                "type": "integer",
                                "minimum": 1,
                                "maximum": shares.COMPUTE_WHOLE,
                            }
                        }
                    ),
                },
                "require": {
                    "description": "The weakest enforcement that is good enough, strongest first; a device with less is refused.",
                    **_object(
                        {
                            "memory": _choice(claimconfig.MemoryLevel, "As attribute memoryEnforcement of the device."),
                            "compute": _choice(
                                claimconfig.ComputeLevel, "As attribute computeEnforcement of the device."
                            ),
                        }
                    ),
                },
                "mps": {
                    "description": "For shares of a GPU that MPS serves; without effect on others.",
                    **_object(
                        {
                            "priority": _choice(
                                claimconfig.Priority, "belowNormal: its work waits for that of other shares."
                            )
                        }
                    ),
                },
            },
            required=("apiVersion", "kind"),
        ),
    }


def _object(properties: dict[str, Any], *, required: tuple[str, ...] = ()) -> dict[str, Any]:
    found = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | {"required": list(required)} if required else found


def _choice(values: Iterable[str], description: str) -> dict[str, Any]:
    return {"description": description, "type": "string", "enum": [str(value) for value in values]}
