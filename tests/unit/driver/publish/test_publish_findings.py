# SPDX-License-Identifier: Apache-2.0
"""The page of Findings explains each code that publishing has, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_every_code_is_explained() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "driver/publish").glob("*.py"))
    codes = re.findall(r'finding\(\s*"([a-z-]+)"', sources)
    section = (ROOT / "docs/findings.md").read_text(encoding="utf-8").partition("## About publishing")[2]
    section = section.partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == sorted(codes) != []
