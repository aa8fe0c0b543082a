# SPDX-License-Identifier: Apache-2.0
"""Options on the command line and in the environment.

- the command line wins over the variable, the variable over the default; a variable that is set but empty counts
- an error names what was used: the option or the variable
- a switch with and without its value
- misspelt variables are refused, those that kubelet sets for a Service are not
- `run`: every option reaches Settings; paths that must be there; socket paths that must fit
- the help names every option with its variable and its default
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from driver import config, options
from driver.cli import parameters, run_options
from driver.errors import ConfigError

built: list[config.Settings] = []


@click.command()
@run_options.options
def run(**values: str | None) -> None:
    built.append(run_options.settings(**values))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for option in options.OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    built.clear()
    yield
    built.clear()


def settings(*arguments: str, env: dict[str, str] | None = None) -> config.Settings:
    """The settings that `run` builds. Raises what it raises."""
    result = CliRunner().invoke(run, arguments, env=env, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return built[-1]


def test_the_nearest_word_wins() -> None:
    env = {"NEARFIELD_NODE_NAME": "from-env", "NEARFIELD_PROBE_INTERVAL": "5s"}
    assert settings(env=env).node_name == "from-env"
    assert settings("--node-name", "typed", env=env).node_name == "typed"
    assert settings(env=env).probe_interval_s == 5
    assert settings("--probe-interval", "7s", env=env).probe_interval_s == 7
    assert settings("--node-name=n").probe_interval_s == 60


def test_an_empty_variable_counts() -> None:
    env = {"NEARFIELD_HTTP": "", "NEARFIELD_MOCK": ""}
    assert settings("--node-name=n", env=env).http is None
    with pytest.raises(ConfigError, match=r"^NEARFIELD_KUBELET_DIR='': empty$"):
        settings("--node-name=n", env={"NEARFIELD_KUBELET_DIR": ""})


def test_errors_name_what_was_used() -> None:
    with pytest.raises(ConfigError, match=r"^NEARFIELD_LOG_LEVEL=loud: not one of"):
        settings("--node-name=n", env={"NEARFIELD_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match=r"^--log-level loud: not one of"):
        settings("--node-name=n", "--log-level=loud", env={"NEARFIELD_LOG_LEVEL": "info"})
    with pytest.raises(ConfigError, match=r"^--node-name \(or NEARFIELD_NODE_NAME\) is missing$"):
        settings()


@pytest.mark.parametrize(
    ("arguments", "env", "on"),
    [
        ((), {}, False),
        (("--allow-coexistence",), {}, True),
        (("--allow-coexistence", "--log-level=info"), {}, True),
        (("--allow-coexistence=false",), {"NEARFIELD_ALLOW_COEXISTENCE": "true"}, False),
        ((), {"NEARFIELD_ALLOW_COEXISTENCE": "true"}, True),
        ((), {"NEARFIELD_ALLOW_COEXISTENCE": "0"}, False),
        ((), {"NEARFIELD_ALLOW_COEXISTENCE": ""}, False),
    ],
)
def test_a_switch(arguments: tuple[str, ...], env: dict[str, str], on: bool) -> None:
    assert settings("--node-name=n", *arguments, env=env).allow_coexistence is on


def test_the_mock_excludes_roots_however_they_were_given() -> None:
    with pytest.raises(ConfigError, match=r"^--mock brings its own machine: leave out --sysfs, or --mock$"):
        settings("--node-name=n", "--mock=dgx-h100", env={"NEARFIELD_SYSFS": "/sys"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NEARFIELD_NODENAME", "NEARFIELD_NODE_NAME"),
        ("NEARFIELD_KUBE_CONFIG", "NEARFIELD_KUBECONFIG"),
        ("NEARFIELD_LOGLEVEL", "NEARFIELD_LOG_LEVEL"),
        ("NEARFIELD_PROBE_INTERVAL_S", "NEARFIELD_PROBE_INTERVAL"),
    ],
)
def test_misspelt_variables_are_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} in the environment is no option; did you mean {meant}\?$"):
        settings("--node-name=n", env={name: "x"})


def test_other_variables_are_nobody_s_mistake() -> None:
    parameters.refuse_misspelt_variables(
        [
            "NODE_NAME",
            "NEARFIELD_SERVICE_HOST",
            "NEARFIELD_SERVICE_PORT",
            "NEARFIELD_SERVICE_PORT_METRICS",
            "NEARFIELD_PORT",
            "NEARFIELD_PORT_9417_TCP",
            "NEARFIELD_PORT_9417_TCP_ADDR",
            "NEARFIELD_HTTPS_PORT",
            "NEARFIELD_SOMETHING_ELSE",
            *(option.variable for option in options.OPTIONS),
        ]
    )


def test_every_option_reaches_the_settings(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    given = {
        "node-name": "n1",
        "kubeconfig": str(kubeconfig),
        "kubelet-dir": "/k",
        "cdi-dir": "/c",
        "state-dir": "/s",
        "http": "[::1]:1",
        "inspect": ":2",
        "driver-root": "/r",
        "driver-root-mount": "/m",
        "mps-dir": "/p",
        "cgroup-root": str(tmp_path),
        "sysfs": str(tmp_path),
        "procfs": str(tmp_path),
        "dev": str(tmp_path),
        "driver-name": "gpu.example.com",
        "pod-uid": "u-1",
        "config": "/f",
        "overlay": "/o",
        "allow-coexistence": "true",
        "probe-interval": "1s",
        "collect-interval": "2s",
        "log-format": "json",
        "log-level": "debug",
    }
    typed = settings(*(f"--{name}={value}" for name, value in given.items()))
    from_environment = settings(
        env={f"NEARFIELD_{name.replace('-', '_').upper()}": value for name, value in given.items()}
    )
    assert typed == from_environment
    assert typed == config.Settings(
        node_name="n1",
        mock=None,
        mock_node_label=None,
        kubeconfig=kubeconfig,
        kubelet_dir=Path("/k"),
        cdi_dir=Path("/c"),
        state_dir=Path("/s"),
        http=config.Listen(host="::1", port=1),
        inspect=config.Listen(host="", port=2),
        driver_root=Path("/r"),
        driver_root_mount=Path("/m"),
        mps_dir=Path("/p"),
        cgroup_root=tmp_path,
        sysfs=tmp_path,
        procfs=tmp_path,
        dev=tmp_path,
        driver_name="gpu.example.com",
        pod_uid="u-1",
        config=Path("/f"),
        overlay=Path("/o"),
        allow_coexistence=True,
        probe_interval_s=1,
        collect_interval_s=2,
        log_format=config.LogFormat.JSON,
        log_level=config.LogLevel.DEBUG,
    )


def test_what_is_missing_and_what_cannot_fit_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        settings("--node-name=n", f"--sysfs={tmp_path}/none", f"--kubelet-dir=/{'k' * 90}")
    first, second = str(raised.value).splitlines()
    assert first == f"--sysfs {tmp_path}/none: not a directory"
    assert second.startswith("--kubelet-dir /kkk")
    assert "107" in second


def test_the_help_names_option_variable_and_default() -> None:
    text = " ".join(CliRunner().invoke(run, ["--help"], terminal_width=200).output.split())
    for option in options.OPTIONS:
        assert f"{option.flag} " in text
        assert option.variable in text
        assert option.help in text
        if option.derived or option.default:
            assert f"default: ({option.derived or option.default})" in text
