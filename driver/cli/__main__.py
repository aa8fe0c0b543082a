# SPDX-License-Identifier: Apache-2.0
"""`python -m driver.cli` is `nearfield`."""

from driver.cli.main import main

main()
