# SPDX-License-Identifier: Apache-2.0
"""The report of the benchmark.

- JSON: summaries beside the values, targets with their verdict, what was left out and why; it survives `json`
- Markdown: a row a target, with its verdict
- table: numbers in columns, every target with its verdict, nothing for an empty part
"""

from __future__ import annotations

import json

import pytest

from hack.bench import report

SERIES = report.Series(
    name="prepare, 100 prepared", subject="agent", unit=report.Unit.MILLISECONDS, values=(2.0, 1.0, 4.0)
)
MET = report.Figure(what="prepare against its floor", limit=1.3, unit=report.Unit.RATIO, measured=1.21)
MISSED = report.Figure(what="memory at start", limit=100, unit=report.Unit.MEGABYTES, measured=101.5)
NOT_MEASURED = report.Figure(
    what="prepare, of the Go driver", limit=0.8, unit=report.Unit.RATIO, measured=None, note="no Go here"
)
REPORT = report.Report(
    started="2026-01-02T03:04:05Z",
    machine={"cores": 2, "kernel": "6.1"},
    options={"rounds": 3},
    parts=(
        report.Part(name="prepare", series=(SERIES,), figures=(MET, NOT_MEASURED), left_out=("the peer: no Go here",)),
        report.Part(name="memory", figures=(MISSED,)),
    ),
)


@pytest.mark.parametrize(("figure", "met"), [(MET, True), (MISSED, False), (NOT_MEASURED, None)])
def test_verdict(figure: report.Figure, *, met: bool | None) -> None:
    assert figure.met is met


def test_a_limit_is_met_when_reached() -> None:
    assert report.Figure(what="writes", limit=0, unit=report.Unit.COUNT, measured=0).met is True


def test_ratio_names_both_sides() -> None:
    assert report.ratio("prepare", "agent/floor", [4.0, 9.0], [2.0, 3.0]) == report.Series(
        name="prepare", subject="agent/floor", unit=report.Unit.RATIO, values=(2.0, 3.0)
    )


def test_json() -> None:
    document = json.loads(json.dumps(report.to_json(REPORT)))
    assert document["apiVersion"] == "bench.nearfield.dev/v1alpha1"
    assert document["kind"] == "BenchReport"
    assert document["machine"] == {"cores": 2, "kernel": "6.1"}
    assert document["parts"][0] == {
        "name": "prepare",
        "series": [
            {
                "name": "prepare, 100 prepared",
                "subject": "agent",
                "unit": "ms",
                "n": 3,
                "min": 1.0,
                "p50": 2.0,
                "p99": 4.0,
                "max": 4.0,
                "values": [2.0, 1.0, 4.0],
            }
        ],
        "figures": [
            {"what": "prepare against its floor", "limit": 1.3, "unit": "x", "measured": 1.21, "met": True, "note": ""},
            {
                "what": "prepare, of the Go driver",
                "limit": 0.8,
                "unit": "x",
                "measured": None,
                "met": None,
                "note": "no Go here",
            },
        ],
        "leftOut": ["the peer: no Go here"],
    }


def test_table() -> None:
    assert report.to_table(REPORT).splitlines() == [
        "cores: 2",
        "kernel: 6.1",
        "",
        "== prepare",
        "left out: the peer: no Go here",
        "what                   who    unit  n  min  p50  p99  max",
        "prepare, 100 prepared  agent  ms    3    1    2    4    4",
        "",
        "== memory",
        "",
        "== targets",
        "target                     at most  measured  unit                note",
        "prepare against its floor     1.30      1.21  x     met",
        "prepare, of the Go driver     0.80         -  x     not measured  no Go here",
        "memory at start                100       102  MB    MISSED",
    ]


def test_a_report_without_parts_is_its_machine() -> None:
    assert report.to_table(report.Report(started="", machine={"cores": 2}, options={})) == "cores: 2\n"


def test_markdown() -> None:
    assert report.to_markdown(REPORT).splitlines() == [
        "| what | at most | measured | |",
        "|---|---|---|---|",
        "| prepare against its floor | 1.30 x | 1.21 x | met |",
        "| prepare, of the Go driver | 0.80 x | - | not measured |",
        "| memory at start | 100 MB | 102 MB | **missed** |",
    ]
