# SPDX-License-Identifier: Apache-2.0
"""Whether the device nodes that a CDI file names are on this node. Kubelet shows a missing one only as
CreateContainerError of the pod, so it is looked for before kubelet is answered.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_HOST_DEV = "/dev/"


class DeviceNodes:
    """Looks at `/dev` of the host where the agent sees it. The nodes of a mock machine are plain files."""

    def __init__(self, dev: Path, *, mock: bool) -> None:
        self._dev = f"{dev}/"
        self._mock = mock

    def missing(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of some paths below /dev that are not there, or are no character devices."""
        return tuple([path for path in paths if not self._there(path)])

    def _there(self, path: str) -> bool:
        try:
            # Plain strings here and in cdidir: every Prepare comes by, and pathlib would take longer than the kernel.
            mode = os.stat(self._dev + path.removeprefix(_HOST_DEV)).st_mode  # noqa: PTH116
        except OSError:
            return False
        return self._mock or stat.S_ISCHR(mode)
