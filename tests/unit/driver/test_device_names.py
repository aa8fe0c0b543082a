# SPDX-License-Identifier: Apache-2.0
"""Names of devices, and back to the GPU that they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.address import PciAddress
from driver import values

ADDRESSES = st.builds(
    PciAddress, st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)
)


@given(place=ADDRESSES)
def test_the_address_of_a_device_is_in_its_name(place: PciAddress) -> None:
    part = values.partition_device_name(place, profile="1g.10gb", profile_id=19, start=0)
    assert values.address_of(values.gpu_device_name(place)) == place
    assert values.address_of(part) == place


@pytest.mark.parametrize(
    "name",
    ["", "gpu", "gpu-0000-1b-00", "gpu-0000-1b-20-0", "gpu-0000-1b-00-8", "xgpu-0000-1b-00-0", "gpu-000g-1b-00-0"],
)
def test_a_name_that_is_none_of_ours_names_no_gpu(name: str) -> None:
    assert values.address_of(name) is None
