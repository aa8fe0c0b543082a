# SPDX-License-Identifier: Apache-2.0
"""The version is the same wherever it stands."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from driver.version import VERSION

ROOT = Path(__file__).parents[4]


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == importlib.metadata.version("nearfield") == VERSION
