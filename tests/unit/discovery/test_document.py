# SPDX-License-Identifier: Apache-2.0
"""Reading people's YAML.

- the value is what JSON would have said; scalars follow YAML 1.2, so PCI addresses stay text
- every refusal names the document, the line and the reason: syntax, encoding, size, depth, duplicates, aliases, tags
- a place is found again: the line of a key, of a list's entry, of the nearest part around a place that is not there
- pydantic's errors become lines with a place and the key that was meant
- a pipe is read to its end, and given up where nothing comes
- whatever the bytes, a Document or a DocumentError comes of them
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import document
from discovery.errors import DocumentError


def parse(text: str) -> document.Document:
    return document.parse(text.encode(), name="a.yaml")


def refusal(data: bytes) -> str:
    with pytest.raises(DocumentError) as raised:
        document.parse(data, name="a.yaml")
    return str(raised.value)


def test_values_are_those_of_json() -> None:
    text = """
        text: "1"
        list: [1, -2, 3.5, true, false, null, ~]
        empty:
        nested: {a: {b: []}}
    """
    assert parse(text).value == {
        "text": "1",
        "list": [1, -2, 3.5, True, False, None, None],
        "empty": None,
        "nested": {"a": {"b": []}},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0000:18:00.0", "0000:18:00.0"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("ON", "ON"),
        ("2026-11-29", "2026-11-29"),
        ("1_000", "1_000"),
        ("0x10de", 0x10DE),
        ("0o17", 0o17),
        ("017", 17),
        ("1e3", 1000.0),
        ("1e999", "1e999"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("<<", "<<"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse(f"key: {text}").value
    assert read == {"key": value}
    assert isinstance(read, dict)
    assert type(read["key"]) is type(value)


def test_keys_are_text() -> None:
    assert parse("{on: 1, 2: 3, null: 4}").value == {"on": 1, "2": 3, "null": 4}


def test_an_empty_document_is_null() -> None:
    assert parse("").value is None
    assert parse("# nothing\n").value is None


def test_a_byte_order_mark_is_no_part_of_the_document() -> None:
    assert document.parse(b"\xef\xbb\xbfa: 1", name="a.yaml").value == {"a": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: [1, 2\n", "a.yaml:3: not YAML: "),
        (b"a: 1\n\tb: 2", "a.yaml:2: not YAML: found "),
        (b"a: 1\nb: \xff\n", "a.yaml:2: not UTF-8 (byte 8)"),
        (b"a: 1\nb: \x00\n", "a.yaml:2: not YAML: the character '\\x00' is not allowed"),
        (b"a: 1\nb: 2\na: 3\n", "a.yaml:3: a: duplicate key, already on line 1"),
        (b"a:\n- b: 1\n- c: 1\n  c: 2\n", "a.yaml:4: a[1].c: duplicate key, already on line 3"),
        (b"a: &x 1\nb: *x\n", "a.yaml:1: anchors (&x) are not accepted"),
        (b"a: *x\n", "a.yaml:1: aliases (*x) are not accepted"),
        (b"a: !!python/object:os.system x\n", "a.yaml:1: tags (tag:yaml.org,2002:python/object:os.system)"),
        (b"? [1, 2]\n: 3\n", "a.yaml:1: a key must be text"),
        (b'a: "\\ud800"\n', "a.yaml:1: "),
        (b"a: 1\n---\nb: 2\n", "a.yaml:2: a second document begins"),
        (b"a: 1\nb: " + b"[" * 100 + b"]" * 100, "a.yaml:2: nested deeper than 64 levels"),
        (b"a: " + b"x" * document.MAX_BYTES, f"a.yaml: larger than {document.MAX_BYTES} bytes"),
    ],
)
def test_refusals_name_the_line(data: bytes, message: str) -> None:
    assert refusal(data).startswith(message)


def test_nesting_without_end_is_refused() -> None:
    assert refusal(b"a: 1\nb: " + b"[" * 100_000).startswith("a.yaml:2: ")


def test_billion_laughs_are_refused_at_the_first_anchor() -> None:
    lines = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert refusal("\n".join(lines).encode()).startswith("a.yaml:1: anchors (&a0)")


def test_places_have_lines() -> None:
    read = parse("a: 1\nb:\n  - c: 1\n    d: 2\n  -\n    c: 3\ne: {f: 1,\n    g: 2}\n")
    assert {place: read.line(place) for place in [("a",), ("b",), ("b", 0, "d"), ("b", 1, "c"), ("e", "g")]} == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0, "d"): 4,
        ("b", 1, "c"): 6,
        ("e", "g"): 8,
    }
    assert read.line(("b", 0, "nothing", 7)) == 3
    assert read.where(("b", 1, "c")) == "a.yaml:6: b[1].c"
    assert read.where(()) == "a.yaml:1"


class Part(pydantic.BaseModel):
    numa_node: str = pydantic.Field(alias="numaNode")
    pcie: int = pydantic.Field(alias="pcieSwitches")


class Entry(pydantic.BaseModel):
    nic: str
    rail: int


class Whole(pydantic.BaseModel):
    publish: Part | None = None
    rails: tuple[Entry, ...] = ()


def test_problems_are_explained_with_the_key_that_was_meant() -> None:
    read = parse("publish:\n  numaNodes: list\n  x: 1\nrails:\n- nick: 1\n  rail: -1\n")
    problems: list[dict[str, object]] = [
        {"type": "extra_forbidden", "loc": ("publish", "numaNodes"), "msg": "", "input": "list"},
        {"type": "extra_forbidden", "loc": ("publish", "x"), "msg": "", "input": 1},
        {"type": "extra_forbidden", "loc": ("rails", 0, "nick"), "msg": "", "input": 1},
        {"type": "missing", "loc": ("rails", 0, "nic"), "msg": "Field required", "input": {}},
        {"type": "greater_than_equal", "loc": ("rails", 0, "rail"), "msg": "Input should be at least 0", "input": -1},
        {"type": "value_error", "loc": (), "msg": "Value error, it is wrong", "input": {}},
    ]
    assert read.explain(problems, model=Whole).splitlines() == [
        "a.yaml:2: publish.numaNodes: unknown key; did you mean numaNode?",
        "a.yaml:3: publish.x: unknown key; known here: numaNode, pcieSwitches",
        "a.yaml:5: rails[0].nick: unknown key; did you mean nic?",
        "a.yaml:5: rails[0].nic: missing",
        "a.yaml:6: rails[0].rail: must be at least 0, not -1",
        "a.yaml:1: it is wrong",
    ]


def test_many_problems_are_counted() -> None:
    problems = [{"type": "missing", "loc": (f"k{i}",), "msg": "", "input": {}} for i in range(100)]
    lines = parse("a: 1").explain(problems).splitlines()
    assert len(lines) == document.MAX_PROBLEMS + 1
    assert lines[-1] == "a.yaml: and 80 more problems"


def test_hostile_keys_and_values_are_shown_escaped_and_short() -> None:
    read = parse('"\\e[31mred": 1\n"' + "x" * 500 + '": 1\n')
    problems = [{"type": "extra_forbidden", "loc": (key,), "msg": ""} for key in ("\x1b[31mred", "x" * 500)]
    lines = read.explain(problems).splitlines()
    assert lines[0] == "a.yaml:1: '\\x1b[31mred': unknown key"
    assert len(lines[1]) < 100


def test_files_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: 1\n", encoding="utf-8")
    assert document.read(path).value == {"a": 1}
    for unreadable in (tmp_path, tmp_path / "nothing.yaml"):
        with pytest.raises(DocumentError, match=r"cannot be read: (Is a directory|No such file)"):
            document.read(unreadable)


@pytest.fixture(name="fifo")
def fixture_fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    path.unlink()


def test_a_pipe_is_read_to_its_end_however_late_that_comes(fifo: Path) -> None:
    with subprocess.Popen(["/bin/sh", "-c", 'exec > "$0"; echo "a:"; sleep 0.2; echo " 1"', fifo]) as writer:
        assert document.read(fifo).value == {"a": 1}
    assert writer.returncode == 0
    reading, writing = os.pipe()
    os.write(writing, b"a: 2")
    os.close(writing)
    assert document.read(Path(f"/dev/fd/{reading}")).value == {"a": 2}
    os.close(reading)


def test_a_pipe_that_says_nothing_is_given_up(fifo: Path) -> None:
    with pytest.raises(
        DocumentError, match=r"fifo: nothing came from it for 0\.05 s: start what writes into this pipe"
    ):
        document.read_bytes(fifo, patience_s=0.05)
    silent = os.open(fifo, os.O_RDWR)
    try:
        os.write(silent, b"a: ")
        with pytest.raises(DocumentError, match="nothing came from it"):
            document.read_bytes(fifo, patience_s=0.05)
    finally:
        os.close(silent)


def test_no_more_is_read_than_a_document_may_have() -> None:
    assert len(document.read_bytes(Path("/dev/zero"), max_bytes=100_000)) == 100_001


TEXTS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=100)
@given(JSON_VALUES)
def test_json_reads_as_itself(value: object) -> None:
    assert parse(json.dumps(value)).value == value


@settings(max_examples=150)
@given(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!?|>'\"#,\n\t 01.\x00é", max_size=60).map(str.encode))
def test_any_bytes_give_a_document_or_a_document_error(data: bytes) -> None:
    try:
        read = document.parse(data, name="a.yaml")
    except DocumentError as err:
        message = str(err)
    else:
        message = f"a.yaml: {json.dumps(read.value, ensure_ascii=False).encode()!r}"
    assert message.startswith("a.yaml:")
