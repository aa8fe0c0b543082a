# SPDX-License-Identifier: Apache-2.0
"""`nearfield topo` and `nearfield capture` as processes.

- a machine with GPUs: the matrix, its labels and affinities; the JSON document says the same; YAML is the same document
- this machine, whatever it is: its PCI network functions, status 0
- on a narrow terminal every column is there; elsewhere there is no escape sequence
- rails of a configuration file; a bad one; roots that are not there; a folder that is no /sys
- a capture replays as what it was taken of; it goes to a file, a compressed file, or standard output, whole or not at all
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from discovery.mock import render, zoo

ROOT = Path(__file__).parents[2]
NEARFIELD = (sys.executable, "-m", "driver.cli")


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
def topo(machine: str) -> dict[str, Any]:
    done = nearfield("topo", "--mock", machine, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


@functools.cache
def table(machine: str) -> str:
    done = nearfield("topo", "--mock", machine)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def matrix(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The labels and the rows of a printed matrix, affinities included."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(" "))
    labels = lines[start].split()
    labels = labels[: labels.index("CPU")]
    rows = {}
    for line in lines[start + 1 :]:
        if not line:
            break
        label, *cells = line.split()
        rows[label] = cells
    return labels, rows


def test_the_nic_of_the_default_route_is_marked() -> None:
    marked = [nic["address"] for nic in topo("gh200")["nics"] if nic["management"]]
    assert len(marked) == 1
    assert [line.split()[1] for line in table("gh200").splitlines() if line.endswith(", default route")] == marked


def test_the_matrix_of_a_machine() -> None:
    text = table("l40s-8-pcie")
    assert "\x1b" not in text
    labels, rows = matrix(text)
    gpus, nics = [f"GPU{n}" for n in range(8)], [label for label in labels if label.startswith("NIC")]
    assert labels == gpus + nics
    document = topo("l40s-8-pcie")
    devices = [device for kind in ("gpus", "nics", "nvmes") for device in document[kind]]
    addresses = [device["address"] for device in devices]
    assert len(document["nvmes"]) > 0
    assert list(rows) == [*labels, *(f"NVMe{n}" for n in range(len(document["nvmes"])))]
    assert len(addresses) == len(rows)
    spelt = {frozenset((path["a"], path["b"])): path["class"] for path in document["paths"]}
    for row, (label, cells) in enumerate(rows.items()):
        *classes, cpus, numa = cells
        assert numa == str(devices[row]["numaNode"])
        assert re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cpus)
        for column, cell in enumerate(classes):
            pair = frozenset((addresses[row], addresses[column]))
            assert cell == ("X" if row == column else spelt[pair]), (label, labels[column])
    for word in ("Legend:", "PIX   at most one PCIe switch", "Devices:"):
        assert word in text
    assert f"  GPU0   {addresses[0]}  NVIDIA L40S" in text


def test_nvlinks_stand_before_the_path_class() -> None:
    document = topo("gb200-tray")
    between = [path for path in document["paths"] if path["nvlinks"]]
    assert len(between) == 4 * 3 / 2
    assert {path["nvlinks"] for path in between} == {18}
    _, rows = matrix(table("gb200-tray"))
    assert rows["GPU0"][:5] == ["X", "NV18", "NV18", "NV18", "NODE"]


def test_the_document() -> None:
    document = topo("workstation-rtx")
    assert (document["apiVersion"], document["kind"]) == ("output.nearfield.dev/v1alpha1", "Topology")
    assert document["origin"] == "recording"
    (gpu,), (nic,) = document["gpus"], document["nics"]
    assert next(iter(gpu)) == "address"
    assert gpu["product"] == "NVIDIA RTX 6000 Ada Generation"
    assert "numaNode" not in gpu
    assert len(document["nvmes"]) == 1
    path = {"a": gpu["address"], "b": nic["address"], "class": "PHB", "nvlinks": 0, "direct": False}
    assert path in document["paths"]
    assert "numa-unknown" in {finding["code"] for finding in document["findings"]}


def test_yaml_is_the_same_document() -> None:
    done = nearfield("topo", "--mock", "workstation-rtx", env={"NEARFIELD_OUTPUT": "yaml"})
    assert yaml.safe_load(done.stdout) == topo("workstation-rtx")


def test_what_is_unknown_is_said_to_be() -> None:
    text = table("workstation-rtx")
    _, rows = matrix(text)
    assert rows == {"GPU0": ["X", "PHB", "-", "-"], "NIC0": ["PHB", "X", "-", "-"], "NVMe0": ["PHB", "PHB", "-", "-"]}
    assert "\nFindings:\n  warning: 0000:01:00.0: " in text


def test_this_machine_whatever_it_is() -> None:
    done = nearfield("topo", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["origin"] == "this-node"
    network = {
        path.name
        for path in Path("/sys/bus/pci/devices").glob("*")
        if (path / "class").read_text(encoding="ascii").startswith("0x02")
    }
    assert network <= {nic["address"] for nic in document["nics"]}
    text = nearfield("topo")
    assert (text.returncode, text.stderr) == (0, "")
    assert ("There is no NVIDIA GPU on this machine." in text.stdout) == (not document["gpus"])
    for address in network:
        assert address in text.stdout


def test_a_machine_without_any_pci_device(tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    done = nearfield("topo", "--sysfs", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("There is no NVIDIA GPU on this machine.\n")
    assert "Legend:" not in done.stdout


def on_a_terminal(*arguments: str) -> str:
    """What a terminal of 40 columns gets."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "40", "LINES": "10"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen([*NEARFIELD, *arguments], cwd=ROOT, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):
            # A terminal whose other end is closed answers EIO.
            while select.select([ours], [], [], 50)[0] and (piece := os.read(ours, 65536)):
                text += piece
        os.close(ours)
    assert process.returncode == 0
    return text.decode().replace("\r\n", "\n")


def test_a_narrow_terminal_loses_no_column() -> None:
    text = on_a_terminal("topo", "--mock", "gb200-tray")
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert matrix(plain) == matrix(table("gb200-tray"))


def test_rails_come_from_the_configuration_file(tmp_path: Path) -> None:
    nic = topo("workstation-rtx")["nics"][0]["address"]
    file = tmp_path / "agent.yaml"
    file.write_text(
        "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
        f"topology: {{rails: [{{nic: {nic}, rail: 7}}]}}\n",
        encoding="utf-8",
    )
    done = nearfield("topo", "--mock", "workstation-rtx", "--config", str(file), "-o", "json")
    assert json.loads(done.stdout)["nics"][0]["rail"] == 7
    file.write_text("kind: AgentConfig\n", encoding="utf-8")
    done = nearfield("topo", "--mock", "workstation-rtx", "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file}:1: apiVersion: missing" in done.stderr


def test_roots_that_are_not_there_are_named(tmp_path: Path) -> None:
    for verb in ("topo", "capture"):
        done = nearfield(verb, "--sysfs", str(tmp_path / "a"), "--dev", str(tmp_path / "b"))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"Error: --sysfs {tmp_path}/a: not a directory\n--dev {tmp_path}/b: not a directory\n"


def test_a_broken_machine_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("apiVersion: mock.nearfield.dev/v1alpha1\nkind: Machine\nnam: x\n", encoding="utf-8")
    done = nearfield("topo", "--mock", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: --mock {file}:")


@pytest.mark.parametrize("name", ["node.json", "node.json.gz"])
def test_a_capture_replays_as_what_it_was_taken_of(tmp_path: Path, name: str) -> None:
    tree = render.render(zoo.load("workstation-rtx"), tmp_path / "machine")
    file = tmp_path / name
    roots = [f"--sysfs={tree.sys}", f"--procfs={tree.proc}", f"--dev={tree.dev}"]
    done = nearfield("capture", *roots, "-o", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert re.match(
        rf"Captured \d+ files, .*, to {re.escape(str(file))}\. Serial numbers, MAC addresses, ", done.stderr
    )
    assert (file.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    seen = json.loads(nearfield("topo", *roots, "-o", "json").stdout)
    replayed = topo(str(file))
    for kind in ("gpus", "nics", "nvmes"):
        assert [device["address"] for device in replayed[kind]] == [device["address"] for device in seen[kind]]
    assert replayed["paths"] == seen["paths"]


def test_a_capture_to_standard_output_is_the_same(tmp_path: Path) -> None:
    done = nearfield("capture")
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "Recording"
    file = tmp_path / "x.gz"
    assert nearfield("capture", env={"NEARFIELD_OUTPUT_FILE": str(file)}).stdout == ""
    assert json.loads(gzip.decompress(file.read_bytes()))["kind"] == "Recording"


def test_a_capture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    for target, reason in ((tmp_path / "none/x", "No such file or directory"), (tmp_path, "Is a directory")):
        done = nearfield("capture", "-o", str(target))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"Error: {target}: cannot be written: {reason}\n"
    assert list(tmp_path.iterdir()) == []


def keys(value: object) -> set[str]:
    """Every key in a document, those left out that are numbers of NUMA nodes or sockets."""
    if isinstance(value, dict):
        return {key for key in value if not key.isdecimal()}.union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_documentation_names_every_field() -> None:
    page = (ROOT / "docs/output.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`([A-Za-z0-9]+)(?:\[\])?`", page)) | {"apiVersion", "kind"}
    for machine in ("gb200-tray", "l40s-8-pcie", "workstation-rtx", "dgx-h100-mig"):
        assert keys(topo(machine)) - known == set()
