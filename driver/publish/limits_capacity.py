# SPDX-License-Identifier: Apache-2.0
"""The rules for one capacity of a device and for its request policy. Pure.

Source: pkg/apis/resource/validation of Kubernetes 1.37, validateRequestPolicy and below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from driver import quantity
from driver.publish import syntax

MAX_VALID_VALUES = 10
"""CapacityRequestPolicyDiscreteMaxOptions."""


def capacity_violations(value: object, path: str, *, shareable: bool, fractions: bool) -> Iterator[str]:
    """What is wrong with one capacity. `shareable`: the device allows multiple allocations."""
    if not isinstance(value, Mapping):
        yield f"{path}: must be an object"
        return
    whole, wrong = read_quantity(value.get("value"), f"{path}.value")
    yield from wrong
    policy = value.get("requestPolicy")
    if policy is None:
        return
    if not shareable:
        yield f"{path}.requestPolicy: Forbidden: allowMultipleAllocations must be true"
    elif not isinstance(policy, Mapping):
        yield f"{path}.requestPolicy: must be an object"
    elif whole is not None:
        yield from _request_policy(policy, whole, f"{path}.requestPolicy", fractions=fractions)


def read_quantity(value: object, path: str) -> tuple[Fraction | None, tuple[str, ...]]:
    """The number, and what is wrong with its spelling."""
    try:
        return quantity.parse(value), ()
    except ValueError as error:
        return None, (f"{path}: {error}",)


def _request_policy(policy: Mapping[str, Any], whole: Fraction, path: str, *, fractions: bool) -> Iterator[str]:
    values, bounds = policy.get("validValues") or [], policy.get("validRange")
    default: Fraction | None = None
    if policy.get("default") is not None:
        default, wrong = read_quantity(policy["default"], f"{path}.default")
        yield from wrong
        if wrong:
            return
    if values and bounds is not None:
        yield f'{path}: Forbidden: cannot specify "validValues" and "validRange" at the same time'
        return
    if not values and bounds is None:
        return
    if default is None:
        yield f"{path}.default: required when validValues or validRange is defined"
    elif values:
        yield from _valid_values(values, default, whole, f"{path}.validValues")
    else:
        yield from _valid_range(bounds, default, whole, f"{path}.validRange", fractions=fractions)


def _valid_values(values: object, default: Fraction, whole: Fraction, path: str) -> Iterator[str]:
    if not isinstance(values, list) or len(values) > MAX_VALID_VALUES:
        yield f"{path}: must be a list of at most {MAX_VALID_VALUES}"
        return
    numbers: list[Fraction] = []
    for index, value in enumerate(values):
        number, wrong = read_quantity(value, f"{path}[{index}]")
        yield from wrong
        if number is None:
            return
        if number > whole:
            yield f"{path}[{index}]: option is larger than capacity value"
        numbers.append(number)
    if numbers != sorted(numbers):
        yield f"{path}: values must be sorted in ascending order"
    if len(set(numbers)) != len(numbers):
        yield f"{path}: Duplicate value"
    if default not in numbers:
        yield f"{path}: default value is not valid according to the requestPolicy"


def _valid_range(bounds: object, default: Fraction, whole: Fraction, path: str, *, fractions: bool) -> Iterator[str]:
    if not isinstance(bounds, Mapping) or bounds.get("min") is None:
        yield f"{path}.min: required when validRange is defined"
        return
    numbers: dict[str, Fraction] = {"default": default}
    for key in ("min", "max", "step"):
        if bounds.get(key) is not None:
            number, wrong = read_quantity(bounds[key], f"{path}.{key}")
            yield from wrong
            if number is None:
                return
            numbers[key] = number
    least, most, step = numbers["min"], numbers.get("max"), numbers.get("step")
    if least > whole:
        yield f"{path}.min: min is larger than capacity value"
    if default < least:
        yield f"{path}.default: default is less than min"
    if most is not None and (least > most or most > whole or default > most):
        yield f"{path}.max: must not be less than min or default, nor larger than capacity value"
    if step is None:
        return
    if step <= 0:
        yield f"{path}.step: must be greater than zero"
        return
    if least + step > whole:
        yield f"{path}.step: one step is larger than capacity value"
    if not fractions:
        # Quantity.Value() rounds up, and holds in [0, MaxInt64] only.
        numbers = {key: Fraction(-(-number.numerator // number.denominator)) for key, number in numbers.items()}
        outside = [key for key, number in numbers.items() if not 0 <= number <= syntax.MAX_INT64]
        if outside:
            yield f"{path}.{outside[0]}: must be between 0 and {syntax.MAX_INT64}"
            return
    for key in ("default", "max"):
        if key in numbers and (numbers[key] - numbers["min"]) % numbers["step"]:
            yield f"{path}.step: {key} is not a multiple of a given step from min"
