# SPDX-License-Identifier: Apache-2.0
"""How an NVML call of the mock fails."""

from __future__ import annotations

from discovery.mock import abi


class StatusError(Exception):
    """An NVML call ends with this nvmlReturn_t."""

    def __init__(self, status: int) -> None:
        super().__init__(abi.ERROR_STRINGS.get(status, b"").decode() or str(status))
        self.status = status
