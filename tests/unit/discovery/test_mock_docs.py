# SPDX-License-Identifier: Apache-2.0
"""docs/machines.md says what is true: its example is a machine, its table has every fault."""

from __future__ import annotations

import re
from pathlib import Path

from discovery import document
from discovery.mock import fault, zoo

TEXT = (Path(__file__).parents[3] / "docs/machines.md").read_text(encoding="utf-8")


def test_the_example_is_a_machine() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    machine = zoo.parse_machine(document.parse(example.encode(), name="docs/machines.md"))
    assert machine.nvml is not None
    assert len(machine.nvml.gpus) == 2


def test_the_table_of_faults_is_complete() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|", TEXT, re.MULTILINE))
    assert rows.keys() == {kind.value for kind in fault.Kind}
    for kind, rule in fault.RULES.items():
        named = {word.strip() for word in re.split("[,;]", rows[kind])}
        assert named == {name.removesuffix("_c") for name in rule.needs | rule.takes}
