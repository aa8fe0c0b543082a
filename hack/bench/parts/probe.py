# SPDX-License-Identifier: Apache-2.0
"""To come."""

from __future__ import annotations

from hack.bench import bench as benchmark
from hack.bench import report


def run(bench: benchmark.Bench) -> report.Part:
    """To come."""
    return report.Part(name="probe", left_out=bench.left_out())
