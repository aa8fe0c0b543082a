# SPDX-License-Identifier: Apache-2.0
"""The machines by which the cost of a look is measured: they differ in their size alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery.mock import zoo
from hack.bench.parts import sizes


@pytest.mark.parametrize("count", sizes.COUNTS)
def test_a_machine_has_as_many_gpus_as_asked_for(count: int, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(sizes.machine(count), encoding="utf-8")
    machine = zoo.load(str(file))
    assert machine.nvml is not None
    assert len(machine.nvml.gpus) == count
    assert {len(gpu.nvlinks) for gpu in machine.nvml.gpus} == {18}
    functions = [path for path in machine.files if path.startswith("sys/bus/pci/devices/")]
    ports = 1 + 1 + 6  # a root port, the switch's upstream port, six downstream ports
    assert len(functions) == count // 2 * (ports + 6)
