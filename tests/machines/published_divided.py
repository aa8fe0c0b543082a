# SPDX-License-Identifier: Apache-2.0
"""What machines with MIG offer where nothing is configured: the GPUs without it, as the machine does that they come from."""

from __future__ import annotations

from tests.machines.attributes import BUS_ID, Offer, written


def _only(base: str, *addresses: str) -> Offer:
    gpus, capacities = written(base)
    return [gpu for gpu in gpus if gpu[BUS_ID] in addresses], capacities


MACHINES: dict[str, Offer] = {
    "a30-4-mig": _only("a30-4-pcie", "0000:17:00.0"),
    "dgx-h100-mig": _only("dgx-h100", "0000:1b:00.0", "0000:43:00.0"),
}
