# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.e2e.nicdriver`: serves kubelet, publishes, prints `ready`, and takes it all back at SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from driver import values
from driver.kubelet import server
from tests.e2e.kit import make, waiting
from tests.e2e.kit.api import Api, Json
from tests.e2e.nicdriver import inventory, preparer


class Unwatched:
    """Nobody counts its calls, and nothing is said of its devices' health."""

    def rpc(self, method: str, *, seconds: float, ok: bool) -> None:
        """A call was answered."""

    def devices(self) -> tuple[values.DeviceHealth, ...]:
        """No device."""
        return ()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Nothing changes."""
        del timeout_s
        return seen


def main() -> int:
    """Runs until it is told to end."""
    parser = argparse.ArgumentParser(prog="nicdriver")
    for name in ("--machine", "--kubeconfig", "--kubelet-dir", "--cdi-dir"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--node-name", required=True)
    given = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    api = Api(given.kubeconfig)
    unwatched = Unwatched()
    kubelet = server.KubeletServer(
        driver_name=inventory.DRIVER,
        registry_dir=given.kubelet_dir / "plugins_registry",
        plugin_dir=given.kubelet_dir / "plugins" / inventory.DRIVER,
        pod_uid=None,
        preparer=preparer.Preparer(api, machine=given.machine, cdi_dir=given.cdi_dir),
        health=unwatched,
        observer=unwatched,
    )
    published = _slice(given.node_name, inventory.devices(given.machine))
    kubelet.start()
    try:
        kubelet.registration()
        waiting.until(lambda: kubelet.status().registered, "registered", told=lambda: kubelet.status().error)
        api.create(published)
        print("ready", flush=True)
        signal.sigwait({signal.SIGTERM})
    finally:
        api.delete("ResourceSlice", published["metadata"]["name"])
        kubelet.stop()
    return 0


def _slice(node_name: str, devices: list[Json]) -> Json:
    return {
        "apiVersion": make.API,
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node_name}-{inventory.DRIVER}"},
        "spec": {
            "driver": inventory.DRIVER,
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
