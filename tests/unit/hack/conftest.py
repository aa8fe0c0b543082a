# SPDX-License-Identifier: Apache-2.0
"""What tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.programs import Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """The folder in which programs are looked for first."""
    found = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:/usr/bin:/bin")
    return found
