# SPDX-License-Identifier: Apache-2.0
"""`nearfield devices` of machines that are divided by MIG, as a process.

- a table of whole GPUs and of instances that exist, a bar for each divided GPU; places that could be had are counted there, and listed as JSON
- the machine that the agent of this node replays, with what it has made: by the same variables, unless another machine is typed
- a record that cannot be read costs the word whose an instance is
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from discovery.mock import render, zoo
from driver import values
from driver.prepare import ledger, recordfile, store

ROOT = Path(__file__).parents[2]
MACHINE = "dgx-h100-mig"
OURS = "gpu-0000-61-00-0-mig-3g-40gb-9-0"
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\nsharing:\n"


@pytest.fixture(name="rules")
def fixture_rules(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(
        HEAD + "- {match: {numaNode: 0}, mode: mig-static}\n- {mode: mig-dynamic, profiles: [1g.*, 3g.40gb]}\n"
    )
    return file


def nearfield(*arguments: str | Path, **variables: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "driver.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return done.stdout


def listed(*arguments: str | Path, **variables: str | Path) -> Any:
    return json.loads(nearfield("devices", "-o", "json", *arguments, **variables))


def bars(text: str) -> dict[str, str]:
    """GPU -> its row."""
    table = text.partition("MEMORY SLICES")[2]
    return {line.split()[0]: line for line in table.splitlines() if line.startswith("gpu-")}


def origins(document: Any) -> dict[str, str | None]:
    """Device -> whose the instance is, of the GPU where one is ours."""
    (found,) = (gpu for gpu in document["divided"] if gpu["device"] == values.gpu_of(OURS))
    return {entry["device"]: entry.get("origin") for entry in found["instances"]}


@pytest.fixture(name="state")
def fixture_state(tmp_path: Path) -> Path:
    """The state of an agent that replays the machine and has made one of its instances for a claim."""
    folder = tmp_path / "state"
    render.render(zoo.load(MACHINE), folder / "mock")
    ref = values.ClaimRef(uid=values.ClaimUid("uid-1"), namespace="team-a", name="train")
    entry = ledger.Entry(
        claim=ref,
        state=ledger.ClaimState.COMPLETED,
        boot_id="boot-1",
        devices=(ledger.HeldDevice(name=OURS, address="0000:61:00.0", uuid="MIG-1", nodes=("/dev/nvidia3",)),),
        results=(ledger.Result(request="gpu", pool="n1", device=OURS),),
        cdi_ids=((f"gpu.nearfield.dev/claim={ref.uid}-{OURS}",),),
    )
    recordfile.create(folder / store.FILE_NAME, [entry])
    return folder


def test_a_table_and_bars(rules: Path) -> None:
    text = nearfield("devices", "--mock", MACHINE, "--config", rules)
    head, *rows = text.partition("\n\n")[0].splitlines()
    assert head.split()[:4] == ["DEVICE", "PRODUCT", "PROFILE", "MEMORY"]
    assert any(row.startswith("gpu-0000-52-00-0-mig-1g-10gb-19-0 ") and " 9.8 GiB " in row for row in rows)
    assert "gpu-0000-9d-00-0-mig" not in text.partition("MEMORY SLICES")[0]
    shown = bars(text)
    assert "|1g  |1g  |1g  |1g  |1g  |1g  |1g+ |....|" in shown["gpu-0000-52-00-0"]
    assert " 7g.80gb! " in shown["gpu-0000-c3-00-0"]
    assert "places for MIG instances are offered; -o json lists them" in text


def test_every_place_is_listed_for_programs(rules: Path) -> None:
    document = listed("--mock", MACHINE, "--config", rules)
    of = {gpu["device"]: gpu for gpu in document["divided"]}
    assert of["gpu-0000-52-00-0"]["mode"] == "mig-static"
    assert "placeable" not in of["gpu-0000-52-00-0"]
    assert of["gpu-0000-df-00-0"]["placeable"]["3g.40gb"] == 2
    assert "7g.80gb" not in of["gpu-0000-df-00-0"]["placeable"]
    names = {item["name"] for item in document["items"]}
    assert "gpu-0000-df-00-0-mig-3g-40gb-9-4" in names
    assert all(
        entry["device"] in names
        for gpu in document["divided"]
        for entry in gpu["instances"]
        if entry["origin"] == "static"
    )


def test_a_machine_without_mig_has_no_such_list() -> None:
    assert "divided" not in listed("--mock", "dgx-1-v100")
    assert "MEMORY SLICES" not in nearfield("devices", "--mock", "dgx-h100")


def test_the_machine_of_the_agent_beside(tmp_path: Path, state: Path) -> None:
    rules = tmp_path / "dynamic.yaml"
    rules.write_text(HEAD + "- mode: mig-dynamic\n")
    beside: dict[str, str | Path] = {"NEARFIELD_MOCK": MACHINE, "NEARFIELD_STATE_DIR": state, "NEARFIELD_CONFIG": rules}
    document = listed(**beside)
    found = origins(document)
    assert found.pop(OURS) == "ours"
    assert set(found.values()) == {"foreign"}
    assert OURS in {item["name"] for item in document["items"]}
    # What is typed is another machine, of which nobody has anything.
    assert set(origins(listed("--mock", MACHINE, **beside)).values()) == {"foreign"}

    (state / store.FILE_NAME).write_bytes(b"not a record")
    assert set(origins(listed(**beside)).values()) == {None}
