# SPDX-License-Identifier: Apache-2.0
"""A page of metrics, read by prometheus_client's own parser, as Prometheus would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import parser


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Samples:
    """All of the page."""

    lines: tuple[Sample, ...]

    def matching(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The series of a name that carry these labels, perhaps with more. A trailing `_` makes a label of a keyword."""
        wanted = {key.rstrip("_"): value for key, value in labels.items()}
        return tuple(line for line in self.lines if line.name == name and wanted.items() <= line.labels.items())

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series that match; 0 where there is none."""
        return sum(line.value for line in self.matching(name, **labels))

    def one(self, name: str, **labels: str) -> float:
        """The value of the one series that matches."""
        found = self.matching(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {len(found)} series"
        return found[0].value


def parse(text: str, *, only: str = "") -> Samples:
    """The samples of a page, or of the families whose names begin with `only`: pages of Kubernetes are long, and the parser is
    not quick. Raises ValueError where it is not in Prometheus' format.
    """
    if only:
        starts = (only, f"# TYPE {only}", f"# HELP {only}")
        text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(starts))
    families: Iterable[object] = parser.text_string_to_metric_families(text)
    return Samples(
        tuple(
            Sample(sample.name, sample.labels, sample.value)
            for family in families
            for sample in family.samples  # type: ignore[attr-defined]
        )
    )
