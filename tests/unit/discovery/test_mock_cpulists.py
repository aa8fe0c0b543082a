# SPDX-License-Identifier: Apache-2.0
"""The kernel's lists and masks of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.mock import cpulists


@given(st.sets(st.integers(0, 400)))
def test_a_list_reads_back_as_what_was_spelt(numbers: set[int]) -> None:
    assert set(cpulists.parse(cpulists.spell(numbers))) == numbers


@given(st.sets(st.integers(0, 99)), st.integers(100, 130))
def test_a_mask_has_one_bit_for_each_number(numbers: set[int], possible: int) -> None:
    mask = cpulists.mask(numbers, possible=possible)
    bits = int(mask.replace(",", ""), 16)
    assert {number for number in range(possible) if bits >> number & 1} == numbers
    assert all(len(word) == 8 for word in mask.split(",")[1:])


def test_masks_are_as_wide_as_the_kernel_writes_them() -> None:
    assert cpulists.mask((0, 1), possible=2) == "3"
    assert cpulists.mask((0,), possible=48) == "0000,00000001"
    assert cpulists.mask((223,), possible=224) == "80000000,00000000,00000000,00000000,00000000,00000000,00000000"


@pytest.mark.parametrize("text", ["a", "3-", "-3", "4-2", "0,,1", "99999", "0-99999", "1 2"])
def test_what_is_no_list_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (list|range) of numbers"):
        cpulists.parse(text)


def test_nothing_is_the_empty_list() -> None:
    assert cpulists.parse("\n") == ()
    assert cpulists.spell(()) == ""
