# SPDX-License-Identifier: Apache-2.0
"""The stand-in kubelet as a process, `python -m driver.standin.kubelet_commands`: one JSON object a line on stdin, its answer
under the same `id` on stdout.

    {"id": 1, "op": "wait", "driver": "gpu.nearfield.dev", "instances": 1, "timeout_s": 20}
    {"id": 2, "op": "prepare", "driver": "gpu.nearfield.dev", "claims": [{"namespace": "n", "name": "c", "uid": "u"}]}
         with "pod": "<UID>" the cgroup of that pod is made before, and removed after an unprepare (--cgroup-root)
    {"id": 3, "op": "unprepare", ...}     {"op": "plugins"}   {"op": "health"}, each with a driver
    {"id": 4, "op": "restart"}            {"op": "refused"}
    {"id": 5, "op": "stop"}               the end of stdin does the same

An answer is {"id": 1, "ok": true, "result": ...} or {"id": 1, "ok": false, "error": "..."}. Commands run side by side; the
first line, {"ready": true, "registry": "..."}, comes once it watches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TextIO

from driver import values
from driver.standin import kubelet, kubelet_client, kubelet_pods

_HTTP_TIMEOUT_S = 10.0


def slice_wiper(server: str, node_name: str, *, token: str = "") -> kubelet.SliceWiper:
    """Deletes through an API server that speaks plain HTTP, as kubelet does: DeleteCollection with field selectors."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def wipe(driver: str | None) -> None:
        selector = f"spec.nodeName={node_name}" + (f",spec.driver={driver}" if driver else "")
        query = urllib.parse.urlencode({"fieldSelector": selector})
        request = urllib.request.Request(  # noqa: S310 -- the URL is an option of the person who starts this
            f"{server}/apis/resource.k8s.io/v1/resourceslices?{query}", method="DELETE", headers=headers
        )
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as response:  # noqa: S310
            response.read()

    return wipe


class Commands:
    """Carries out what the lines of `source` say, and answers on `target`."""

    def __init__(self, standin: kubelet.StandInKubelet, *, source: TextIO, target: TextIO) -> None:
        self._standin = standin
        self._source = source
        self._target = target
        self._writing = threading.Lock()

    def serve(self) -> None:
        """Until `stop` or the end of the source."""
        self._write({"ready": True, "registry": str(self._standin.registry_dir)})
        with futures.ThreadPoolExecutor(32) as pool:
            for line in self._source:
                try:
                    command = json.loads(line)
                    stop = command["op"] == "stop"
                except (ValueError, TypeError, KeyError) as error:
                    self._write({"id": None, "ok": False, "error": f"not a command: {error!r}"})
                    continue
                if stop:
                    self._write({"id": command.get("id"), "ok": True, "result": None})
                    return
                pool.submit(self._answer, command)

    def _answer(self, command: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"id": command.get("id")}
        try:
            answer |= {"ok": True, "result": self._carry_out(command)}
        except Exception as error:  # noqa: BLE001 -- the door of this process: the one who asked gets to know
            answer |= {
                "ok": False,
                "error": str(error) if isinstance(error, kubelet_client.KubeletError) else repr(error),
            }
        self._write(answer)

    def _carry_out(self, command: Mapping[str, Any]) -> object:
        standin, driver = self._standin, str(command.get("driver", ""))
        match command["op"]:
            case "plugins":
                return [_plain(info) for info in standin.plugins(driver)]
            case "wait":
                options = {key: command[key] for key in ("instances", "timeout_s") if key in command}
                return [_plain(info) for info in standin.wait_registered(driver, **options)]
            case "prepare":
                return {
                    uid: _plain(outcome)
                    for uid, outcome in standin.prepare(driver, _claims(command), pod=_pod(command)).items()
                }
            case "unprepare":
                return {
                    uid: _plain(outcome)
                    for uid, outcome in standin.unprepare(driver, _claims(command), pod=_pod(command)).items()
                }
            case "health":
                return [
                    {"pool": pool, "device": device, **_plain(health)}
                    for (pool, device), health in sorted(standin.health.devices(driver).items())
                ]
            case "refused":
                return {str(socket): reason for socket, reason in standin.refused().items()}
            case "restart":
                standin.restart()
                return None
            case unknown:
                raise kubelet_client.KubeletError(f"unknown op {unknown!r}")

    def _write(self, answer: Mapping[str, Any]) -> None:
        with self._writing:
            print(json.dumps(answer), file=self._target, flush=True)


def _claims(command: Mapping[str, Any]) -> list[values.ClaimRef]:
    return [
        values.ClaimRef(uid=values.ClaimUid(claim["uid"]), namespace=claim["namespace"], name=claim["name"])
        for claim in command["claims"]
    ]


def _pod(command: Mapping[str, Any]) -> str | None:
    pod = command.get("pod")
    return None if pod is None else str(pod)


def _plain(value: object) -> dict[str, Any]:
    """A dataclass as JSON: an outcome that failed is {"error": ...}."""
    if isinstance(value, values.Failed):
        return {"error": value.message}
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value), default=str))
    return plain


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m driver.standin.kubelet_commands", description="A stand-in for kubelet."
    )
    parser.add_argument("--kubelet-dir", type=Path, required=True, help="where plugins_registry lies, or will")
    parser.add_argument("--api-server", help="http://host:port of an API server whose slices it wipes")
    parser.add_argument("--token", default="", help="bearer token for the API server")
    parser.add_argument("--node-name", help="whose slices it wipes there")
    parser.add_argument("--wipe-delay-s", type=float, default=kubelet.WIPE_DELAY_S, help="default %(default)s")
    parser.add_argument("--cgroup-root", type=Path, help="hierarchy of a rendered machine for the cgroups of pods")
    parser.add_argument("--cgroup-driver", choices=kubelet_pods.DRIVERS, default=kubelet_pods.DRIVERS[0])
    options = parser.parse_args()
    if (options.api_server is None) != (options.node_name is None):
        parser.error("--api-server and --node-name belong together")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="kubelet: %(message)s")
    wiper = None
    if options.api_server:
        wiper = slice_wiper(options.api_server, options.node_name, token=options.token)
    pods = None
    if options.cgroup_root is not None:
        pods = kubelet_pods.PodCgroups(options.cgroup_root, driver=options.cgroup_driver)
    with kubelet.StandInKubelet(
        options.kubelet_dir, wipe_slices=wiper, wipe_delay_s=options.wipe_delay_s, pods=pods
    ) as standin:
        Commands(standin, source=sys.stdin, target=sys.stdout).serve()


if __name__ == "__main__":
    main()
