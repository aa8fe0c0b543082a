# SPDX-License-Identifier: Apache-2.0
"""Capability files of MIG: which instances there are, which devices they have, and files that are odd or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import capabilities, findings, mig
from tests.fakes import pcitree

FOLDER = "proc/driver/nvidia/capabilities/gpu2/mig"
DEVICES = "Character devices:\n  1 mem\n195 nvidia\n236 nvidia-caps-imex-channels\n237 nvidia-caps\n\nBlock devices:\n  8 sd\n"
INSTANCE = mig.MigInstance(
    gpu_instance=9, profile_id=19, placement=mig.MigPlacement(start=2, size=1), compute_instance=0, uuid="MIG-1"
)


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    tree = pcitree.Tree(tmp_path)
    tree.write("proc/devices", DEVICES)
    tree.write(f"{FOLDER}/gi9/access", "DeviceFileMinor: 84\nDeviceFileMode: 292\nDeviceFileModify: 1")
    tree.write(f"{FOLDER}/gi9/ci0/access", "DeviceFileMinor: 85\nDeviceFileMode: 292\nDeviceFileModify: 1")
    return tree


def nodes(tree: pcitree.Tree, instance: mig.MigInstance = INSTANCE) -> tuple[tuple[mig.CapabilityNode, ...], list[str]]:
    found = findings.Findings()
    told = capabilities.nodes(tree.files(), 2, instance, found, subject="0000:1b:00.0")
    return told, [finding.code for finding in found.result()]


def test_an_instance_has_two_devices(tree: pcitree.Tree) -> None:
    assert nodes(tree) == (
        (
            mig.CapabilityNode(path="/dev/nvidia-caps/nvidia-cap84", major=237, minor=84),
            mig.CapabilityNode(path="/dev/nvidia-caps/nvidia-cap85", major=237, minor=85),
        ),
        [],
    )


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (f"{FOLDER}/gi9/access", None),
        (f"{FOLDER}/gi9/ci0/access", None),
        (f"{FOLDER}/gi9/ci0/access", ""),
        (f"{FOLDER}/gi9/ci0/access", "DeviceFileMinor: many"),
        (f"{FOLDER}/gi9/ci0/access", "DeviceFileMinor: 99999999"),
        (f"{FOLDER}/gi9/ci0/access", "DeviceFileMode: 85"),
        ("proc/devices", None),
        ("proc/devices", "Character devices:\n236 nvidia-caps-imex-channels\n"),
        ("proc/devices", "Character devices:\n\nBlock devices:\n237 nvidia-caps\n"),
    ],
)
def test_half_a_right_is_none(tree: pcitree.Tree, tmp_path: Path, path: str, content: str | None) -> None:
    if content is None:
        (tmp_path / path).unlink()
    else:
        tree.write(path, content)
    assert nodes(tree) == ((), ["mig-capability-missing"])


def test_instances_are_told_by_their_folders(tree: pcitree.Tree) -> None:
    tree.write(f"{FOLDER}/gi11/access", "DeviceFileMinor: 102")
    for odd in ("gi", "gix", "gi01", "gi7x", "config"):
        tree.write(f"{FOLDER}/{odd}/access", "")
    found = findings.Findings()
    assert capabilities.instances(tree.files(), 2, found) == {9: (0,), 11: ()}
    assert capabilities.instances(tree.files(), 3, found) == {}
    assert found.result() == ()
