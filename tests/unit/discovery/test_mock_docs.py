# SPDX-License-Identifier: Apache-2.0
"""docs/machines.md says what is true: its example is a machine, its table has every fault."""

from __future__ import annotations

import re
from pathlib import Path

from discovery import document
from discovery.mock import fault, zoo

TEXT = (Path(__file__).parents[3] / "docs/machines.md").read_text(encoding="utf-8")


def test_the_examples_are_machines() -> None:
    described, variant = (
        zoo.parse_machine(document.parse(example.encode(), name="docs/machines.md"))
        for example in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    )
    assert described.nvml is not None
    assert len(described.nvml.gpus) == 2
    assert variant.files.keys() == zoo.load("dgx-h100").files.keys()
    assert [(item.kind, str(item.target)) for item in variant.faults] == [(fault.Kind.GPU_LOST, "0000:61:00.0")]


def test_the_table_of_faults_is_complete() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|", TEXT.partition("\n## Faults\n")[2], re.MULTILINE))
    assert rows.keys() == {kind.value for kind in fault.Kind}
    for kind, rule in fault.RULES.items():
        named = {word.strip() for word in re.split("[,;]", rows[kind])}
        assert named == {name.removesuffix("_c") for name in rule.needs | rule.takes}
