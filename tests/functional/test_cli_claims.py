# SPDX-License-Identifier: Apache-2.0
"""`nearfield claims` and `nearfield machines` as processes.

- the record of an agent that is not running, and of one that is writing: the same answer, and nothing changed on disk
- an empty record, no record, a file that is none
- where the record is follows from kubelet's folder and the driver's name
- the zoo: a list, one machine as it stands in its file, as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import yaml

from discovery.mock import zoo
from driver import values
from driver.prepare import ledger, recordfile, store

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


def entry(name: str, *, device: str, admin: bool = False) -> ledger.Entry:
    ref = values.ClaimRef(uid=values.ClaimUid(f"uid-{name}"), namespace="team-a", name=name)
    return ledger.Entry(
        claim=ref,
        state=ledger.ClaimState.COMPLETED,
        boot_id="boot-1",
        devices=(ledger.HeldDevice(name=device, address="0000:1b:00.0", uuid="GPU-1", nodes=("/dev/nvidia0",)),),
        results=(ledger.Result(request="gpu/big", pool="n1", device=device, admin=admin),),
        cdi_ids=((f"gpu.nearfield.dev/claim={ref.uid}-{device}",),),
    )


ENTRIES = (entry("train", device="gpu-0000-1b-00-0"), entry("watch", device="gpu-0000-43-00-0", admin=True))


def make_record(directory: Path, *entries: ledger.Entry) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    recordfile.create(directory / store.FILE_NAME, entries)
    return directory / store.FILE_NAME


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_record_that_nobody_uses(tmp_path: Path) -> None:
    make_record(tmp_path, *ENTRIES)
    before = files(tmp_path)
    done = nearfield("claims", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["NAMESPACE", "NAME", "STATE", "DEVICES", "UID"]
    assert sorted(row.split() for row in rows) == [
        ["team-a", "train", "completed", "gpu-0000-1b-00-0", "uid-train"],
        ["team-a", "watch", "completed", "gpu-0000-43-00-0", "uid-watch"],
    ]
    assert files(tmp_path) == before


def test_the_list_as_a_document(tmp_path: Path) -> None:
    make_record(tmp_path, *ENTRIES)
    done = nearfield("claims", "--state-dir", str(tmp_path), "-o", "json")
    listed = json.loads(done.stdout)
    assert (listed["apiVersion"], listed["kind"]) == ("output.nearfield.dev/v1alpha1", "PreparedClaimList")
    by_name = {item["name"]: item for item in listed["items"]}
    assert by_name["train"] == {
        "uid": "uid-train",
        "namespace": "team-a",
        "name": "train",
        "state": "completed",
        "bootId": "boot-1",
        "devices": [
            {
                "request": "gpu/big",
                "pool": "n1",
                "device": "gpu-0000-1b-00-0",
                "adminAccess": False,
                "cdiDeviceIds": ["gpu.nearfield.dev/claim=uid-train-gpu-0000-1b-00-0"],
            }
        ],
    }
    assert by_name["watch"]["devices"][0]["adminAccess"] is True
    assert yaml.safe_load(nearfield("claims", "--state-dir", str(tmp_path), "-o", "yaml").stdout) == listed


def test_a_record_that_is_being_written(tmp_path: Path) -> None:
    path = make_record(tmp_path, ENTRIES[0])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as agent:
        agent.execute("PRAGMA journal_mode=WAL")
        agent.execute("BEGIN IMMEDIATE")
        recordfile.insert(agent, ledger.to_columns(ENTRIES[1]), ENTRIES[1])
        during = nearfield("claims", "--state-dir", str(tmp_path))
        agent.execute("COMMIT")
        after = nearfield("claims", "--state-dir", str(tmp_path))
        # The agent still has its file to itself.
        agent.execute("BEGIN IMMEDIATE")
        agent.execute("ROLLBACK")
    assert (during.returncode, after.returncode) == (0, 0)
    assert ("train" in during.stdout, "watch" in during.stdout) == (True, False)
    assert ("train" in after.stdout, "watch" in after.stdout) == (True, True)


def test_the_place_of_the_record_follows_from_other_options(tmp_path: Path) -> None:
    make_record(tmp_path / "plugins/gpu.example.com/state", ENTRIES[0])
    env = {"NEARFIELD_KUBELET_DIR": str(tmp_path), "NEARFIELD_DRIVER_NAME": "gpu.example.com"}
    assert "uid-train" in nearfield("claims", env=env).stdout


def test_an_empty_record(tmp_path: Path) -> None:
    make_record(tmp_path)
    assert nearfield("claims", "--state-dir", str(tmp_path)).stdout == "No claim is prepared.\n"
    listed = json.loads(nearfield("claims", "--state-dir", str(tmp_path), "-o", "json").stdout)
    assert listed["items"] == []


def test_what_is_no_record_is_named_and_left_alone(tmp_path: Path) -> None:
    done = nearfield("claims", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: There is no record at {tmp_path}/{store.FILE_NAME} (")
    (tmp_path / store.FILE_NAME).write_bytes(b"SQLite format 3\x00" + b"rubbish" * 1000)
    before = files(tmp_path)
    done = nearfield("claims", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: The record {tmp_path}/{store.FILE_NAME} cannot be read: ")
    assert "Traceback" not in done.stderr
    assert files(tmp_path) == before


def test_the_zoo() -> None:
    listed = json.loads(nearfield("machines", "-o", "json").stdout)
    assert (listed["apiVersion"], listed["kind"]) == ("output.nearfield.dev/v1alpha1", "MachineList")
    assert [item["name"] for item in listed["items"]] == list(zoo.names())
    assert {"dgx-h100", "l40s-8-pcie", "gb200-tray", "workstation-rtx"} <= set(zoo.names())
    assert all(item["description"] for item in listed["items"])
    head, *rows = nearfield("machines").stdout.splitlines()
    assert head.split() == ["NAME", "DESCRIPTION"]
    assert [row.split()[0] for row in rows] == list(zoo.names())


def test_one_machine(tmp_path: Path) -> None:
    as_yaml = nearfield("machines", "workstation-rtx", "-o", "yaml").stdout
    assert as_yaml == nearfield("machines", "workstation-rtx").stdout == zoo.text("workstation-rtx")
    as_json = json.loads(nearfield("machines", "workstation-rtx", "-o", "json").stdout)
    assert (as_json["kind"], as_json["name"]) == ("Machine", "workstation-rtx")
    copy = tmp_path / "mine.yaml"
    copy.write_text(as_yaml, encoding="utf-8")
    assert zoo.load(str(copy)) == zoo.load("workstation-rtx")
