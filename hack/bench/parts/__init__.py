# SPDX-License-Identifier: Apache-2.0
"""One module a part of the benchmark, each with `run(bench) -> report.Part`; a part starts what it measures and ends it."""
