# SPDX-License-Identifier: Apache-2.0
"""The one error of the benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """Something that is measured did not do its work, so its figures would be worthless. The message names it."""
