# SPDX-License-Identifier: Apache-2.0
"""The real API server of 1.37 drops and refuses what the table says that the stand-in is held to, too.

Those of 1.35 and 1.36 are asked in test_older_servers.
"""

from __future__ import annotations

import contextlib

from driver.kube import client
from tests.e2e.kit.sites import Site
from tests.fakes import server_cases


def test_the_server_answers_as_the_table_says(site: Site) -> None:
    with contextlib.closing(client.KubeClient.load(site.cluster.kubeconfig, user_agent="tests/0")) as kube:
        assert server_cases.disagreements(kube, "1.37") == {}
