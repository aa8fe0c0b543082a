# SPDX-License-Identifier: Apache-2.0
"""The page of Findings explains each code that sharing and the configuration have, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_every_code_is_explained() -> None:
    sources = [*(ROOT / "driver/sharing").glob("*.py"), ROOT / "driver/app/following.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    codes = re.findall(r'(?:finding\(\s*|code=|\()"((?:mig|sharing|sharers|config)-[a-z-]+)"', text)
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    section = page.partition("## About sharing and the configuration")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == sorted(set(codes)) != []
