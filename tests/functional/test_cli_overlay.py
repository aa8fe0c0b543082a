# SPDX-License-Identifier: Apache-2.0
"""Overlays on the command line and in the agent.

- what came from one is marked in the table and in JSON, whichever way the file is named; the option wins over the configuration
- a file that is no overlay is exit status 2 with its line, at `run` and at every verb that looks at a machine
- a large one reaches the process that looks at the hardware
- one that does not fit the machine: the agent serves, and /readyz and the log say which line
- `topo -o nccl-xml`, `config check` and `config schema`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery import overlay
from tests.fakes import agents, mockmachine, nccl_rules

ROOT = Path(__file__).parents[2]
GPU0, GPU1, NIC = map(str, (mockmachine.GPU0, mockmachine.GPU1, mockmachine.NIC))
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: TopologyOverlay\nmachines:\n"
NODE_1 = (
    f'{HEAD}- numaNodes:\n  - {{node: 1, devices: [{GPU0}, {GPU1}, "{NIC}"]}}\n  rails: [{{nic: "{NIC}", rail: 4}}]\n'
)
"""Corrects the NUMA node of everything below the switch of the small machine."""


def nearfield(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "driver.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )


@pytest.fixture(name="machine")
def fixture_machine(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(mockmachine.TEXT, encoding="utf-8")
    return str(path)


@pytest.fixture(name="file")
def fixture_file(tmp_path: Path) -> Path:
    path = tmp_path / "overlay.yaml"
    path.write_text(NODE_1, encoding="utf-8")
    return path


def test_what_came_from_the_overlay_is_marked(machine: str, file: Path) -> None:
    done = nearfield("topo", "--mock", machine, "--overlay", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith("GPU0 ")).split()[-2:] == ["2-3,6-7", "1*"]
    assert any(line.startswith("  *     given by a person") for line in lines)
    assert next(line for line in lines if line.startswith("  NIC0 ")).endswith("  * NUMA node 1, rail 4")
    warning = f"  warning: {GPU0}: {file}:5 says NUMA node 1 and is believed; sysfs says 0 (numa-from-overlay)"
    assert warning in lines
    plain = nearfield("topo", "--mock", machine)
    assert "*" not in plain.stdout
    published = nearfield("devices", "--mock", machine, "--overlay", str(file)).stdout.splitlines()
    given = [[cell for cell in line.split() if cell.endswith("*")] for line in published]
    assert given[1:3] == [["1*", "4*"]] * 2
    assert any(line.startswith("* given by a person") for line in published)
    assert "*" not in nearfield("devices", "--mock", machine).stdout


def document(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = nearfield("topo", *arguments, "-o", "json", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_option_wins_over_the_configuration_file(machine: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.yaml").write_text(NODE_1.replace("rail: 4", "rail: 5"), encoding="utf-8")
    config = tmp_path / "agent.yaml"
    config.write_text(
        "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\ntopology: {overlayFile: beside.yaml}\n",
        encoding="utf-8",
    )
    named = ("--mock", machine, "--config", str(config))
    (nic,) = document(*named)["nics"]
    assert (nic["numaNode"], nic["numaSource"], nic["rail"], nic["railSource"]) == (1, "overlay", 5, "overlay")
    (nic,) = document(*named, env={"NEARFIELD_OVERLAY": str(file)})["nics"]
    assert nic["rail"] == 4
    checked = nearfield("config", "check", str(config))
    assert checked.returncode == 0
    assert str(tmp_path / "beside.yaml") in checked.stdout


@pytest.mark.parametrize(
    "verb", [("topo",), ("devices",), ("slices", "--node-name", "n"), ("run", "--node-name", "n"), ("config", "check")]
)
def test_a_file_that_is_no_overlay_ends_with_status_2_and_its_line(verb: tuple[str, ...], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(HEAD + "- numaNode: []\n", encoding="utf-8")
    config = tmp_path / "agent.yaml"
    config.write_text(
        "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\ntopology: {overlayFile: bad.yaml}\n",
        encoding="utf-8",
    )
    if verb == ("config", "check"):
        done = nearfield(*verb, str(config))
    else:
        done = nearfield(*verb, "--mock", "workstation-rtx", "--overlay", str(bad))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{bad}:4: machines[0].numaNode: unknown key; did you mean numaNodes?" in done.stderr


def test_a_large_overlay_reaches_the_process_that_looks(machine: str, file: Path) -> None:
    """Longer than one argument of a program may be (128 KiB)."""
    rails = "".join(
        f"  - {{nic: {i >> 8:04x}:{i & 0xFF:02x}:00.0, rail: {i}}}\n" for i in range(1, overlay.MAX_DEVICES - 20)
    )
    other = f"- match: {{vendor: Nobody}}\n  rails:\n{rails}"
    file.write_text(NODE_1.replace(HEAD, HEAD + other), encoding="utf-8")
    (nic,) = document("--mock", machine, "--overlay", str(file))["nics"]
    assert nic["rail"] == 4


def test_nccl_s_form_of_a_machine(machine: str, file: Path) -> None:
    done = nearfield("topo", "--mock", machine, "--overlay", str(file), "-o", "nccl-xml")
    assert (done.returncode, done.stderr) == (0, "")
    root = nccl_rules.read(done.stdout)
    (cpu,) = root.inside
    assert cpu.attributes == {"numaid": "1", "affinity": "000000cc"}
    assert [node.attributes["busid"] for node in cpu.inside[0].inside] == [GPU0, GPU1, NIC]
    assert [node.attributes["rail"] for node in root.all() if node.name == "net"] == ["4"]
    other = file.parent / "other.yaml"
    other.write_text(NODE_1.replace("node: 1", "node: 9"), encoding="utf-8")
    without = nearfield("topo", "--mock", machine, "--overlay", str(other), "-o", "nccl-xml")
    assert without.returncode == 0
    assert nccl_rules.read(without.stdout).inside[0].attributes["numaid"] == "0"
    assert without.stderr.startswith(f"error: {other}:5: there is no NUMA node 9 on this machine, but 0, 1; nothing of")
    refused = nearfield("devices", "--mock", machine, "-o", "nccl-xml")
    assert (refused.returncode, refused.stdout) == (2, "")
    back = file.parent / "back.xml"
    back.write_text(done.stdout, encoding="utf-8")
    (nic,) = document("--mock", machine, "--overlay", str(back))["nics"]
    assert (nic["numaNode"], nic["numaSource"], nic["switchSource"], nic["rail"]) == (1, "overlay", "sysfs", 4)


def test_an_overlay_can_be_checked_and_a_nccl_topology_turned_into_one(file: Path, tmp_path: Path) -> None:
    done = nearfield("config", "check", str(file), "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["machines"][0]["rails"] == [{"nic": NIC, "rail": 4}]
    topology = tmp_path / "t.xml"
    topology.write_text(f'<system version="1"><cpu numaid="1"><pci busid="{GPU0}"/></cpu></system>', encoding="utf-8")
    turned = nearfield("config", "check", str(topology))
    assert (turned.returncode, turned.stderr) == (0, "")
    file.write_text(turned.stdout, encoding="utf-8")
    assert nearfield("config", "check", str(file)).stdout == turned.stdout
    file.write_text("kind: TopologyOverlay\n", encoding="utf-8")
    bad = nearfield("config", "check", str(file))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert f"{file}:1: machines: missing" in bad.stderr


def test_the_schema_of_an_overlay() -> None:
    done = nearfield("config", "schema", "TopologyOverlay")
    assert json.loads(done.stdout)["title"] == "TopologyOverlay"
    assert json.loads(nearfield("config", "schema").stdout)["title"] == "AgentConfig"


@pytest.fixture(name="node")
def fixture_node() -> Iterator[agents.Node]:
    with agents.node() as node:
        yield node


@pytest.mark.timeout(300)
def test_an_overlay_for_another_machine_is_told_and_the_agent_serves(node: agents.Node, file: Path) -> None:
    file.write_text(NODE_1.replace("node: 1", "node: 900").replace(GPU0, "0000:18:00.0"), encoding="utf-8")
    machine = node.directory / "small.yaml"
    machine.write_text(mockmachine.TEXT, encoding="utf-8")
    agent = node.start("--overlay", str(file), mock=str(machine))
    node.kubelet()
    devices = node.wait_for_devices(2)
    assert [device["attributes"]["resource.kubernetes.io/numaNode"] for device in devices] == [{"int": 0}] * 2
    agents.until(agent.ready, "readiness")
    told = f"{file}:5: there is no NUMA node 900 on this machine, but 0, 1"
    assert told in agent.get("/readyz")[1]
    agents.until(lambda: told in agent.said(), "a line about it")


@pytest.mark.timeout(300)
def test_what_an_overlay_says_is_published(node: agents.Node, file: Path) -> None:
    machine = node.directory / "small.yaml"
    machine.write_text(mockmachine.TEXT, encoding="utf-8")
    node.start("--overlay", str(file), mock=str(machine))
    for device in node.wait_for_devices(2):
        told = device["attributes"]
        assert (told["resource.kubernetes.io/numaNode"], told["cpuSocket"], told["rail"]) == (
            {"int": 1},
            {"int": 1},
            {"int": 4},
        )
        assert told["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:15"}
