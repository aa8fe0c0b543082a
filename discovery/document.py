# SPDX-License-Identifier: Apache-2.0
"""Reading YAML that people write: strictly, with the line of every key, and without the traps of YAML 1.1.

What is read is the part of YAML that JSON can say: mappings with text keys, lists, text, numbers, true, false, null. Aliases,
anchors, tags, duplicate keys, several documents and anything too large or too deep are refused, so no document can grow
while it is read. Plain scalars follow the core schema of YAML 1.2.2 (section 10.3.2): under 1.1 an unquoted PCI address
such as 0000:18:00.0 would be the base-60 number 1080.
"""

from __future__ import annotations

import math
import os
import re
import select
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml

from discovery.errors import DocumentError

MAX_BYTES = 1 << 20
"""No document that a person writes is larger; the reader takes seconds for a megabyte."""

MAX_DEPTH = 64
MAX_PROBLEMS = 20
"""More problems than this in one document are counted, not listed."""

PATIENCE_S = 30.0
"""How long a pipe may say nothing before it is given up: a program that writes into it may ask a server first."""

Place = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it: the same events, eight times faster."""

_NOT_PRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What YAML 1.2.2 (section 5.1) lets nobody write but as an escape."""

_EXPECTED = {
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""pydantic's error types, in the words of a document."""

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document: its value, as `json.loads` would give it, and the line of each of its parts, counted from 1."""

    name: str
    value: object
    lines: Mapping[Place, int]

    def line(self, place: Sequence[str | int]) -> int:
        """The line of a place, or of the nearest part around it that stands in the document."""
        at = tuple(place)
        while at not in self.lines:
            at = at[:-1]
        return self.lines[at]

    def where(self, place: Sequence[str | int]) -> str:
        """`name:line: a.b[0]`, for the beginning of a message."""
        spelt = _spell(place)
        return f"{self.name}:{self.line(place)}" + (f": {spelt}" if spelt else "")

    def explain(self, problems: Iterable[Mapping[str, Any]], *, model: Any = None) -> str:
        """The errors of a pydantic ValidationError (`.errors()`), one a line, each with its place.

        `model`: the model that the document was held against, to name the key that was meant.
        """
        return listed(self.name, [self._line_of(problem, model) for problem in problems])

    def _line_of(self, problem: Mapping[str, Any], model: Any) -> str:
        place: Place = tuple(problem["loc"])
        if problem["type"] == "extra_forbidden":
            keys = sorted(_keys(model, place[:-1]))
            close = get_close_matches(str(place[-1]), keys, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(keys)}" if keys else ""
            return f"{self.where(place)}: unknown key{hint}"
        if problem["type"] == "missing":
            return f"{self.where(place)}: missing"
        message = _EXPECTED.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")
        message = message.replace("Input should be", "must be")
        given = problem.get("input")
        if problem["type"] != "value_error" and (given is None or isinstance(given, str | int | float)):
            message += f", not {_shown(given)}"
        return f"{self.where(place)}: {message}"


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> Document:
    """The document in a file. DocumentError that names the file, the line and what to change."""
    return parse(read_bytes(path, max_bytes=max_bytes), name=str(path), max_bytes=max_bytes)


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES, patience_s: float = PATIENCE_S) -> bytes:
    """What is in a file, and one byte more than `max_bytes` where it is larger. DocumentError that names the file.

    It may be a pipe, such as a shell's `<(command)`: its end is waited for, unless nothing comes from it for `patience_s`.
    """
    content = bytearray()
    try:
        # A FIFO that nobody writes into would hold us in open().
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            watched = select.poll()
            watched.register(file, select.POLLIN)
            while len(content) <= max_bytes:
                if not watched.poll(patience_s * 1000):
                    raise DocumentError(
                        f"{path}: nothing came from it for {patience_s:g} s: start what writes into this pipe, or name a file"
                    )
                part = os.read(file, max_bytes + 1 - len(content))
                if not part:
                    break
                content += part
        finally:
            os.close(file)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise DocumentError(f"{path}: cannot be read: {reason}") from err
    return bytes(content)


def listed(name: str, problems: Sequence[str]) -> str:
    """The problems of a document, one a line; those beyond MAX_PROBLEMS are counted."""
    more = len(problems) - MAX_PROBLEMS
    return "\n".join((*problems[:MAX_PROBLEMS], *([f"{name}: and {more} more problems"] if more > 0 else [])))


def parse(data: bytes, *, name: str, max_bytes: int = MAX_BYTES) -> Document:
    """The document in some bytes. DocumentError that names the document, the line and what to change."""
    if len(data) > max_bytes:
        raise DocumentError(f"{name}: larger than {max_bytes} bytes, which no such document is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise DocumentError(f"{name}:{line}: not UTF-8 (byte {err.start})") from err
    if control := _NOT_PRINTABLE.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise DocumentError(f"{name}:{line}: not YAML: the character {control.group()!a} is not allowed")
    builder = _Builder(name)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        line = mark.line + 1 if mark else 1
        raise DocumentError(f"{name}:{line}: not YAML: {err.problem or err.context}") from err
    except yaml.YAMLError as err:
        raise DocumentError(f"{name}:1: not YAML: {err}") from err
    return Document(name=name, value=builder.value, lines=builder.lines)


class _Builder:
    """Builds the value from the parser's events, with a stack of its own instead of recursion."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.value: object = None
        self.lines: dict[Place, int] = {(): 1}
        self._documents = 0
        self._open: list[tuple[Place, dict[str, object] | list[object]]] = []
        self._key: list[str | None] = []

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 1
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._refused(line, "a second document begins; exactly one is expected")
            case yaml.AliasEvent():
                raise self._refused(line, f"aliases (*{event.anchor}) are not accepted; write the value out")
            case yaml.ScalarEvent():
                self._check(event, line)
                self._scalar(event, line)
            case yaml.MappingStartEvent():
                self._check(event, line)
                self._begin({}, line)
            case yaml.SequenceStartEvent():
                self._check(event, line)
                self._begin([], line)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._open.pop()
                self._key.pop()
            case _:
                pass

    def _check(self, event: yaml.NodeEvent, line: int) -> None:
        if event.anchor is not None:
            raise self._refused(
                line, f"anchors (&{event.anchor}) are not accepted; write the value out where it is used"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._refused(line, f"tags ({tag}) are not accepted")

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        try:
            # JSON writes what is beyond the basic plane as two escapes, which YAML leaves apart.
            text = event.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as err:
            raise self._refused(line, "half of a surrogate pair is no character") from err
        if self._open and isinstance(self._open[-1][1], dict) and self._key[-1] is None:
            self._take_key(text, line)
        else:
            self._place(text if event.style else _resolve(text), line)

    def _take_key(self, key: str, line: int) -> None:
        place, mapping = self._open[-1]
        if key in mapping:
            first = self.lines[(*place, key)]
            raise self._refused(line, f"{_spell((*place, key))}: duplicate key, already on line {first}")
        self._key[-1] = key
        self.lines[(*place, key)] = line

    def _begin(self, container: dict[str, object] | list[object], line: int) -> None:
        if self._open and isinstance(self._open[-1][1], dict) and self._key[-1] is None:
            raise self._refused(line, "a key must be text, not a mapping or a list")
        if len(self._open) >= MAX_DEPTH:
            raise self._refused(line, f"nested deeper than {MAX_DEPTH} levels")
        place = self._place(container, line)
        self._open.append((place, container))
        self._key.append(None)

    def _place(self, value: object, line: int) -> Place:
        if not self._open:
            self.value = value
            self.lines[()] = line
            return ()
        around, container = self._open[-1]
        if isinstance(container, list):
            place: Place = (*around, len(container))
            container.append(value)
            self.lines[place] = line
            return place
        key = self._key[-1]
        assert key is not None
        container[key] = value
        self._key[-1] = None
        return (*around, key)

    def _refused(self, line: int, what: str) -> DocumentError:
        return DocumentError(f"{self._name}:{line}: {what}")


def _resolve(text: str) -> object:
    if text in _NULL:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def _keys(model: Any, place: Place) -> list[str]:
    """The keys that a pydantic model has at a place; none without a model."""
    for part in place:
        field = next((field for name, field in _fields(model).items() if part == (field.alias or name)), None)
        if field is not None:  # else an index or a key of a mapping, whose entries are of the type found already
            model = _model_in(field.annotation) or model
    return [field.alias or name for name, field in _fields(model).items()]


def _fields(model: Any) -> Mapping[str, Any]:
    return getattr(model, "model_fields", {})


def _model_in(annotation: Any) -> Any:
    """The model that an annotation is or holds (optional, in a list, in a mapping)."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _spell(place: Sequence[str | int]) -> str:
    spelt = ""
    for part in place:
        spelt += f"[{part}]" if isinstance(part, int) else f".{_clean(part)}" if spelt else _clean(part)
    return spelt


def _clean(key: str) -> str:
    return key if key.isprintable() and len(key) <= 60 else _shown(key)


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= 60 else f"{value[:60]}...")
        case _:
            return str(value)
