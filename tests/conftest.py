# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A time limit for one example would measure the machine, and a busy one fails.
settings.register_profile("nearfield", deadline=None)
settings.load_profile("nearfield")
