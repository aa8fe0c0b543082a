# SPDX-License-Identifier: Apache-2.0
"""Writing answers: tables for people, JSON and YAML for programs. The only importer of rich.

A table is never cut: on a terminal it is drawn by rich at its full width, anywhere else it is plain text in columns.
What comes from hardware or from a file is shown with its control characters escaped.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import click

from discovery import model
from driver.cli import parameters

API_VERSION = "output.nearfield.dev/v1alpha1"
"""Version of the documents that verbs write with -o json and -o yaml (docs/output.md)."""

MISSING = "-"
"""Stands in a table for what is unknown or not there."""

Command = TypeVar("Command", bound=Callable[..., Any])

_SEVERITY_STYLES = {model.Severity.ERROR: "bold red", model.Severity.WARNING: "yellow", model.Severity.INFO: "cyan"}
_PLAIN_YAML = re.compile(r"(?![yYnN]$)[A-Za-z/][A-Za-z0-9_./ -]*")


class Format(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NCCL_XML = "nccl-xml"
    """A NCCL topology; of a machine only."""


USUAL = (Format.TABLE, Format.JSON, Format.YAML)


def option(
    default: Format | None = Format.TABLE,
    *,
    formats: Sequence[Format] = USUAL,
    help_text: str = "A table for people, JSON or YAML for programs.",
) -> Callable[[Command], Command]:
    """The option -o of a verb, passed on as `output_format`."""

    def parse(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> Format | None:
        return None if value is None else Format(value)

    return click.option(
        "-o",
        "--output",
        "output_format",
        cls=parameters.Option,
        envvar="NEARFIELD_OUTPUT",
        show_envvar=True,
        type=click.Choice([form.value for form in formats]),
        default=default.value if default is not None else None,
        show_default=default is not None,
        callback=parse,
        help=help_text,
    )


def document(kind: str, content: Mapping[str, object]) -> dict[str, object]:
    """A document of ours."""
    return {"apiVersion": API_VERSION, "kind": kind, **content}


def items(kind: str, entries: Iterable[object], *, api_version: str = API_VERSION) -> dict[str, object]:
    """A list of things."""
    return {"apiVersion": api_version, "kind": kind, "items": list(entries)}


def write_document(value: object, form: Format) -> None:
    """Write one document as JSON or YAML."""
    if form is Format.YAML:
        sys.stdout.write(_yaml([value], stream=False))
    else:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_stream(values: Sequence[object]) -> None:
    """Write several YAML documents, as `kubectl create -f -` takes them."""
    sys.stdout.write(_yaml(values, stream=True))


def write_text(text: str) -> None:
    """Write a text of another program's form as it is."""
    sys.stdout.write(text)


def write_line(text: str = "") -> None:
    """Write one line for people."""
    sys.stdout.write(clean(text) + "\n")


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table for people."""
    shown = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw_table(columns, shown)
        return
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    for row in (columns, *shown):
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def write_findings(findings: Sequence[model.Finding]) -> None:
    """Write what was odd, worst first, below a table."""
    if not findings:
        return
    order = list(_SEVERITY_STYLES)
    write_line()
    write_line("Findings:")
    for finding in sorted(findings, key=lambda finding: order.index(finding.severity)):
        head = f"{finding.severity}:"
        text = f"{finding.subject}: {finding.message} ({finding.code})"
        if sys.stdout.isatty():
            _draw_text(f"  {head:<8} ", _SEVERITY_STYLES[finding.severity], clean(text))
        else:
            write_line(f"  {head:<8} {text}")


def clean(text: str) -> str:
    """A text without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size(amount: int | None) -> str:
    """A size in bytes, for people, in the largest binary unit that leaves at least 1."""
    if amount is None:
        return MISSING
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _yaml(values: Sequence[object], *, stream: bool) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes every text that any reader of YAML might take for a number, a date or a switch."""

        def ignore_aliases(self, _data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None if _PLAIN_YAML.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump_all(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**16, explicit_start=stream)


def _console(width: int | None = None) -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _draw_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(Text(column), no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # The width of the content, not of the terminal: a long line wraps there, a cut one is lost.
    wide = _console(width=2**16)
    _console(width=Measurement.get(wide, wide.options, table).maximum).print(table)


def _draw_text(head: str, style: str, text: str) -> None:
    from rich.text import Text

    _console().print(Text.assemble((head, style), text))
