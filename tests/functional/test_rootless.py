# SPDX-License-Identifier: Apache-2.0
"""Without the rights of root the probe reads what it may, and says once what it could not: on a machine whose files are closed as
a kernel closes them, and on this very machine. Where the tests run as root, the probe runs in a process that gives that up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import check, codec, model
from discovery.mock import render, zoo

ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys
from pathlib import Path

import psutil, pynvml  # before the rights are gone: the folders of this interpreter may be root's

from discovery import codec, model, probe, sysfs
from discovery.mock import library
from discovery.options import ProbeOptions

directory = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
snapshot = probe.probe(
    sysfs=sysfs.Sysfs(sys=directory / "sys", proc=directory / "proc"),
    dev=directory / "dev",
    library=library.Library(directory) if sys.argv[2] == "mock" else None,
    origin=model.Origin.RECORDING,
    options=ProbeOptions(),
    clock=lambda: 0.0,
)
assert os.geteuid() != 0
print(json.dumps(codec.to_json(snapshot)))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="nearfield-rootless-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "node"


def run(directory: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), what], cwd=ROOT, capture_output=True, text=True, check=False
    )


def look(directory: Path, what: str) -> model.Snapshot:
    """What the probe sees as an unprivileged user."""
    done = run(directory, what)
    assert done.returncode == 0, done.stderr
    return codec.from_json(json.loads(done.stdout))


def close(path: Path) -> None:
    assert path.is_file()
    path.chmod(0)


def said(snapshot: model.Snapshot) -> list[tuple[str, str]]:
    return [(finding.code, finding.subject) for finding in snapshot.findings]


def test_what_is_closed_is_said_once_and_the_rest_is_known(public: Path) -> None:
    tree = render.render(zoo.load("gb300-tray"), public)
    before = look(tree.directory, "mock")
    for path in tree.sys.glob("devices/**/config"):
        path.write_bytes(path.read_bytes()[:64])  # as the kernel does, without an error
    for path in (*tree.sys.glob("devices/**/vpd"), *tree.proc.glob("driver/nvidia/gpus/*/numa_status")):
        close(path)
    for name in ("dev", "route", "ipv6_route"):
        close(tree.proc / "1/net" / name)
    after = look(tree.directory, "mock")
    assert [item for item in said(after) if item not in said(before)] == [
        ("default-route-unknown", "net"),
        ("not-permitted", "numa_status"),
        ("pci-config-restricted", "sysfs"),
        ("vpd-restricted", "sysfs"),
    ]
    assert check.violations(after) == ()
    assert {gpu.memory_numa_node for gpu in after.gpus} == {None}
    assert {nic.management for nic in after.nics} == {None}
    assert {nic.data_direct for nic in after.nics} == {None}
    for one, other in zip(before.gpus, after.gpus, strict=True):
        facts = ("uuid", "minor", "product", "memory_bytes", "nvlinks", "fabric", "c2c", "state")
        assert [getattr(one, name) for name in facts] == [getattr(other, name) for name in facts]
        assert one.pci == other.pci
    assert (before.host, before.numa_nodes, before.nvmes) == (after.host, after.numa_nodes, after.nvmes)


def test_a_tree_of_which_nothing_may_be_read_is_no_machine_without_gpus(public: Path) -> None:
    tree = render.render(zoo.load("l40s-8-pcie"), public)
    for path in (*tree.sys.rglob("*"), *tree.proc.rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.chmod(0)
    done = run(tree.directory, "mock")
    assert done.returncode == 1
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("discovery.errors.ProbeError: "))
    assert "no NVIDIA GPU is seen, and " in error
    assert "give the agent the right to read /sys" in error


def test_this_machine_without_rights_and_whatever_it_has() -> None:
    snapshot = look(Path("/"), "real")
    assert check.violations(snapshot) == ()
    assert snapshot.host.online_cpus
    assert snapshot.host.kernel == os.uname().release
    assert "contradiction" not in {finding.code for finding in snapshot.findings}
