# SPDX-License-Identifier: Apache-2.0
"""Where the API server is: the pod's service account, and what proxies the environment asks for.

Aspects: outside a pod; files that are missing; IPv6; token files read anew; proxies and their exemptions; secrets stay
out of representations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from driver import errors
from driver.kube import access

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    return tmp_path


def test_a_pod_knows_its_api_server(account: Path) -> None:
    opened = access.in_cluster(POD, account=account)
    assert opened == access.Access(
        server="https://10.96.0.1:443", token_file=account / "token", ca_file=account / "ca.crt"
    )
    assert opened.header() == "Bearer first"


def test_the_token_is_read_anew(account: Path) -> None:
    opened = access.in_cluster(POD, account=account)
    (account / "token").write_text("second")
    assert opened.header() == "Bearer second"


def test_an_ipv6_host_is_bracketed(account: Path) -> None:
    opened = access.in_cluster(POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}, account=account)
    assert opened.server == "https://[fd00::1]:443"


@pytest.mark.parametrize(
    "environment", [{}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, POD | {"KUBERNETES_SERVICE_HOST": ""}]
)
def test_outside_a_pod_the_next_step_is_named(environment: dict[str, str], account: Path) -> None:
    with pytest.raises(errors.ConfigError, match="--kubeconfig"):
        access.in_cluster(environment, account=account)


@pytest.mark.parametrize("name", ["token", "ca.crt"])
def test_a_pod_without_its_token_says_which_file_is_missing(account: Path, name: str) -> None:
    (account / name).unlink()
    with pytest.raises(errors.ConfigError, match=name):
        access.in_cluster(POD, account=account)


@pytest.mark.parametrize(
    ("exempt", "used"),
    [
        ("", True),
        ("example.com", True),
        ("10.96.0.1", False),
        ("localhost, 10.96.0.0/12", False),
        ("10.0.0.0/16", True),
        ("*", False),
        ("nonsense/99", True),
    ],
)
def test_a_proxy_is_used_unless_the_host_is_exempt(account: Path, exempt: str, used: bool) -> None:
    environment = POD | {"HTTPS_PROXY": "http://proxy.corp:3128/", "NO_PROXY": exempt}
    assert access.in_cluster(environment, account=account).proxy == ("proxy.corp:3128" if used else None)


def test_names_are_exempt_with_everything_below_them(account: Path) -> None:
    environment = POD | {"KUBERNETES_SERVICE_HOST": "api.corp", "https_proxy": "proxy", "no_proxy": ".corp"}
    assert access.in_cluster(environment, account=account).proxy is None


@pytest.mark.parametrize("url", ["socks5://proxy:1080", "https://proxy:443", "http://user:word@proxy:3128"])
def test_other_proxies_are_refused_in_words(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="http://HOST:PORT"):
        access.proxy_address(url)


def test_a_proxy_without_a_port_listens_on_80() -> None:
    assert access.proxy_address("http://proxy.corp") == "proxy.corp:80"


def test_secrets_are_not_shown() -> None:
    shown = repr(access.Access(server="https://x", token="geheim", authorization="geheim", certificate_pem="geheim"))
    assert "geheim" not in shown
