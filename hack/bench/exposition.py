# SPDX-License-Identifier: Apache-2.0
"""Sums values in the text that components show on /metrics. Pure."""

from __future__ import annotations

from prometheus_client import parser


def total(text: str, sample: str, **labels: str) -> float:
    """The sum of all samples of this name that have these labels, whatever others they have; 0 where there is none."""
    # The parser keeps no more than a family in memory, but the text of an API server takes it seconds.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(sample))
    return sum(
        found.value
        for family in parser.text_string_to_metric_families(lines + "\n")
        for found in family.samples
        if found.name == sample and labels.items() <= found.labels.items()
    )
