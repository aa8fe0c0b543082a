# SPDX-License-Identifier: Apache-2.0
"""The version of Nearfield, where reading it costs nothing. `pyproject.toml` says the same; a test compares."""

from __future__ import annotations

VERSION = "0.1.0"
