# SPDX-License-Identifier: Apache-2.0
"""claimschema: the schema of ClaimConfig is the published one, and says what the reader does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.errors import ClaimError
from driver.prepare import claimconfig, claimschema
from tests.fakes import claimconfigs

ROOT = Path(__file__).parents[4]
TYPES: dict[str, Any] = {"object": dict, "string": str, "integer": int}
KEYWORDS = {
    "$schema", "title", "description", "type", "properties", "additionalProperties", "required", "const", "enum", "pattern", "minimum",
    "maximum",
}  # fmt: skip


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is as a schema says, of the keywords that ours has."""
    assert schema.keys() <= KEYWORDS
    kind: Any = TYPES.get(schema.get("type", ""), object)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    # ECMA-262 knows neither `$` before a last line end nor other digits than ASCII.
    if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value, re.ASCII):
        return False
    if kind is int:
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if kind is not dict:
        return True
    assert schema["additionalProperties"] is False
    known = schema["properties"]
    return (
        value.keys() <= known.keys()
        and set(schema.get("required", ())) <= value.keys()
        and all(fits(known[key], item) for key, item in value.items())
    )


def read(parameters: Any) -> bool:
    try:
        claimconfig.parse(parameters, where="a claim")
    except ClaimError:
        return False
    return True


def test_the_schema_is_published() -> None:
    """To rewrite it: nearfield config schema ClaimConfig > docs/claimconfig.schema.json."""
    published = json.loads((ROOT / "docs/claimconfig.schema.json").read_text(encoding="utf-8"))
    assert published == claimschema.json_schema()


@pytest.mark.parametrize("name", claimconfigs.GOOD)
def test_what_is_as_documented_is_taken_by_the_reader_and_by_the_schema(name: str) -> None:
    assert read(claimconfigs.GOOD[name])
    assert fits(claimschema.json_schema(), claimconfigs.GOOD[name])


@pytest.mark.parametrize("name", claimconfigs.MALFORMED)
def test_what_is_malformed_is_refused_by_both(name: str) -> None:
    parameters, _ = claimconfigs.MALFORMED[name]
    assert not read(parameters)
    assert not fits(claimschema.json_schema(), parameters)


@pytest.mark.parametrize("name", claimconfigs.WRONG)
def test_what_a_schema_cannot_say_is_refused_by_the_reader(name: str) -> None:
    parameters, _ = claimconfigs.WRONG[name]
    assert not read(parameters)
    assert fits(claimschema.json_schema(), parameters)


def test_the_page_shows_what_is_read() -> None:
    page = (ROOT / "docs/claimconfig.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (entry,) = yaml.safe_load(block)["spec"]["devices"]["config"]
    shown = entry["opaque"]["parameters"]
    assert read(shown)
    parts = {
        name: part["properties"] for name, part in claimschema.json_schema()["properties"].items() if "type" in part
    }
    assert {name: shown[name].keys() for name in parts} == {name: fields.keys() for name, fields in parts.items()}
    told = dict(re.findall(r"^\| `([a-zA-Z.]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert told.keys() == {f"{name}.{field}" for name, fields in parts.items() for field in fields}
    for name, fields in parts.items():
        for field, schema in fields.items():
            assert re.findall(r"`(\w+)`", told[f"{name}.{field}"]) == schema.get("enum", [])
