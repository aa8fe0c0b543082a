# SPDX-License-Identifier: Apache-2.0
"""Findings: no repeats, bounds, and a page that explains each code."""

from __future__ import annotations

import re
from pathlib import Path

from discovery import errors, findings, model

PAGE = Path(__file__).parents[3] / "docs/findings.md"


def test_findings_are_bounded_and_say_so() -> None:
    found = findings.Findings()
    for number in range(findings.MAX_FINDINGS + 10):
        found.info("no-gpu", number, "message")
        found.info("no-gpu", number, "message")
    result = found.result()
    assert len(result) == findings.MAX_FINDINGS + 1
    assert result[-1].code == "too-many-findings"


def test_they_are_ordered_whatever_the_order_in_which_they_came() -> None:
    one, other = findings.Findings(), findings.Findings()
    one.info("no-gpu", "a", "message")
    one.failed("b", errors.SourceError("sysfs", "eio", "what"))
    other.failed("b", errors.SourceError("sysfs", "eio", "what"))
    other.info("no-gpu", "a", "message")
    assert one.result() == other.result()
    assert one.result()[1] == model.Finding(
        code="sysfs-eio", severity=model.Severity.WARNING, subject="b", message="what"
    )


def test_every_code_is_explained() -> None:
    explained = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text().partition("\n## ")[0], re.MULTILINE)
    assert explained == sorted(explained)
    assert set(explained) == findings.CODES | {"too-many-findings"}
