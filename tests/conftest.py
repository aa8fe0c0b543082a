# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A time limit for one example would measure the machine, and a busy one fails.
settings.register_profile("nearfield", deadline=None)
settings.load_profile("nearfield")

# A shell has what it runs in the background ignore interrupts, and children inherit that: those that tests interrupt would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)
