# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities: `80Gi`, `100`, `1500m`, `1e3`. Pure.

The API server rewrites a quantity into its canonical spelling (`1000` comes back as `1k`), so two of them are compared as
numbers, never as text. Grammar: apimachinery's pkg/api/resource/quantity.go.
"""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([KMGTPE]i|[numkMGTPE]?)|[eE]([+-]?[0-9]{1,3}))", re.ASCII
)
_MAX_LENGTH = 64
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse(text: object) -> Fraction:
    """The exact value; JSON numbers are accepted as the API server accepts them. Raises ValueError that names the text."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"{text!r} is not a quantity")  # noqa: TRY004 - one error for all input that is none
    spelled = str(text).strip()
    match = _QUANTITY.fullmatch(spelled) if len(spelled) <= _MAX_LENGTH else None
    if match is None:
        raise ValueError(f"{spelled[:_MAX_LENGTH]!r} is not a quantity such as 80Gi, 100 or 1500m")
    sign, number, suffix, exponent = match.groups()
    value = Fraction(f"0{number}" if number.startswith(".") else number.rstrip("."))
    if exponent is not None:
        value *= Fraction(10) ** int(exponent)
    elif suffix in _BINARY:
        value *= 2 ** _BINARY[suffix]
    else:
        value *= Fraction(10) ** _DECIMAL[suffix]
    return -value if sign == "-" else value


def format_bytes(value: int) -> str:
    """A number of bytes in the canonical spelling with binary suffixes: `80Gi`, `81559Mi`, `12345`."""
    for suffix, power in reversed(_BINARY.items()):
        if value and value % (1 << power) == 0:
            return f"{value >> power}{suffix}"
    return str(value)
