# SPDX-License-Identifier: Apache-2.0
"""What a run found, as JSON for programs and as a table for people. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hack.bench import stats

API_VERSION = "bench.nearfield.dev/v1alpha1"


class Unit(StrEnum):
    """Units of series. Ratios have none."""

    MILLISECONDS = "ms"
    MEGABYTES = "MB"
    PERCENT_OF_A_CORE = "% of a core"
    PER_SECOND = "1/s"
    COUNT = "count"
    RATIO = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One measured quantity. `name` says what was done, `subject` to whom (agent, peer, floor)."""

    name: str
    subject: str
    unit: Unit
    values: tuple[float, ...]

    @property
    def summary(self) -> stats.Summary:
        """n, min, median, p99 and max of the values."""
        return stats.summarize(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A target and what was measured for it. `limit` is the most that meets the target. `measured` is None where this run
    could not measure it, and `note` then says why.
    """

    what: str
    limit: float
    unit: Unit
    measured: float | None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None when it was not measured."""
        return None if self.measured is None else self.measured <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The findings of one part of the benchmark. `left_out`: what it could not do, and why."""

    name: str
    series: tuple[Series, ...] = ()
    figures: tuple[Figure, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run. `machine` and `options` are what a reader needs to judge and repeat it."""

    started: str
    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    parts: tuple[Part, ...] = field(default=())


def milliseconds(name: str, subject: str, seconds: Iterable[float]) -> Series:
    """The series of what was measured in seconds."""
    return Series(name=name, subject=subject, unit=Unit.MILLISECONDS, values=tuple(value * 1000 for value in seconds))


def ratio(name: str, subject: str, values: Sequence[float], bases: Sequence[float]) -> Series:
    """The series of paired ratios; `subject` names both, as in `agent/floor`."""
    return Series(name=name, subject=subject, unit=Unit.RATIO, values=stats.paired_ratios(values, bases))


def to_json(report: Report) -> dict[str, Any]:
    """The JSON document of a run: the values themselves are in it, so that other statistics can be made of them."""
    return {
        "apiVersion": API_VERSION,
        "kind": "BenchReport",
        "started": report.started,
        "machine": dict(report.machine),
        "options": dict(report.options),
        "parts": [_part_json(part) for part in report.parts],
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "series": [
            {
                "name": series.name,
                "subject": series.subject,
                "unit": series.unit.value,
                **{key: round(value, 4) for key, value in dataclasses.asdict(series.summary).items()},
                "values": [round(value, 4) for value in series.values],
            }
            for series in part.series
        ],
        "figures": [
            {
                "what": figure.what,
                "limit": figure.limit,
                "unit": figure.unit.value,
                "measured": None if figure.measured is None else round(figure.measured, 4),
                "met": figure.met,
                "note": figure.note,
            }
            for figure in part.figures
        ],
        "leftOut": list(part.left_out),
    }


def to_table(report: Report) -> str:
    """The same for people. Targets come last, where a terminal shows them."""
    lines = [f"{key}: {value}" for key, value in report.machine.items()]
    for part in report.parts:
        lines += ["", f"== {part.name}"]
        lines += [f"left out: {text}" for text in part.left_out]
        lines += _columns(
            ("what", "who", "unit", "n", "min", "p50", "p99", "max"),
            (
                (series.name, series.subject, series.unit.value, str(s.n), *map(_number, (s.min, s.p50, s.p99, s.max)))
                for series in part.series
                for s in (series.summary,)
            ),
        )
    figures = [figure for part in report.parts for figure in part.figures]
    if figures:
        lines += ["", "== targets"]
        lines += _columns(
            ("target", "at most", "measured", "unit", "", "note"),
            (
                (
                    figure.what,
                    _number(figure.limit),
                    "-" if figure.measured is None else _number(figure.measured),
                    figure.unit.value,
                    {True: "met", False: "MISSED", None: "not measured"}[figure.met],
                    figure.note,
                )
                for figure in figures
            ),
        )
    return "\n".join(lines) + "\n"


def to_markdown(report: Report) -> str:
    """The targets as a table of a document."""
    lines = ["| what | at most | measured | |", "|---|---|---|---|"]
    for figure in (figure for part in report.parts for figure in part.figures):
        unit = "" if figure.unit is Unit.COUNT else f" {figure.unit.value}"
        measured = "-" if figure.measured is None else f"{_number(figure.measured)}{unit}"
        verdict = {True: "met", False: "**missed**", None: "not measured"}[figure.met]
        lines.append(f"| {figure.what} | {_number(figure.limit)}{unit} | {measured} | {verdict} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Two or three digits that matter, without an exponent."""
    magnitude = abs(value)
    if value == int(value) and magnitude < 1e6:
        return str(int(value))
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 0.1 else f"{value:.4f}"


def _columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows under their head, numbers to the right. No rows, no head."""
    table = list(rows)
    if not table:
        return []
    table.insert(0, head)
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    numeric = [all(_is_number(row[column]) for row in table[1:]) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in table
    ]


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).lstrip("-").isdigit()
