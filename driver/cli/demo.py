# SPDX-License-Identifier: Apache-2.0
"""`nearfield demo`: the agent on a mock machine, between stand-ins for the API server and kubelet."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from driver import values
from driver.cli import output
from driver.errors import DriverError
from driver.standin import processes

NODE = "demo-node"
NAMESPACE = "default"
CLAIM = "gpus"
PAIR = 2

START_S = 30.0
_LOOK_AGAIN_S = 0.05
_LOG_LINES = 15

_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
_CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"


@click.command(
    "demo",
    help="""Run the agent on a mock machine, from the wires to a prepared claim.

    The agent is the same `nearfield run` process that a node runs. The API server and kubelet at its two ends are stand-ins
    that come with Nearfield; sockets, HTTP, files and gRPC between them are real.""",
    epilog="""\b
    Examples:
      nearfield demo
      nearfield demo --mock gb200-tray
      nearfield demo --keep
    """,
)
@click.option("--mock", default="dgx-h100", show_default=True, metavar="MACHINE|FILE", help="The machine to run on.")
@click.option("--keep", is_flag=True, help="Stay up until Ctrl-C, with the claim prepared.")
def command(mock: str, *, keep: bool) -> None:
    """Show the whole way of a claim."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Each step is to be seen when it is done, also through a pipe.
        sys.stdout.reconfigure(line_buffering=True)
    directory = Path(tempfile.mkdtemp(prefix="nf-"))
    try:
        with contextlib.ExitStack() as stack:
            _show(_Parts(directory, mock, stack), keep=keep)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _show(parts: _Parts, *, keep: bool) -> None:
    _say("The parts")
    output.write_line(f"  API server  a stand-in at {parts.api.url} (not the real one)")
    output.write_line(f"  kubelet     a stand-in in {parts.kubelet_dir} (not the real one)")
    output.write_line(f"  agent       nearfield {' '.join(parts.agent_arguments)}")

    _say("Registration: the agent's sockets, as kubelet sees them")
    for plugin in parts.wait_for_registration():
        output.write_line(f"  {plugin.get('name', parts.driver)}  {plugin.get('endpoint', '')}")

    slices = parts.wait_for_slices()
    _say("ResourceSlices: what the scheduler sees")
    devices = [device for item in slices for device in item["spec"].get("devices", [])]
    for index, item in enumerate(slices, 1):
        pool = item["spec"]["pool"]
        output.write_line(
            f"  {item['metadata']['name']}: pool {pool['name']}, generation {pool['generation']}, slice {index} of"
            f" {pool['resourceSliceCount']}, {len(item['spec'].get('devices', []))} devices"
        )
    output.write_table(
        ("  DEVICE", "PRODUCT", "NUMA", "PCIE ROOT", "SWITCH", "NVLINK", "PAIR", "NIC", "MEMORY"),
        [_row(device) for device in devices],
    )

    chosen = _choose(devices)
    if not chosen:
        raise DriverError(
            "This machine has no GPU to offer, so there is nothing to claim; choose one of `nearfield machines`"
        )
    ref = parts.make_claim(chosen)
    _say(f"A claim for {len(chosen)} {'GPUs' if len(chosen) > 1 else 'GPU'}: {NAMESPACE}/{CLAIM}")
    how = "as the scheduler would with matchAttribute alignedPair" if len(chosen) > 1 else "as the scheduler would"
    output.write_line(f"  allocated, {how}: " + ", ".join(chosen))
    answer = parts.kubelet.ask("prepare", claims=[ref])[ref["uid"]]
    if "error" in answer:
        raise DriverError(f"The claim could not be prepared: {answer['error']}")
    for device in answer["devices"]:
        output.write_line(f"  prepared: {device['device']} -> {', '.join(device['cdi_device_ids'])}")

    (spec,) = parts.cdi_dir.glob(f"*{ref['uid']}.json")
    _say(f"The CDI file that the container runtime reads: {spec}")
    _indent(json.dumps(_without_annotations(json.loads(spec.read_text(encoding="utf-8"))), indent=2))

    _say(f"Metrics: {parts.metrics_url}")
    wanted = (
        "nearfield_claims_prepared ",
        "nearfield_devices{",
        "nearfield_prepare_total{",
        "nearfield_slices_published ",
    )
    _indent("\n".join(line for line in parts.metrics().splitlines() if line.startswith(wanted)))

    if keep:
        _say("Everything stays up until Ctrl-C")
        output.write_line(f"  curl {parts.metrics_url}")
        output.write_line(f"  browser: {parts.topology_url}")
        output.write_line(f"  nearfield claims --state-dir {parts.state_dir}")
        output.write_line(f"  kubectl --kubeconfig {parts.kubeconfig} get resourceslices -o yaml")
        with contextlib.suppress(KeyboardInterrupt):
            parts.wait()

    released = parts.kubelet.ask("unprepare", claims=[ref])[ref["uid"]]
    if "error" in released:
        raise DriverError(f"The claim could not be unprepared: {released['error']}")
    _say("Unprepared")
    output.write_line(f"  the CDI file is {'still there' if spec.exists() else 'gone'}, the GPUs are free")


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    attributes = device["attributes"]

    def shown(name: str) -> str:
        return str(next(iter(attributes.get(name, {"": output.MISSING}).values())))

    return (
        f"  {device['name']}",
        shown("productName"),
        shown("resource.kubernetes.io/numaNode"),
        shown("resource.kubernetes.io/pcieRoot"),
        shown("pcieSwitch"),
        shown("nvlinkDomain"),
        shown("alignedPair"),
        shown("nic"),
        str(device["capacity"]["memory"]["value"]),
    )


def _choose(devices: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The first two of one aligned pair; where the machine has no pairs, its first GPU alone."""
    pairs: dict[str, list[str]] = {}
    for device in devices:
        pair = device["attributes"].get("alignedPair", {}).get("string")
        if pair is not None:
            pairs.setdefault(pair, []).append(device["name"])
    whole = [tuple(names) for names in pairs.values() if len(names) == PAIR]
    return whole[0] if whole else tuple(device["name"] for device in devices[:1])


def _without_annotations(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The annotation repeats the record, which is long and says nothing new here."""
    return {key: value for key, value in spec.items() if key != "annotations"}


def _say(headline: str) -> None:
    output.write_line()
    output.write_line(headline)


def _indent(text: str) -> None:
    for line in text.splitlines():
        output.write_line(f"  {line}")


class _Parts:
    """The three processes and the folder they share. They end with `stack`, the agent first."""

    def __init__(self, directory: Path, mock: str, stack: contextlib.ExitStack) -> None:
        self.driver = values.DRIVER_NAME
        self.kubeconfig = directory / "kubeconfig"
        self.kubelet_dir = directory / "kubelet"
        self.cdi_dir = directory / "cdi"
        self.state_dir = directory / "state"
        http, inspect = _free_port(), _free_port()
        self.metrics_url = f"http://127.0.0.1:{http}/metrics"
        self.topology_url = f"http://127.0.0.1:{inspect}/topology"
        self.api = processes.ApiServerProcess(stack, node_name=NODE, kubeconfig=self.kubeconfig)
        self.kubelet = processes.KubeletProcess(
            stack, self.kubelet_dir, api=self.api, node_name=NODE, driver=self.driver
        )
        self.agent_arguments = (
            "run",
            *("--node-name", NODE),
            *("--mock", mock),
            *("--kubeconfig", str(self.kubeconfig)),
            *("--kubelet-dir", str(self.kubelet_dir)),
            *("--cdi-dir", str(self.cdi_dir)),
            *("--state-dir", str(self.state_dir)),
            *("--http", f"127.0.0.1:{http}"),
            *("--inspect", f"127.0.0.1:{inspect}"),
        )
        self._log = directory / "agent.log"
        log = stack.enter_context(self._log.open("wb"))
        self._agent = stack.enter_context(
            processes.run_process([sys.executable, "-m", "driver.cli", *self.agent_arguments], stderr=log)
        )

    def wait_for_registration(self) -> list[Mapping[str, Any]]:
        """The sockets of the agent that kubelet has taken."""

        def registered() -> list[Mapping[str, Any]] | None:
            plugins: list[Mapping[str, Any]] = self.kubelet.ask("plugins")
            return plugins or None

        return self._wait(registered, "Kubelet has not registered the agent")

    def wait_for_slices(self) -> list[Mapping[str, Any]]:
        """The complete pool of the node."""

        def complete() -> list[Mapping[str, Any]] | None:
            items: list[Mapping[str, Any]] = self.api.call("GET", _SLICES)["items"]
            ours = [item for item in items if item["spec"]["driver"] == self.driver]
            return ours if ours and len(ours) == ours[0]["spec"]["pool"]["resourceSliceCount"] else None

        return self._wait(complete, "The agent published no ResourceSlices")

    def _wait(self, look: Callable[[], list[Mapping[str, Any]] | None], what: str) -> list[Mapping[str, Any]]:
        """What `look` finds, as long as the agent runs. DriverError with what the agent says where it finds nothing."""

        def alive() -> list[Mapping[str, Any]] | None:
            if self._agent.poll() is not None:
                raise DriverError(f"The agent ended with status {self._agent.returncode}:\n{self._last_lines()}")
            return look()

        try:
            return _until(alive, what)
        except TimeoutError as error:
            raise DriverError(f"{error}; its log ends with:\n{self._last_lines()}") from error

    def make_claim(self, devices: Sequence[str]) -> dict[str, str]:
        """A claim with an allocation, as user and scheduler make it together."""
        request = {"name": "gpus", "exactly": {"deviceClassName": "gpu.nearfield.dev", "count": len(devices)}}
        together = {"requests": ["gpus"], "matchAttribute": f"{self.driver}/alignedPair"}
        constraints = [together] if len(devices) > 1 else []
        claim = self.api.call(
            "POST",
            _CLAIMS,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": CLAIM, "namespace": NAMESPACE},
                "spec": {"devices": {"requests": [request], "constraints": constraints}},
            },
        )
        results: list[Mapping[str, Any]] = [
            {"request": "gpus", "driver": self.driver, "pool": NODE, "device": device} for device in devices
        ]
        claim["status"] = {"allocation": {"devices": {"results": results}}}
        self.api.call("PUT", f"{_CLAIMS}/{CLAIM}/status", claim)
        return {"namespace": NAMESPACE, "name": CLAIM, "uid": claim["metadata"]["uid"]}

    def metrics(self) -> str:
        """One scrape."""
        with urllib.request.urlopen(self.metrics_url, timeout=processes.CALL_S) as response:  # noqa: S310 - our own agent
            text: str = response.read().decode()
        return text

    def wait(self) -> None:
        """Until the agent ends."""
        self._agent.wait()

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])


def _until(look: Callable[[], list[Mapping[str, Any]] | None], what: str) -> list[Mapping[str, Any]]:
    deadline = time.monotonic() + START_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        pause.wait(_LOOK_AGAIN_S)
    raise TimeoutError(f"{what} within {START_S:g} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
