# SPDX-License-Identifier: Apache-2.0
"""`nearfield devices` and `nearfield slices` as processes.

- devices: a table and a list, in the order in which they are offered, with the API's spelling of attributes
- slices: a stream that an API server takes as it is, without an owner; a list; a table
- what cannot be published is said, and is no failure; a machine without a GPU is one empty slice
- the driver's and the node's name, from options and environment; the host name by default
- publish options of the configuration file
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from discovery.mock import render, zoo
from driver.kube import access, client
from driver.publish import limits
from driver.standin import apiserver

ROOT = Path(__file__).parents[2]
NEARFIELD = (sys.executable, "-m", "driver.cli")
MACHINE = "gb200-tray"


def nearfield(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NEARFIELD, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@functools.cache
def listed(verb: str, *arguments: str) -> Any:
    done = nearfield(verb, *arguments, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_devices_in_the_order_in_which_they_are_offered() -> None:
    document = listed("devices", "--mock", MACHINE)
    assert (document["apiVersion"], document["kind"]) == ("output.nearfield.dev/v1alpha1", "DeviceList")
    names = [item["name"] for item in document["items"]]
    assert len(names) == 4
    (body,) = listed("slices", "--mock", MACHINE, "--node-name", "n1")["items"]
    assert [device["name"] for device in body["spec"]["devices"]] == names
    assert [{key: item[key] for key in item if key != "address"} for item in document["items"]] == body["spec"][
        "devices"
    ]
    first = document["items"][0]
    assert first["name"] == "gpu-" + first["address"].replace(":", "-").replace(".", "-")
    assert first["attributes"]["productName"] == {"string": "NVIDIA GB200"}
    done = nearfield("devices", "--mock", MACHINE)
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["DEVICE", "PRODUCT", "MEMORY"]
    assert [row.split()[0] for row in rows[:4]] == names
    assert "NVIDIA GB200" in rows[0]


def test_an_api_server_takes_the_stream_as_it_is() -> None:
    done = nearfield("slices", "--mock", MACHINE, "--node-name", "n1", "-o", "yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("---\n")
    bodies = list(yaml.safe_load_all(done.stdout))
    assert bodies == listed("slices", "--mock", MACHINE, "--node-name", "n1")["items"]
    assert limits.violations(bodies) == ()
    assert all("ownerReferences" not in body["metadata"] for body in bodies)
    with (
        apiserver.ApiServer() as server,
        contextlib.closing(
            client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="test")
        ) as api,
    ):
        for body in bodies:
            stored = api.create_slice(body, timeout_s=30)
            assert stored["spec"] == body["spec"]


def test_the_list_is_one_of_kubernetes() -> None:
    document = listed("slices", "--mock", MACHINE, "--node-name", "n1")
    assert (document["apiVersion"], document["kind"]) == ("resource.k8s.io/v1", "ResourceSliceList")
    assert {body["kind"] for body in document["items"]} == {"ResourceSlice"}


def test_slices_as_a_table() -> None:
    done = nearfield(
        "slices", "--mock", MACHINE, env={"NEARFIELD_NODE_NAME": "n1", "NEARFIELD_DRIVER_NAME": "gpu.example.com"}
    )
    head, row, *_ = done.stdout.splitlines()
    assert head.split() == ["NAME", "DRIVER", "POOL", "DEVICES"]
    name, *rest = row.split()
    assert name.startswith("00000-gpu.example.com-n1-")
    assert rest == ["gpu.example.com", "n1", "4"]


def test_the_node_is_by_default_the_host() -> None:
    (body,) = listed("slices", "--mock", "workstation-rtx")["items"]
    assert body["spec"]["nodeName"] == os.uname().nodename.lower()


def test_a_machine_without_a_gpu_is_one_empty_slice(tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    roots = ("--sysfs", str(tmp_path))
    (body,) = listed("slices", *roots, "--node-name", "n1")["items"]
    assert "devices" not in body["spec"]
    assert body["spec"]["pool"]["resourceSliceCount"] == 1
    done = nearfield("devices", *roots)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("There is no NVIDIA GPU on this machine.\n")


@pytest.fixture
def without_driver(tmp_path: Path) -> tuple[str, ...]:
    """A machine whose GPU nobody can read: its files, without a library of NVML."""
    tree = render.render(zoo.load("workstation-rtx"), tmp_path / "machine")
    return (f"--sysfs={tree.sys}", f"--procfs={tree.proc}", f"--dev={tree.dev}")


def test_what_cannot_be_published_is_said_and_is_no_failure(without_driver: tuple[str, ...]) -> None:
    reason = "None of the 1 NVIDIA GPUs of this node can be offered (1 unreadable)"
    done = nearfield("devices", *without_driver)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(reason)
    for form, empty in (("table", ""), ("yaml", "")):
        done = nearfield("slices", *without_driver, "--node-name", "n1", "-o", form)
        assert done.returncode == 0
        assert done.stdout.partition("\nFindings:")[0] == empty
        assert done.stderr.startswith(f"Nothing would be published: {reason}")
    done = nearfield("slices", *without_driver, "--node-name", "n1", "-o", "json")
    assert json.loads(done.stdout)["items"] == []


def test_the_configuration_file_decides_the_forms(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(
        "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\npublish: {numaNode: list, pcieSwitches: true}\n",
        encoding="utf-8",
    )
    attributes = listed("devices", "--mock", "l40s-8-pcie", "--config", str(file))["items"][0]["attributes"]
    assert attributes["resource.kubernetes.io/numaNode"]["ints"][0] == 0
    assert attributes["pcieSwitches"]["strings"][0] == attributes["pcieSwitch"]["string"]
    plain = listed("devices", "--mock", MACHINE)["items"][0]["attributes"]
    assert plain["resource.kubernetes.io/numaNode"] == {"int": 0}
    assert "pcieSwitches" not in plain
