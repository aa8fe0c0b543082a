# SPDX-License-Identifier: Apache-2.0
"""Machines that are made up for the judge: valid, the same for the same seed, and of many shapes."""

from __future__ import annotations

from pathlib import Path

from discovery.mock import recording, zoo
from hack.judges import made_up


def test_every_seed_is_a_machine_and_always_the_same(tmp_path: Path) -> None:
    depths = set()
    for seed in range(8):
        file = tmp_path / f"{seed}.yaml"
        file.write_text(made_up.document(seed), encoding="utf-8")
        assert file.read_text(encoding="utf-8") == made_up.document(seed)
        functions = [
            entry.target for path, entry in zoo.load(str(file)).files.items()
            if path.startswith("sys/bus/pci/devices/") and isinstance(entry, recording.Link)
        ]  # fmt: skip
        depths |= {target.split("/devices/")[1].count("/") for target in functions}
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= depths
