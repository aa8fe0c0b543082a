# SPDX-License-Identifier: Apache-2.0
"""A KubeletServer with fakes behind it as a process of its own, for tests that kill one.

    python -m tests.fakes.kubelet_process KUBELET_DIR PATIENCE [POD_UID]

Waits so many seconds for an instance of the same name to end. Prints `registered` and serves until SIGTERM; an error goes to stderr, with exit status 1.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from driver import bell
from driver.errors import SocketError
from driver.kubelet import server
from tests.fakes import kubelet_side

DRIVER = "gpu.nearfield.dev"


def main(kubelet_dir: Path, patience_s: float, pod_uid: str | None) -> None:
    ended = bell.Bell()
    signal.signal(signal.SIGTERM, lambda _number, _frame: ended.ring())
    ended.wake_by_signals()
    kubelet = server.KubeletServer(
        driver_name=DRIVER,
        registry_dir=kubelet_dir / "plugins_registry",
        plugin_dir=kubelet_dir / "plugins" / DRIVER,
        pod_uid=pod_uid,
        preparer=kubelet_side.FakePreparer(),
        health=kubelet_side.FakeHealth(kubelet_side.healthy()),
        observer=kubelet_side.Calls(),
        lock_timeout_s=patience_s,
    )
    try:
        kubelet.start()
        kubelet.registration()
    except SocketError as error:
        sys.exit(str(error))
    print("registered", flush=True)
    ended.wait()
    kubelet.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
