# SPDX-License-Identifier: Apache-2.0
"""The machines that come with Nearfield, and reading machines from files: by name, Machine, Variant, Recording, gzipped or not."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from discovery import document
from discovery.errors import DocumentError
from discovery.mock import expand, machine, products, recording, shelf, variant
from discovery.mock.pcitree import MachineError
from discovery.mock.products import Model

_PRODUCTS = Path(__file__).parent / "products.yaml"

MAX_BASES = 16
"""Variants of Variants; nobody needs three."""

M = TypeVar("M", bound=Model)

_Document = machine.Machine | variant.Variant


def names() -> tuple[str, ...]:
    """The machines of the zoo."""
    return shelf.names()


def describe(name: str) -> str:
    """What a machine of the zoo is, in one sentence. DocumentError for a name that is not there."""
    return _document(document.read(_path(name))).description


def text(name: str) -> str:
    """The document of a machine of the zoo as it stands in its file, with the sources of its facts."""
    return _path(name).read_text(encoding="utf-8")


def load(name_or_path: str) -> recording.Recording:
    """The Recording of a machine of the zoo, of a Machine or a Variant (YAML) or of a Recording (JSON, also gzipped) in a file.

    DocumentError that names the document, the place in it and what to change.
    """
    if name_or_path in names():
        return parse_machine(document.read(_path(name_or_path)))
    path = Path(name_or_path)
    if not _is_file(path):
        raise DocumentError(
            f"{name_or_path}: neither a machine of the zoo ({', '.join(names())}) nor a file with a Machine, a Variant or a Recording"
        )
    if path.name.endswith((".json", ".json.gz")):
        return recording.read(path)
    return parse_machine(document.read(path))


@functools.cache
def catalogue() -> products.Products:
    """The parts that come with Nearfield (products.yaml)."""
    return _validated(products.ProductsDocument, document.read(_PRODUCTS))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the documents Machine and Variant, published in docs/machine.schema.json."""
    kinds: pydantic.TypeAdapter[_Document] = pydantic.TypeAdapter(
        Annotated[machine.Machine | variant.Variant, pydantic.Field(discriminator="kind")]
    )
    schema = kinds.json_schema(by_alias=True, mode="validation")
    for model in schema["$defs"].values():
        for field in model.get("properties", {}).values():
            field.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Machine or Variant", **schema}


def parse_machine(read: document.Document) -> recording.Recording:
    """The Recording of a Machine or of a Variant."""
    described, base = _described(read, (read.name,))
    try:
        return expand.expand(described, catalogue())
    except MachineError as err:
        own = err.place[:1] == ("faults",) or (len(err.place) > 1 and _says(read, *err.place[:2]))
        raise DocumentError(f"{(read if own else base).where(err.place)}: {err}") from err


def _path(name: str) -> Path:
    if name not in names():
        raise DocumentError(f"{name}: no machine of the zoo; there are {', '.join(names())}")
    return shelf.path(name)


def _described(read: document.Document, above: tuple[str, ...]) -> tuple[machine.Machine, document.Document]:
    """The machine of a document, and the document that its hardware stands in. `above`: those that led here, and this one."""
    described = _document(read)
    if isinstance(described, machine.Machine):
        return described, read
    path = shelf.find(described.base, beside=Path(read.name))
    again = next((index for index, name in enumerate(above) if _same(path, Path(name))), None)
    if again is not None:
        chain = " > ".join((*above[again:], str(path)))
        raise DocumentError(f"{read.where(('base',))}: it would be based on itself: {chain}")
    if len(above) > MAX_BASES:
        raise DocumentError(f"{read.where(('base',))}: more than {MAX_BASES} Variants stand on each other")
    if not _is_file(path):
        raise DocumentError(
            f"{read.where(('base',))}: {described.base} is neither a machine of the zoo ({', '.join(names())}) nor a file "
            "beside this document"
        )
    base, hardware = _described(document.read(path), (*above, str(path)))
    return described.of(base), hardware


def _says(read: document.Document, section: object, key: object) -> bool:
    """Whether a Variant itself has something at a place; its base has the rest."""
    value = read.value.get(section) if isinstance(read.value, dict) else None
    return isinstance(value, dict) and key in value


def _is_file(path: Path) -> bool:
    """Whether a file is there; a name that no file can have is that of none."""
    try:
        return path.is_file()
    except OSError:
        return False


def _same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file, however they are spelt."""
    try:
        return path == other or path.samefile(other)
    except (OSError, ValueError):
        return False


def _document(read: document.Document) -> _Document:
    kind = read.value.get("kind") if isinstance(read.value, dict) else None
    if kind not in ("Machine", "Variant"):
        raise DocumentError(f"{read.where(())}: not a document of kind Machine or Variant")
    return _validated(machine.Machine, read) if kind == "Machine" else _validated(variant.Variant, read)


def _validated(model: type[M], read: document.Document) -> M:
    try:
        return model.model_validate_json(json.dumps(read.value))
    except pydantic.ValidationError as err:
        raise DocumentError(read.explain(err.errors(), model=model)) from err
