# SPDX-License-Identifier: Apache-2.0
"""Writing answers.

- plain tables: columns fit their content, nothing is cut, no trailing blanks, no escape sequences
- on a terminal: the whole width of the content, however narrow the terminal
- control characters from outside are shown, not obeyed
- JSON and YAML hold the same value; YAML quotes what a YAML 1.1 reader would take for something else
- findings: worst first
"""

from __future__ import annotations

import io
import json
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from discovery import model
from driver.cli import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_table(("NAME", "X"), [("a", "1"), ("longer than the head", "")])
    assert capsys.readouterr().out == "NAME                  X\na                     1\nlonger than the head\n"


def test_a_plain_table_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_table(("NAME", "X"), [])
    assert capsys.readouterr().out == "NAME  X\n"


def test_a_terminal_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    cells = [f"cell{number:02}" for number in range(40)]
    output.write_table([f"HEAD{number:02}" for number in range(40)], [cells])
    head, row = terminal.getvalue().splitlines()
    assert row.split() == cells
    assert "\x1b[1m" in head
    assert "HEAD39" in head


@pytest.mark.parametrize("terminal", [io.StringIO, Terminal])
def test_text_from_outside_is_shown_not_obeyed(monkeypatch: pytest.MonkeyPatch, terminal: type[io.StringIO]) -> None:
    stdout = terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    output.write_table(("X",), [("\x1b]0;title\x07\x9b2J [bold]x[/bold] :smile:\n",)])
    output.write_line("a\rb")
    text = stdout.getvalue()
    assert r"\x1b]0;title\x07\x9b2J [bold]x[/bold] :smile:\n" in text
    assert r"a\rb" in text


def test_findings_are_listed_worst_first(capsys: pytest.CaptureFixture[str]) -> None:
    severities = (model.Severity.INFO, model.Severity.ERROR, model.Severity.WARNING)
    output.write_findings(
        [model.Finding(code=f"c-{level}", severity=level, subject="s", message="m") for level in severities]
    )
    assert capsys.readouterr().out == (
        "\nFindings:\n  error:   s: m (c-error)\n  warning: s: m (c-warning)\n  info:    s: m (c-info)\n"
    )


def test_no_findings_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_findings([])
    assert capsys.readouterr().out == ""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_json_and_yaml_hold_the_same_value(value: object) -> None:
    for form, read in ((output.Format.JSON, json.loads), (output.Format.YAML, yaml.safe_load)):
        stream = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            output.write_document(value, form)
        assert read(stream.getvalue()) == value


@pytest.mark.parametrize(
    "text",
    [
        "1e3",
        "12e5",
        "0x1f",
        "0o7",
        "y",
        "n",
        "no",
        "On",
        "null",
        "~",
        "1_000",
        "0000:18:00.0",
        "2026-01-01",
        "=",
        "<<",
        ".5",
        "+1",
        "",
    ],
)
def test_yaml_quotes_what_some_reader_would_take_for_something_else(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_document({"k": text}, output.Format.YAML)
    assert capsys.readouterr().out in (f'k: "{text}"\n', f"k: '{text}'\n")


def test_a_stream_has_a_document_start_before_each(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_stream([{"a": 1}, {"b": 2}])
    text = capsys.readouterr().out
    assert text == "---\na: 1\n---\nb: 2\n"
    assert list(yaml.safe_load_all(text)) == [{"a": 1}, {"b": 2}]


def test_an_empty_stream_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_stream([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("amount", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (85899345920, "80.0 GiB"), (2**45, "32.0 TiB")],
)
def test_sizes(amount: int | None, text: str) -> None:
    assert output.size(amount) == text
