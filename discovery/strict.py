# SPDX-License-Identifier: Apache-2.0
"""What the documents that people write for the agent have in common: strict models, the types of their values, and the ways from
text to a model and from a model to its JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic.alias_generators import to_camel

from discovery import address, document
from discovery.errors import DocumentError

API_VERSION = "config.nearfield.dev/v1alpha1"
ApiVersion = Literal["config.nearfield.dev/v1alpha1"]
RAIL_MAX = 2**31 - 1
ADDRESS_PATTERN = r"^[0-9a-fA-F]{1,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F](\.[0-7])?$"
"""What `address.parse` accepts, for editors; here `address.parse` itself judges."""


def _is_an_address(value: str) -> str:
    return str(address.parse(value))


Address = Annotated[
    str, pydantic.AfterValidator(_is_an_address), pydantic.Field(json_schema_extra={"pattern": ADDRESS_PATTERN})
]


class Section(pydantic.BaseModel):
    """A mapping: exact types, no unknown keys, camelCase."""

    model_config = pydantic.ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=False,
        use_attribute_docstrings=True,
    )


class Rail(Section):
    """The rail of a NIC."""

    nic: Address
    """PCI address of the NIC, such as 0000:18:00.0."""

    rail: Annotated[int, pydantic.Field(ge=0, le=RAIL_MAX)]
    """Index of the rail, from 0."""


S = TypeVar("S", bound=Section)


def validate(model: type[S], source: document.Document) -> S:
    """The model of a document that was read; its kind is the model's name. DocumentError with one line for every problem."""
    if not isinstance(source.value, dict):
        raise DocumentError(
            f"{source.name}:{source.line(())}: expected apiVersion: {API_VERSION} and kind: {model.__name__}"
        )
    try:
        return model.model_validate(source.value)
    except pydantic.ValidationError as err:
        raise DocumentError(source.explain(err.errors(include_url=False), model=model)) from err


def json_schema(model: type[Section]) -> dict[str, Any]:
    """The JSON Schema of a document (draft 2020-12). What may be left out may not be null."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    for part in (schema, *schema["$defs"].values()):
        for entry in part["properties"].values():
            entry.pop("title", None)
            if "anyOf" in entry:
                entry.update(entry.pop("anyOf")[0])
                del entry["default"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": model.__name__}
