# SPDX-License-Identifier: Apache-2.0
"""`python -m driver.cli`: the command line where no script is installed."""

from __future__ import annotations

from driver.cli import main

main.main()
