# SPDX-License-Identifier: Apache-2.0
"""The pip settings that a build gets: those of the network, the machine's own files left out, secrets readable by nobody else."""

from __future__ import annotations

import configparser
from pathlib import Path

from hack.agentimage import pipsettings


def conf(listing: str, **environment: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.read_string(pipsettings.read(listing, environment).text)
    return dict(parser["global"])


def test_without_settings_pip_has_its_defaults() -> None:
    assert conf("") == {}
    assert pipsettings.read("", {}).certificate is None


def test_an_index_a_proxy_and_trusted_hosts_come_along() -> None:
    listing = (
        "global.index-url='https://user:word=1@index.example/simple'\n"
        "global.proxy='http://proxy.example:3128'\n"
        "install.trusted-host='a.example\\nb.example'\n"
    )
    assert conf(listing) == {
        "index-url": "https://user:word=1@index.example/simple",
        "proxy": "http://proxy.example:3128",
        "trusted-host": "a.example\nb.example",
    }


def test_a_variable_wins_over_a_file() -> None:
    listing = ":env:.index-url='https://variable.example/simple'\nglobal.index-url='https://file.example/simple'\n"
    assert conf(listing)["index-url"] == "https://variable.example/simple"


def test_settings_that_do_not_concern_the_network_stay_here() -> None:
    assert conf("global.target='/srv/x'\nglobal.user='true'\nlist.format='json'\n:env:.require-virtualenv='1'\n") == {}


def test_folders_of_this_machine_are_not_looked_for_in_the_build() -> None:
    assert conf("global.find-links='/srv/wheels'\n") == {}
    assert conf("global.find-links='/srv/wheels\\nhttps://wheels.example/'\n") == {
        "find-links": "https://wheels.example/"
    }


def test_a_certificate_is_named_where_the_build_has_it(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("pem")
    settings = pipsettings.read(f"global.cert='{bundle}'\n", {})
    assert settings.certificate == bundle
    assert f"cert = {pipsettings.CERTIFICATE}" in settings.text
    assert str(tmp_path) not in settings.text


def test_a_bundle_from_the_environment_is_taken_where_pip_has_none(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("pem")
    assert pipsettings.read("", {"SSL_CERT_FILE": str(bundle)}).certificate == bundle
    assert pipsettings.read("", {"SSL_CERT_FILE": str(tmp_path / "gone")}).certificate is None


def test_secrets_are_readable_by_this_user_only(tmp_path: Path) -> None:
    secrets = pipsettings.read("", {}).write(tmp_path)
    assert sorted(secrets) == ["pip.conf", "pip.crt"]
    assert {path.stat().st_mode & 0o777 for path in secrets.values()} == {0o600}


def test_settings_of_this_machine_are_read_from_its_pip() -> None:
    assert pipsettings.of_this_machine().text.startswith("[global]\n")
