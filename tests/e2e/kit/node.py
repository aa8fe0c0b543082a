# SPDX-License-Identifier: Apache-2.0
"""The node's disk as an operator sees it: the agent's record, CDI files, sockets, and what hardware the mock machine has."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from driver import values
from driver.errors import RecordError
from driver.prepare import ledger, store
from hack.realnode.layout import Layout
from tests.e2e.kit.api import Json

_INFORMATION = re.compile(r"^(?P<key>[^:]+):\s*(?P<value>.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the rendered machine's procfs has it."""

    address: str
    minor: int
    uuid: str

    @property
    def device(self) -> str:
        """Its name in slices."""
        return "gpu-" + self.address.replace(":", "-").replace(".", "-")

    @property
    def node(self) -> str:
        """Its device node."""
        return f"/dev/nvidia{self.minor}"


class Disk:
    """What lies on a node."""

    def __init__(self, layout: Layout, *, driver: str = values.DRIVER_NAME) -> None:
        self.driver = driver
        self.kubelet_dir = layout.kubelet_dir
        self.registry_dir = layout.kubelet_dir / "plugins_registry"
        self.plugin_dir = layout.kubelet_dir / "plugins" / driver
        self.cdi_dir = layout.cdi_dir

    @property
    def state_dir(self) -> Path:
        """The agent's state folder."""
        return self.plugin_dir / "state"

    @property
    def machine(self) -> Path:
        """The rendered tree of the mock machine: `sys`, `proc`, `dev`."""
        return self.state_dir / "mock"

    def record(self) -> tuple[ledger.Entry, ...]:
        """The prepared claims; none where there is no record yet."""
        try:
            return store.read_rows(self.state_dir)
        except RecordError:
            if (self.state_dir / store.FILE_NAME).exists():
                raise
            return ()

    def claim_files(self) -> tuple[Path, ...]:
        """The CDI files of claims, temporary ones included."""
        return tuple(sorted(self.cdi_dir.glob(f"*{self.driver}_*")))

    def claim_file(self, uid: str) -> Json:
        """The CDI file of a claim."""
        found: Json = json.loads((self.cdi_dir / f"{self.driver}_{uid}.json").read_text())
        return found

    def sockets(self) -> frozenset[Path]:
        """All sockets of the driver: those kubelet finds and those it calls."""
        places = (*self.registry_dir.glob("**/*"), *self.plugin_dir.glob("*"))
        return frozenset(path for path in places if _is_socket(path))

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the mock machine in the order of their addresses, as the NVIDIA driver's procfs tells them."""
        found = []
        for path in sorted(self.machine.glob("proc/driver/nvidia/gpus/*/information")):
            told = {match["key"]: match["value"] for match in _INFORMATION.finditer(path.read_text())}
            found.append(Gpu(address=path.parent.name, minor=int(told["Device Minor"]), uuid=told["GPU UUID"]))
        return tuple(found)

    def gpu(self, device: str) -> Gpu:
        """The GPU of a device name."""
        (found,) = (gpu for gpu in self.gpus() if gpu.device == device)
        return found


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
