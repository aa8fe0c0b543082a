# SPDX-License-Identifier: Apache-2.0
"""JSON of discovery's values, driven by their types, and the versioned document of a Snapshot.

Fields are camelCase; None is left out, as unknown is absent; enums are their value, addresses their text, keys of a
mapping their text. Reading is strict, because the text may come from a file or a crashed process: a wrong type, a number
that no kernel writes, a missing field without a default, all raise DocumentError with the place (`$.gpus[3].pci.address`).

Compatibility of Snapshots: a reader ignores fields it does not know (a newer writer may add some) and takes the default
of fields that are missing (an older writer had none). A change of meaning raises `model.SNAPSHOT_VERSION`, and a document
of a higher version is refused. Every other value is read with unknown fields refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pathlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from discovery import address, errors, model

API_VERSION = "snapshot.nearfield.dev/v1alpha1"
KIND = "Snapshot"

_INT_LIMIT = 1 << 64
"""No counter of a kernel or of NVML is wider; a longer number in a document is an attack or a mistake."""

T = TypeVar("T")
_Reader = Callable[[Any, str], Any]
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
    """JSON of any value made of frozen dataclasses, enums, tuples, mappings, addresses and plain scalars."""
    match value:
        case enum.Enum():
            return value.value
        case str() | bool() | int() | float() | None:
            return value
        case tuple() | list():
            return [encode(item) for item in value]
        case address.PciAddress() | pathlib.PurePath():
            return str(value)
        case Mapping():
            return {str(encode(key)): encode(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    cls: Any = type(value)
    fields = ((name, getattr(value, attribute)) for attribute, name in _names(cls))
    return {name: encode(item) for name, item in fields if item is not None}


def decode(cls: type[T], obj: object, *, place: str, ignore_unknown: bool = False) -> T:
    """The value of type `cls` that `encode` wrote as `obj`. `place` names the document in messages.

    Raises DocumentError with the place of the first thing that does not fit.
    """
    hint: Any = cls
    value: T = _reader(hint, ignore_unknown)(obj, place)
    return value


@functools.cache
def _names(cls: Any) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, _camel(field.name)) for field in dataclasses.fields(cls))


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


@functools.cache
def _reader(hint: Any, ignore_unknown: bool) -> _Reader:  # noqa: FBT001 - a key of the cache
    """The function that reads one type. Types are a closed set of the program: an unknown one is a TypeError."""
    if hint in _TEXT_FORMS:
        return functools.partial(_read_text_form, _TEXT_FORMS[hint])
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__, ignore_unknown)
    if hint in (str, bool, int, float):
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1:
            return functools.partial(_read_optional, _reader(inner[0], ignore_unknown))
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return functools.partial(_read_sequence, _reader(arguments[0], ignore_unknown))
    if origin is tuple:
        return functools.partial(_read_fixed, tuple(_reader(argument, ignore_unknown) for argument in arguments))
    if origin is not None and issubclass(origin, Mapping):
        key, item = arguments
        return functools.partial(_read_mapping, _key_reader(key, ignore_unknown), _reader(item, ignore_unknown))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_read_enum, hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_reader(hint, ignore_unknown)
    raise TypeError(f"{hint} has no JSON form")


def _fail(place: str, message: str) -> typing.NoReturn:
    raise errors.DocumentError(f"{place}: {message}")


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


def _read_str(obj: Any, place: str) -> str:
    if not isinstance(obj, str):
        _fail(place, f"expected text, found {_said(obj)}")
    if not obj.isascii():
        try:
            obj.encode()
        except UnicodeEncodeError:
            _fail(place, "text with a lone surrogate")
    return obj


def _read_bool(obj: Any, place: str) -> bool:
    if not isinstance(obj, bool):
        _fail(place, f"expected true or false, found {_said(obj)}")
    return obj


def _read_int(obj: Any, place: str) -> int:
    if not isinstance(obj, int) or isinstance(obj, bool):
        _fail(place, f"expected a whole number, found {_said(obj)}")
    if abs(obj) >= _INT_LIMIT:
        _fail(place, "the number does not fit 64 bits")
    return obj


def _read_float(obj: Any, place: str) -> float:
    if not isinstance(obj, (int, float)) or isinstance(obj, bool):
        _fail(place, f"expected a number, found {_said(obj)}")
    if abs(obj) >= _INT_LIMIT or math.isnan(obj):
        _fail(place, f"{_said(obj)} is out of range")
    return float(obj)


_SCALARS: dict[Any, _Reader] = {str: _read_str, bool: _read_bool, int: _read_int, float: _read_float}


def _read_text_form(parse: Callable[[str], Any], obj: Any, place: str) -> Any:
    text = _read_str(obj, place)
    try:
        value = parse(text)
    except ValueError:
        value = None
    if value is None or str(value) != text:
        _fail(place, f"{_said(obj)} is not in its one spelling")
    return value


def _read_optional(read: _Reader, obj: Any, place: str) -> Any:
    return None if obj is None else read(obj, place)


def _read_sequence(read: _Reader, obj: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(obj, list):
        _fail(place, f"expected a list, found {_said(obj)}")
    return tuple([read(item, f"{place}[{index}]") for index, item in enumerate(obj)])


def _read_fixed(readers: tuple[_Reader, ...], obj: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(obj, list) or len(obj) != len(readers):
        _fail(place, f"expected a list of {len(readers)}, found {_said(obj)}")
    return tuple(read(item, f"{place}[{index}]") for index, (read, item) in enumerate(zip(readers, obj, strict=True)))


def _key_reader(hint: Any, ignore_unknown: bool) -> _Reader:  # noqa: FBT001 - passed on to the cached reader
    if hint is int:
        return _read_int_key
    return _reader(hint, ignore_unknown)


def _read_int_key(obj: Any, place: str) -> int:
    text = _read_str(obj, place)
    if len(text) > 20 or str(number := int(text) if text.removeprefix("-").isdecimal() else None) != text:
        _fail(place, f"the key {_said(obj)} is no whole number")
    return _read_int(number, place)


def _read_mapping(read_key: _Reader, read: _Reader, obj: Any, place: str) -> dict[Any, Any]:
    if not isinstance(obj, dict):
        _fail(place, f"expected an object, found {_said(obj)}")
    return {read_key(key, place): read(item, f"{place}.{key}") for key, item in obj.items()}


def _read_enum(cls: type[enum.Enum], obj: Any, place: str) -> enum.Enum:
    try:
        return cls(_read_str(obj, place))
    except ValueError:
        _fail(place, f"{_said(obj)} is none of {', '.join(str(member.value) for member in cls)}")


def _dataclass_reader(cls: Any, ignore_unknown: bool) -> _Reader:  # noqa: FBT001 - passed on to the cached reader
    hints = typing.get_type_hints(cls)
    names = dict(_names(cls))
    readers = {
        names[field.name]: (field.name, _reader(hints[field.name], ignore_unknown)) for field in dataclasses.fields(cls)
    }
    required = {
        names[field.name]
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and type(None) not in typing.get_args(hints[field.name])
    }
    absent = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and names[field.name] not in required
    }

    def read(obj: Any, place: str) -> Any:
        if not isinstance(obj, dict):
            _fail(place, f"expected an object, found {_said(obj)}")
        values: dict[str, Any] = dict.fromkeys(absent)
        for key, item in obj.items():
            entry = readers.get(key)
            if entry is not None:
                values[entry[0]] = entry[1](item, f"{place}.{key}")
            elif not ignore_unknown:
                _fail(place, f"unknown field {_said(key)}; known are {', '.join(readers)}")
        missing = required.difference(obj)
        if missing:
            _fail(place, f"{', '.join(sorted(missing))} missing")
        return cls(**values)

    return read
