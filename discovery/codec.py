# SPDX-License-Identifier: Apache-2.0
"""JSON of discovery's values, driven by their types, and the versioned document of a Snapshot.

Fields are camelCase; None is left out, as unknown is absent; enums are their value, addresses their text, keys of a
mapping their text. Reading is strict, because the text may come from a file or a crashed process: a wrong type, a number
that no kernel writes, a missing field without a default, all raise DocumentError with the place (`$.gpus[3].pci.address`).

Types are compiled once into functions that write and read them, because a Snapshot has ten thousand values and passes
through here at every probe.

Compatibility of Snapshots: a reader ignores fields it does not know (a newer writer may add some) and takes the default
of fields that are missing (an older writer had none). A change of meaning raises `model.SNAPSHOT_VERSION`, and a document
of a higher version is refused. Every other value is read with unknown fields refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import pathlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from discovery import address, errors, mig, model, paths

API_VERSION = "snapshot.nearfield.dev/v1alpha1"
KIND = "Snapshot"

_INT_LIMIT = 1 << 64
"""No counter of a kernel or of NVML is wider; a longer number in a document is an attack or a mistake."""

_KEPT_LENGTH = 32
"""Longer texts are no addresses, and not worth remembering."""

_ALIKE = frozenset({mig.MigProfile})
"""Sequences of these are the same for all GPUs of a product, and long."""

T = TypeVar("T")
_Writer = Callable[[Any], Any]
_Reader = Callable[[Any], Any]
_TEXT_FORMS: dict[Any, Callable[[str], Any]] = {
    address.PciAddress: address.parse,
    address.HostBridge: address.parse_host_bridge,
    pathlib.Path: pathlib.Path,
}


def to_json(snapshot: model.Snapshot) -> dict[str, Any]:
    """The document of a Snapshot."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "schemaVersion": model.SNAPSHOT_VERSION,
        **encode(snapshot),
    }


def to_document(snapshot: model.Snapshot) -> dict[str, Any]:
    """The document of a Snapshot as people and programs get it: with the paths between its devices."""
    return {**to_json(snapshot), "paths": [encode(path) for path in paths.between_all(snapshot)]}


def from_json(obj: object) -> model.Snapshot:
    """The Snapshot of a document. Raises DocumentError for anything that `to_json` of a known version cannot have made."""
    if not isinstance(obj, dict):
        raise errors.DocumentError("Snapshot: the document is no JSON object")
    if (obj.get("apiVersion"), obj.get("kind")) != (API_VERSION, KIND):
        raise errors.DocumentError(f"Snapshot: expected apiVersion {API_VERSION} and kind {KIND}")
    version = obj.get("schemaVersion")
    if type(version) is not int or version < 1:
        raise errors.DocumentError("Snapshot: schemaVersion is missing or no positive number")
    if version > model.SNAPSHOT_VERSION:
        raise errors.DocumentError(
            f"Snapshot: schemaVersion {version} was written by a newer Nearfield; this one reads up to {model.SNAPSHOT_VERSION}"
        )
    return decode(model.Snapshot, obj, place="$", ignore_unknown=True)


def same_content(a: model.Snapshot, b: model.Snapshot) -> bool:
    """Whether two Snapshots say the same; when they were taken does not matter."""
    return a == dataclasses.replace(b, taken_at=a.taken_at)


def encode(value: object) -> Any:
    """JSON of any value made of frozen dataclasses, enums, tuples, mappings, addresses and plain scalars. The types of a
    dataclass's fields are taken at their word.
    """
    if isinstance(value, tuple | list) and not isinstance(value, address.PciAddress):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    hint: Any = type(value)
    return _writer(hint)(value)


def decode(cls: type[T], obj: object, *, place: str, ignore_unknown: bool = False) -> T:
    """The value of type `cls` that `encode` wrote as `obj`. `place` names the document in messages.

    Raises DocumentError with the place of the first thing that does not fit.
    """
    hint: Any = cls
    read = _reader(hint, ignore_unknown)
    try:
        value: T = read(obj)
    except _MisfitError as misfit:
        raise errors.DocumentError(f"{place}{''.join(reversed(misfit.place))}: {misfit}") from None
    return value


class _MisfitError(Exception):
    """Something does not fit; every reader that it passes adds its part of the place, innermost first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place: list[str] = []


def _same(value: Any) -> Any:
    return value


_value_of = operator.attrgetter("_value_")
"""The value of an enum member; the public attribute is a property in Python."""

_spelled = functools.lru_cache(maxsize=4096)(str)


def _optional_argument(hint: Any) -> Any:
    """X of `X | None`; None for any other type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        if len(inner) == 1:
            return inner[0]
    return None


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, str, Any, bool], ...]:
    """Attribute, name in JSON, type, and whether it has a default, of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            _camel(field.name),
            hints[field.name],
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


@functools.cache
def _writer(hint: Any) -> _Writer:
    """The function that writes one type. Types are a closed set of the program: an unknown one is a TypeError."""
    if hint in (str, bool, int, float, type(None)):
        return _same
    if hint is address.HostBridge:
        return _same
    if isinstance(hint, typing.NewType):
        return _writer(hint.__supertype__)
    inner = _optional_argument(hint)
    if inner is not None:
        write = _writer(inner)
        return lambda value: None if value is None else write(value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _tuple_writer(arguments)
    if origin is not None and issubclass(origin, Mapping):
        write_key, write_item = _writer(arguments[0]), _writer(arguments[1])
        return lambda value: {str(write_key(key)): write_item(item) for key, item in value.items()}
    if isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return _value_of
        if issubclass(hint, address.PciAddress):
            return _spelled
        if issubclass(hint, pathlib.PurePath):
            return str
        if dataclasses.is_dataclass(hint):
            return _dataclass_writer(hint)
    raise TypeError(f"{hint} has no JSON form")


def _tuple_writer(arguments: tuple[Any, ...]) -> _Writer:
    if arguments[-1] is Ellipsis:
        write = _writer(arguments[0])
        return list if write is _same else lambda value: [write(item) for item in value]
    writers = tuple(map(_writer, arguments))
    return lambda value: [write(item) for write, item in zip(writers, value, strict=True)]


def _dataclass_writer(cls: Any) -> _Writer:
    writers: Sequence[tuple[str, str, _Writer | None]] = ()

    def write(value: Any) -> dict[str, Any]:
        return {
            name: item if write_item is None else write_item(item)
            for attribute, name, write_item in writers
            if (item := getattr(value, attribute)) is not None
        }

    # Compiled when first used: a dataclass may refer to itself. Put in place as a whole: another thread may be here, too.
    def compile_and_write(value: Any) -> dict[str, Any]:
        nonlocal writers
        if not writers:
            compiled = [
                (attribute, name, _writer(_optional_argument(hint) or hint))
                for attribute, name, hint, _ in _fields(cls)
            ]
            writers = [(attribute, name, None if item is _same else item) for attribute, name, item in compiled]
        return write(value)

    return compile_and_write


@functools.cache
def _reader(hint: Any, ignore_unknown: bool) -> _Reader:  # noqa: FBT001 - a key of the cache
    """The function that reads one type, as strict as `_writer` is trusting."""
    if hint in _TEXT_FORMS:
        return functools.partial(_read_text_form, _TEXT_FORMS[hint])
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__, ignore_unknown)
    if hint in (str, bool, int, float):
        return _SCALARS[hint]
    inner = _optional_argument(hint)
    if inner is not None:
        read = _reader(inner, ignore_unknown)
        return lambda obj: None if obj is None else read(obj)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments == (int, Ellipsis):
        return _read_ints
    if origin is tuple and arguments[-1] is Ellipsis:
        read = functools.partial(_read_sequence, _reader(arguments[0], ignore_unknown))
        return _repeating(read) if arguments[0] in _ALIKE else read
    if origin is tuple:
        return functools.partial(_read_fixed, tuple(_reader(argument, ignore_unknown) for argument in arguments))
    if origin is not None and issubclass(origin, Mapping):
        key, item = arguments
        read_key = _read_int_key if key is int else _reader(key, ignore_unknown)
        return functools.partial(_read_mapping, read_key, _reader(item, ignore_unknown))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.value: member for member in hint}
        return functools.partial(_read_enum, members)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_reader(hint, ignore_unknown)
    raise TypeError(f"{hint} has no JSON form")


def _said(obj: object) -> str:
    """What stands there, short enough for a message whatever its size."""
    if isinstance(obj, dict):
        return "an object"
    if isinstance(obj, list):
        return "a list"
    if isinstance(obj, int) and abs(obj) >= _INT_LIMIT:
        return "a huge number"
    text = repr(obj)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_str(obj: Any) -> str:
    if not isinstance(obj, str):
        raise _MisfitError(f"expected text, found {_said(obj)}")
    if not obj.isascii():
        try:
            obj.encode()
        except UnicodeEncodeError:
            raise _MisfitError("text with a lone surrogate") from None
    return obj


def _read_bool(obj: Any) -> bool:
    if not isinstance(obj, bool):
        raise _MisfitError(f"expected true or false, found {_said(obj)}")
    return obj


def _read_int(obj: Any) -> int:
    if type(obj) is not int:
        raise _MisfitError(f"expected a whole number, found {_said(obj)}")
    if not -_INT_LIMIT < obj < _INT_LIMIT:
        raise _MisfitError("the number does not fit 64 bits")
    return obj


def _read_float(obj: Any) -> float:
    if not isinstance(obj, int | float) or isinstance(obj, bool):
        raise _MisfitError(f"expected a number, found {_said(obj)}")
    if not -_INT_LIMIT < obj < _INT_LIMIT:
        raise _MisfitError(f"{_said(obj)} is out of range")
    return float(obj)


_SCALARS: dict[Any, _Reader] = {str: _read_str, bool: _read_bool, int: _read_int, float: _read_float}


def _read_text_form(parse: Callable[[str], Any], obj: Any) -> Any:
    text = _read_str(obj)
    value = _parsed(parse, text) if len(text) <= _KEPT_LENGTH else _parsed.__wrapped__(parse, text)
    if value is None:
        raise _MisfitError(f"{_said(obj)} is not in its one spelling")
    return value


@functools.lru_cache(maxsize=4096)
def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """The value of a text form, None if there is none; kept, because a Snapshot names each address dozens of times."""
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if str(value) == text else None


def _read_sequence(read: _Reader, obj: Any) -> tuple[Any, ...]:
    if not isinstance(obj, list):
        raise _MisfitError(f"expected a list, found {_said(obj)}")
    items: list[Any] = []
    try:
        for item in obj:
            items.append(read(item))  # noqa: PERF401 - the length tells where it failed
    except _MisfitError as misfit:
        misfit.place.append(f"[{len(items)}]")
        raise
    return tuple(items)


def _read_ints(obj: Any) -> tuple[int, ...]:
    """As `_read_sequence`, without a look at each number of a list that holds nothing else: CPU lists are most of a Snapshot."""
    if (
        isinstance(obj, list)
        and obj
        and set(map(type, obj)) == {int}
        and -_INT_LIMIT < min(obj) <= max(obj) < _INT_LIMIT
    ):
        return tuple(obj)
    return _read_sequence(_read_int, obj)


def _repeating(read: _Reader) -> _Reader:
    """A reader that gives the value it gave before for what says the same as before, in which true is as good as 1."""
    last: tuple[Any, Any] = (None, None)

    def read_or_repeat(obj: Any) -> Any:
        nonlocal last
        before, value = last
        if before is None or before != obj:
            value = read(obj)
            last = (obj, value)
        return value

    return read_or_repeat


def _read_fixed(readers: tuple[_Reader, ...], obj: Any) -> tuple[Any, ...]:
    if not isinstance(obj, list) or len(obj) != len(readers):
        raise _MisfitError(f"expected a list of {len(readers)}, found {_said(obj)}")
    return tuple(_inside(f"[{index}]", read, item) for index, (read, item) in enumerate(zip(readers, obj, strict=True)))


def _inside(part: str, read: _Reader, obj: Any) -> Any:
    try:
        return read(obj)
    except _MisfitError as misfit:
        misfit.place.append(part)
        raise


def _read_int_key(obj: Any) -> int:
    text = _read_str(obj)
    if len(text) > 20 or str(number := int(text) if text.removeprefix("-").isdecimal() else None) != text:
        raise _MisfitError(f"the key {_said(obj)} is no whole number")
    return _read_int(number)


def _read_mapping(read_key: _Reader, read: _Reader, obj: Any) -> dict[Any, Any]:
    if not isinstance(obj, dict):
        raise _MisfitError(f"expected an object, found {_said(obj)}")
    return {read_key(key): _inside(f".{key}", read, item) for key, item in obj.items()}


def _read_enum(members: Mapping[Any, enum.Enum], obj: Any) -> enum.Enum:
    member = members.get(obj) if isinstance(obj, str) else None
    if member is None:
        raise _MisfitError(f"{_said(obj)} is none of {', '.join(map(str, members))}")
    return member


def _dataclass_reader(cls: Any, ignore_unknown: bool) -> _Reader:  # noqa: FBT001 - passed on to the cached reader
    fields = _fields(cls)
    readers: Mapping[str, tuple[str, _Reader, bool]] = {}
    optional = {
        attribute for attribute, _, hint, default in fields if not default and _optional_argument(hint) is not None
    }
    required = [name for attribute, name, _, default in fields if not default and attribute not in optional]

    def read(obj: Any) -> Any:
        if not isinstance(obj, dict):
            raise _MisfitError(f"expected an object, found {_said(obj)}")
        nonlocal readers
        if not readers:  # compiled when first used, and put in place as a whole: as the writers are
            compiled = [(attribute, name, hint, _optional_argument(hint)) for attribute, name, hint, _ in fields]
            readers = {
                name: (attribute, _reader(inner or hint, ignore_unknown), inner is not None)
                for attribute, name, hint, inner in compiled
            }
        values: dict[str, Any] = dict.fromkeys(optional)
        key = ""
        try:
            for key, item in obj.items():
                entry = readers.get(key)
                if entry is not None:
                    attribute, read_item, may_be_none = entry
                    values[attribute] = None if item is None and may_be_none else read_item(item)
        except _MisfitError as misfit:
            misfit.place.append(f".{key}")
            raise
        if not ignore_unknown and not readers.keys() >= obj.keys():
            unknown = next(key for key in obj if key not in readers)
            raise _MisfitError(f"unknown field {_said(unknown)}; known are {', '.join(readers)}")
        for name in required:
            if name not in obj:
                raise _MisfitError(f"{name} missing")
        return cls(**values)

    return read
