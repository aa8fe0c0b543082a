# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a program is looked for or installed."""

from __future__ import annotations


class ToolError(Exception):
    """A program is not there and cannot be had; the message says what to do."""
