# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A time limit for one example would measure the machine, and a busy one fails. The examples are the same in every run; with
# HYPOTHESIS_PROFILE=explore they are others.
settings.register_profile("nearfield", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "nearfield"))

# A shell has what it runs in the background ignore interrupts, and children inherit that: those that tests interrupt would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)
