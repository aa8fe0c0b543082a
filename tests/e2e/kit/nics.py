# SPDX-License-Identifier: Apache-2.0
"""The second driver on the node: its process, started where kubelet runs, and the class of its devices."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hack.realnode import mounts
from tests.e2e.kit import waiting
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.nicdriver import inventory

ROOT = Path(__file__).parents[3]
CLASS = "nic"
STOP_S = 120.0
GONE_S = 240.0
KUBELET_DIR = Path("/var/lib/kubelet")
MACHINE = KUBELET_DIR / "plugins/gpu.nearfield.dev/state/mock"
_CDI_DIR = "/var/run/cdi"


@contextlib.contextmanager
def offered(site: Site) -> Iterator[None]:
    """The driver registered and its NICs published for the block; nothing of it afterwards."""
    process = subprocess.Popen(
        [
            *("nsenter", f"--target={mounts.holder(site.cluster.layout)}", "--mount", "--net", "--"),
            *(sys.executable, "-P", "-m", "tests.e2e.nicdriver"),
            *("--machine", str(MACHINE), "--kubeconfig", str(site.cluster.kubeconfig)),
            *("--kubelet-dir", str(KUBELET_DIR), "--cdi-dir", _CDI_DIR, "--node-name", site.node_name),
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", f"the driver of the NICs did not come up; status {process.poll()}"
        site.api.create(_device_class())
        yield
        # Kubelet lets no pod go without the driver.
        waiting.until(lambda: not _pods(site), "the pods with NICs gone", timeout_s=GONE_S, told=lambda: _pods(site))
    finally:
        site.api.delete("DeviceClass", CLASS)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)
        assert process.returncode == 0, process.returncode
        left = _left(site)
        assert not left, left


def _left(site: Site) -> list[str]:
    """What there still is of the driver: files, sockets, slices."""
    places = (
        site.disk.cdi_dir.glob(f"{inventory.DRIVER}_*"),
        site.disk.registry_dir.glob(f"{inventory.DRIVER}*"),
        (site.disk.kubelet_dir / "plugins" / inventory.DRIVER).glob("*.sock"),
    )
    return [str(path) for place in places for path in place] + [
        f"ResourceSlice {item['metadata']['name']}"
        for item in site.api.items("ResourceSlice")
        if item["spec"]["driver"] == inventory.DRIVER
    ]


def _pods(site: Site) -> list[str]:
    """The pods whose claims hold a NIC."""
    return [
        f"{claim['metadata']['namespace']}/{holder['name']}"
        for claim in site.api.items("ResourceClaim")
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        for holder in claim["status"].get("reservedFor", [])
        if result["driver"] == inventory.DRIVER
    ]


def _device_class() -> Json:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": CLASS},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{inventory.DRIVER}"'}}]},
    }
