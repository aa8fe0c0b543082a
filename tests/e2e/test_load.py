# SPDX-License-Identifier: Apache-2.0
"""Many pods through the GPUs of a node: every one gets its GPU for itself, and nothing stays behind."""

from __future__ import annotations

import pytest

from tests.e2e.kit import load
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

PODS = 200
AT_ONCE = 4
FILES_MORE = 10
"""A file descriptor lost for each pod would be 200."""


@pytest.mark.timeout(900)
def test_two_hundred_pods_four_at_a_time(site: Site, space: Space) -> None:
    with load.running(space, workers=AT_ONCE, seconds=0.1) as pods:
        pods.more(AT_ONCE)
        before, restarts = site.agent.metrics(), site.agent.restarts()
        pods.more(PODS - AT_ONCE, timeout_s=700)
    told = pods.told
    assert told.wrong == []
    assert told.retried == []
    assert told.pods >= PODS

    after = site.agent.metrics()
    assert site.agent.restarts() == restarts
    for name in ("nearfield_prepare_total", "nearfield_unprepare_total", "nearfield_rpc_total"):
        assert after.total(name, result="error") == before.total(name, result="error"), name
    for name in ("nearfield_prepare_total", "nearfield_unprepare_total"):
        assert after.total(name, result="success") >= before.total(name, result="success") + PODS - 2 * AT_ONCE, name
    assert after.one("nearfield_record_errors_total") == 0
    assert after.one("process_open_fds") <= before.one("process_open_fds") + FILES_MORE
