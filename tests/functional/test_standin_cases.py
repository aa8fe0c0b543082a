# SPDX-License-Identifier: Apache-2.0
"""The stand-in API server drops and refuses what the real one of the same release does (tests/e2e asks that one)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from driver.kube import access, client
from driver.standin import apiserver
from tests.fakes import server_cases


@pytest.fixture(scope="module", params=server_cases.RELEASES)
def asked(request: pytest.FixtureRequest) -> Iterator[tuple[str, client.KubeClient]]:
    with apiserver.ApiServer(version=request.param) as server:
        kube = client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="tests/0")
        yield request.param, kube
        kube.close()


@pytest.mark.parametrize("case", server_cases.CASES, ids=lambda case: case.name)
def test_the_stand_in_answers_like_the_server_of_its_release(
    asked: tuple[str, client.KubeClient], case: server_cases.Case
) -> None:
    release, kube = asked
    said = server_cases.outcome(case, kube)
    assert server_cases.agrees(case, release, said), said
