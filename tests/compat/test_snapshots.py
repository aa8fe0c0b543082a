# SPDX-License-Identifier: Apache-2.0
"""Snapshots written by earlier versions can be read for ever. A file here is never changed; a new schema adds one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discovery import check, codec, limits, model

WRITTEN = sorted((Path(__file__).parent / "snapshots").glob("*.json"))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_a_snapshot_of_an_earlier_version_is_read(path: Path) -> None:
    snapshot = codec.from_json(json.loads(path.read_text()))
    assert check.violations(snapshot) == ()
    assert snapshot.gpus
    assert all(gpu.state is model.GpuState.READY and gpu.uuid and gpu.nic for gpu in snapshot.gpus)
    assert codec.from_json(codec.to_json(snapshot)) == snapshot


def test_what_limits_memory_is_read() -> None:
    path = next(path for path in WRITTEN if path.stem == "v1-l40s-8-shares")
    snapshot = codec.from_json(json.loads(path.read_text()))
    assert (snapshot.host.cgroup, snapshot.host.memory_accounting) == (2, model.MemoryAccounting.DMEM)
    assert {(gpu.memory_limits, gpu.compute_mode) for gpu in snapshot.gpus} == {(True, limits.ComputeMode.DEFAULT)}


def test_there_is_one_of_every_schema() -> None:
    versions = {json.loads(path.read_text())["schemaVersion"] for path in WRITTEN}
    assert versions == set(range(1, model.SNAPSHOT_VERSION + 1))
