# SPDX-License-Identifier: Apache-2.0
"""Many pods through the GPUs of a node: every one gets its GPU for itself, and nothing stays behind."""

from __future__ import annotations

import pytest

from tests.e2e.kit import load, make, waiting
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

PODS = 200
AT_ONCE = 4
DONE = ("nearfield_prepare_total", "nearfield_unprepare_total")
FILES_MORE = 10
"""A file descriptor lost for each pod would be 200."""


@pytest.mark.timeout(1500)
def test_two_hundred_pods_four_at_a_time(site: Site, space: Space) -> None:
    done = {name: site.agent.metrics().total(name, result="success") for name in DONE}
    with load.running(space, workers=AT_ONCE, seconds=0.1) as pods:
        pods.more(AT_ONCE)
        before, restarts = site.agent.metrics(), site.agent.restarts()
        pods.more(PODS - AT_ONCE, timeout_s=1300)
    told = pods.told
    assert told.wrong == []
    assert told.retried == []
    assert told.pods >= PODS
    waiting.until(lambda: site.kubelet.claims_in_use(make.CLASS) == 0, "every claim unprepared")

    after = site.agent.metrics()
    assert site.agent.restarts() == restarts
    for name in (*DONE, "nearfield_rpc_total"):
        assert after.total(name, result="error") == before.total(name, result="error"), name
    for name in DONE:
        assert after.total(name, result="success") == done[name] + told.pods, name
    assert after.one("nearfield_record_errors_total") == 0
    assert after.one("process_open_fds") <= before.one("process_open_fds") + FILES_MORE
