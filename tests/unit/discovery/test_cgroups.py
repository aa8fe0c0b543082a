# SPDX-License-Identifier: Apache-2.0
"""Which version of cgroups there is, and who counts the GPU memory in them, by made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import cgroups, findings, model, sysfs

V2 = {"sys/fs/cgroup/cgroup.controllers": "cpu memory misc\n"}
DMEM = {"sys/fs/cgroup/cgroup.controllers": "cpu memory dmem\n"}
CAPACITY = {
    "sys/fs/cgroup/dmem.capacity": "drm/0000:03:00.0/vram0 8589934592\nnvidia/0000:1b:00.0/vidmem 85899345920\n"
}
NEW = "615.10.01"


def _tree(root: Path, *parts: dict[str, str]) -> sysfs.Sysfs:
    for part in parts:
        for path, text in part.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return sysfs.Sysfs(sys=root / "sys", proc=root / "proc")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), None),
        (("cgroup.controllers",), 2),
        (("memory/tasks", "cpu,cpuacct/tasks"), 1),
        (("memory/tasks", "unified/cgroup.controllers"), 1),
        (("something/else",), None),
    ],
)
def test_the_version(tmp_path: Path, names: tuple[str, ...], expected: int | None) -> None:
    files = _tree(tmp_path, {f"sys/fs/cgroup/{name}": "" for name in names})
    found = findings.Findings()
    assert cgroups.version(files, found) == expected
    assert not found.result()


def _params(words: str) -> dict[str, str]:
    return {"proc/driver/nvidia/params": f'ModifyDeviceFiles: 1\nRegistryDwords: "{words}"\nRmMsg: ""\n'}


@pytest.mark.parametrize(
    ("parts", "driver", "expected"),
    [
        ((V2,), NEW, "misc"),
        ((DMEM, CAPACITY), NEW, "dmem"),
        ((DMEM,), NEW, "dmem"),  # not the root of the hierarchy: only that shows what is counted
        ((DMEM, {"sys/fs/cgroup/dmem.capacity": "drm/0000:03:00.0/vram0 1\n"}), NEW, "misc"),
        ((V2,), "580.95.05", None),
        ((V2,), None, None),
        ((V2,), "nonsense", None),
        ((), NEW, None),
        (({"sys/fs/cgroup/memory/tasks": ""},), NEW, None),
        ((DMEM, CAPACITY, _params("RmMemacctMode=1")), NEW, "misc"),
        ((DMEM, CAPACITY, _params("Other=3;RmMemacctMode=0x2")), NEW, "dmem"),
        ((DMEM, CAPACITY, _params("RmMemacctMode=0")), NEW, None),
        ((DMEM, CAPACITY, _params("XRmMemacctMode=0")), NEW, "dmem"),
        ((DMEM, CAPACITY, _params("RmMemacctMode=3")), NEW, "dmem"),
    ],
)
def test_who_counts(
    tmp_path: Path, parts: tuple[dict[str, str], ...], driver: str | None, expected: str | None
) -> None:
    found = findings.Findings()
    told = cgroups.accounting(_tree(tmp_path, *parts), driver, found)
    assert told == (None if expected is None else model.MemoryAccounting(expected))
    assert not found.result()
