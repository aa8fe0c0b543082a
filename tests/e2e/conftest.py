# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the scenarios. `space` is what most of them need: a namespace on a node with the agent.

A file whose scenarios need another cluster defines `site` for itself, with module scope, by `sites.other(...)`; everything
else then is about that one. One that needs another machine only says so by the mark `machine`. After every test nothing may
be left of it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import urllib3

from hack.realnode import components
from tests.e2e.kit import collect, left, machines
from tests.e2e.kit.agent import Agent
from tests.e2e.kit.api import Api, ApiError
from tests.e2e.kit.sites import Settings, Site, Sites
from tests.e2e.kit.space import Space

STANDING_S = 60.0
_NUMBERS = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Says which marks there are."""
    config.addinivalue_line(
        "markers", "machine(name): the mock machine of the zoo, or file of tests/e2e/machines, that the scenario needs"
    )


@pytest.fixture(scope="session")
def sites() -> Sites:
    """Who brings clusters up."""
    return Sites(Settings.from_environment())


@pytest.fixture(scope="session")
def site(sites: Sites) -> Iterator[Site]:
    """The cluster of most tests: Kubernetes with its defaults, the agent on a mock DGX H100."""
    with sites.default() as found:
        yield found


@pytest.fixture
def api(site: Site) -> Api:
    """Its API server, as the administrator."""
    return site.api


@pytest.fixture
def agent(site: Site) -> Agent:
    """Its agent."""
    return site.agent


@pytest.fixture(scope="session")
def changed_machines() -> dict[str, str]:
    """Which clusters have the machine that a mark asked for, until a test without one comes."""
    return {}


@pytest.fixture(autouse=True)
def nothing_left(
    request: pytest.FixtureRequest, site: Site, sites: Sites, changed_machines: dict[str, str]
) -> Iterator[left.Leftovers]:
    """After every test: no pod, claim, record, CDI file or socket is left of it, and the slices are those of before."""
    _stand_up(site)
    mark = request.node.get_closest_marker("machine")
    machines.bring(site, mark.args[0] if mark is not None else None, changed=changed_machines)
    site.agent.remember()
    before = left.Leftovers(api=site.api, agent=site.agent, disk=site.disk, kubelet=site.kubelet)
    yield before
    try:
        before.require_nothing()
    except AssertionError:
        _collect(request.node, site, sites, when="-left")
        raise
    finally:
        with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
            before.remove_namespaces()


@pytest.fixture
def spaces(request: pytest.FixtureRequest, nothing_left: left.Leftovers, site: Site) -> Iterator[Callable[[], Space]]:
    """Makes namespaces for a test that needs several."""
    made: list[Space] = []

    def make() -> Space:
        short = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
        space = Space(site.api, site.cluster, f"e2e-{short}-{next(_NUMBERS)}")
        made.append(space)
        space.open()
        return space

    yield make
    with contextlib.ExitStack() as stack:
        for space in made:
            stack.callback(space.close)
        _start_components(site)


@pytest.fixture
def space(spaces: Callable[[], Space]) -> Space:
    """The namespace of the test."""
    return spaces()


def _stand_up(site: Site) -> None:
    """One test that failed half-way with the API server stopped, or with another agent, does not make all others fail."""
    _start_components(site)
    try:
        site.agent.wait_ready(timeout_s=STANDING_S)
    except AssertionError:
        site.agent.restore()


def _start_components(site: Site) -> None:
    """Start what a test has stopped and not started again."""
    stopped = [component for component in components.ORDER if site.cluster.pid(component) is None]
    for component in stopped:
        site.cluster.start(component)
    if stopped:
        site.cluster.wait_api()
        site.cluster.wait_node()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Collects what there is to see when a test has failed, before its objects are deleted."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        site, sites = item.funcargs.get("site"), item.funcargs.get("sites")
        if isinstance(site, Site) and isinstance(sites, Sites):
            _collect(item, site, sites)
    return report  # type: ignore[return-value]


def _collect(item: pytest.Item, site: Site, sites: Sites, *, when: str = "") -> None:
    name = re.sub("[^A-Za-z0-9_.-]+", "-", item.name) + when
    into = sites.settings.out / name
    collect.collect(into, cluster=site.cluster, disk=site.disk)
    item.add_report_section("call", "collected", f"What was to be seen after the failure lies in {into}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what scenarios measured (`record_property`), though no scenario judges it."""
    measured = [
        f"{report.nodeid}: {name}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
    ]
    if measured:
        terminalreporter.section("measured")
        for line in measured:
            terminalreporter.line(line)
