# SPDX-License-Identifier: Apache-2.0
"""The options of `nearfield run`.

- the table has one entry for each field of Settings; the documented defaults hold
- every parser: what it takes, what it refuses, and that the refusal names option (or variable) and value
- defaults that follow from other options
- contradictions: mock with roots, one address for two servers, folders that spoil each other
- all problems are said at once
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver import config, options
from driver.errors import ConfigError

ROOT = Path(__file__).parents[4]


def build(**texts: str) -> config.Settings:
    return options.build_settings(
        {name: options.Given(text=text) for name, text in {"node_name": "n1", **texts}.items()}
    )


def refusal(**texts: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        build(**texts)
    return str(raised.value).splitlines()


def test_there_is_one_option_for_each_setting() -> None:
    settings = [field.name.removesuffix("_s") for field in dataclasses.fields(config.Settings)]
    assert [option.field for option in options.OPTIONS] == settings


def test_the_documented_defaults() -> None:
    assert build() == config.Settings(
        node_name="n1",
        mock=None,
        mock_node_label=None,
        kubeconfig=None,
        kubelet_dir=Path("/var/lib/kubelet"),
        cdi_dir=Path("/var/run/cdi"),
        state_dir=Path("/var/lib/kubelet/plugins/gpu.nearfield.dev/state"),
        http=config.Listen(host="", port=9417),
        inspect=config.Listen(host="127.0.0.1", port=9418),
        driver_root=Path("/"),
        driver_root_mount=Path("/"),
        mps_dir=Path("/run/nearfield/mps"),
        cgroup_root=None,
        sysfs=Path("/sys"),
        procfs=Path("/proc"),
        dev=Path("/dev"),
        driver_name="gpu.nearfield.dev",
        pod_uid=None,
        config=None,
        overlay=None,
        allow_coexistence=False,
        probe_interval_s=60.0,
        collect_interval_s=600.0,
        log_format=config.LogFormat.TEXT,
        log_level=config.LogLevel.INFO,
    )


def test_defaults_follow_the_options_that_they_are_derived_from() -> None:
    settings = build(kubelet_dir="/k", driver_name="gpu.example.com", driver_root="/run/nvidia/driver")
    assert settings.state_dir == Path("/k/plugins/gpu.example.com/state")
    assert settings.plugin_dir == Path("/k/plugins/gpu.example.com")
    assert settings.registry_dir == Path("/k/plugins_registry")
    assert settings.driver_root_mount == Path("/run/nvidia/driver")
    assert build(driver_root_mount="/host").driver_root_mount == Path("/host")


def test_relative_paths_are_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert build(cdi_dir="cdi").cdi_dir == tmp_path / "cdi"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("10m", 600),
        ("1h30m", 5400),
        ("1h", 3600),
        ("1h1m1s", 3661),
        ("500ms", 0.5),
        ("2m500ms", 120.5),
        ("24h", 86400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert build(probe_interval=text).probe_interval_s == seconds


@given(st.integers(0, 99), st.integers(1, 99), st.integers(0, 99))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    assert options.parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    "text", ["", "s", "10", "10 s", "-1s", "1.5h", "10m1h", "1d", "1s1s", "\u0661s", "1" * 20 + "s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 60s, 10m or 1h30m"):
        options.parse_duration(text)


def test_a_number_without_a_unit_is_asked_about() -> None:
    assert refusal(probe_interval="60") == [
        "--probe-interval 60: not a duration such as 60s, 10m or 1h30m; did you mean 60s?"
    ]


@pytest.mark.parametrize("text", ["0s", "99ms", "25h"])
def test_intervals_have_bounds(text: str) -> None:
    assert refusal(collect_interval=text) == [f"--collect-interval {text}: not between 100ms and 24h"]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":9417", "", 9417),
        ("127.0.0.1:9418", "127.0.0.1", 9418),
        ("[::1]:9418", "::1", 9418),
        ("[::]:0", "::", 0),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_addresses_to_listen_at(text: str, host: str, port: int) -> None:
    listen = build(http=text, inspect="").http
    assert listen == config.Listen(host=host, port=port)
    assert str(listen) == text


def test_an_empty_address_is_off() -> None:
    settings = build(http="", inspect="")
    assert (settings.http, settings.inspect) == (None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9417", "not host:port or :port; did you mean :9417?"),
        ("localhost", "not host:port or :port"),
        (":", "'' is not a port from 0 to 65535"),
        (":http", "'http' is not a port from 0 to 65535"),
        (":65536", "'65536' is not a port from 0 to 65535"),
        (":-1", "'-1' is not a port from 0 to 65535"),
        (":\u0661", "'\u0661' is not a port from 0 to 65535"),
        ("::1:9418", "an IPv6 address is written in brackets: [::1]:9418"),
        ("[::1:9418", "an IPv6 address is written in brackets: [::1]:9418"),
        ("[localhost]:1", "'localhost' is not an IPv6 address"),
        ("127.0.0.256:1", "'127.0.0.256' is neither an IP address nor a host name"),
        ("a_b:1", "'a_b' is neither an IP address nor a host name"),
        ("http://x:1", "an IPv6 address is written in brackets: [::1]:9418"),
    ],
)
def test_what_is_no_address_to_listen_at(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".+") as raised:
        options.parse_listen(text)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("node_name", "", "--node-name '': not a node name"),
        ("node_name", "Node1", "--node-name Node1: not a node name"),
        ("node_name", "a..b", "--node-name a..b: not a node name"),
        ("node_name", "a\nb", "--node-name 'a\\nb': not a node name"),
        ("node_name", "-a", "--node-name -a: not a node name"),
        ("node_name", "a." * 127, "--node-name " + repr(("a." * 127)[:80]) + ": not a node name"),
        ("driver_name", "GPU.nearfield.dev", "--driver-name GPU.nearfield.dev: a driver name is lower case"),
        ("driver_name", "a" * 64, f"--driver-name {'a' * 64}: longer than 63 characters"),
        ("driver_name", "gpu_x", "--driver-name gpu_x: not a DNS name such as gpu.nearfield.dev"),
        ("driver_name", "gpu.nearfield.dev\n", "--driver-name 'gpu.nearfield.dev\\n': not a DNS name"),
        ("driver_name", "4gpu.dev", "--driver-name 4gpu.dev: a driver name is also the vendor in CDI"),
        ("pod_uid", "../x", "--pod-uid ../x: not a pod UID"),
        ("pod_uid", "a" * 64, f"--pod-uid {'a' * 64}: not a pod UID"),
        ("driver_root", "run/nvidia", "--driver-root run/nvidia: a path on the host is absolute"),
        ("driver_root", "/run/../x", "--driver-root /run/../x: a path on the host is absolute"),
        ("kubelet_dir", "", "--kubelet-dir '': empty"),
        ("cdi_dir", "/a\0b", "--cdi-dir '/a\\x00b': a path has no NUL byte"),
        ("log_level", "loud", "--log-level loud: not one of debug, info, warning, error"),
        ("log_format", "xml", "--log-format xml: not one of text, json"),
        ("allow_coexistence", "maybe", "--allow-coexistence maybe: not true or false"),
    ],
)
def test_refusals_name_option_and_value(name: str, text: str, message: str) -> None:
    (line,) = refusal(**{name: text})
    assert line.startswith(message)


def test_the_environment_is_named_where_the_value_came_from_it() -> None:
    given = {"node_name": options.Given(text="N", from_environment=True)}
    with pytest.raises(ConfigError, match=r"^NEARFIELD_NODE_NAME=N: not a node name"):
        options.build_settings(given)


def test_empty_means_none_where_there_is_a_none() -> None:
    settings = build(mock="", kubeconfig="", pod_uid="", config="", allow_coexistence="")
    assert (settings.mock, settings.kubeconfig, settings.pod_uid, settings.config) == (None, None, None, None)
    assert settings.allow_coexistence is False


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        options.build_settings({"log_level": options.Given(text="x"), "http": options.Given(text="x")})
    assert str(raised.value).splitlines() == [
        "--node-name (or NEARFIELD_NODE_NAME) is missing",
        "--http x: not host:port or :port",
        "--log-level x: not one of debug, info, warning, error",
    ]


def test_a_mock_brings_its_own_machine() -> None:
    assert refusal(mock="dgx-h100", sysfs="/sys", dev="/x") == [
        "--mock brings its own machine: leave out --sysfs, --dev, or --mock"
    ]
    assert refusal(mock_node_label="x/y", procfs="/p") == [
        "--mock-node-label brings its own machine: leave out --procfs, or --mock-node-label"
    ]
    assert (build(mock_node_label="x").mocked, build(mock="x").mocked, build().mocked) == (True, True, False)


@pytest.mark.parametrize(
    "key", ["machine", "mock.nearfield.dev/machine", "a.b/C_d.e-f", "n" * 63, f"{'p' * 63}.{'q' * 63}/x"]
)
def test_a_label_key_as_kubernetes_takes_it(key: str) -> None:
    assert build(mock_node_label=key).mock_node_label == key


@pytest.mark.parametrize("key", ["/x", "a/", "a/b/c", "A.b/x", "-x", "x-", "n" * 64, "a=b", "ä", f"{'p' * 64}/x", " x"])
def test_what_is_no_label_key(key: str) -> None:
    assert refusal(mock_node_label=key) == [
        f"--mock-node-label {key}: not the key of a label such as mock.nearfield.dev/machine"
    ]


@pytest.mark.parametrize(
    ("http", "inspect"),
    [(":9418", "127.0.0.1:9418"), ("[::1]:1", "[::1]:1"), ("10.0.0.1:1", "0.0.0.0:1"), (":1", ":1")],
)
def test_two_servers_need_two_addresses(http: str, inspect: str) -> None:
    assert refusal(http=http, inspect=inspect) == [
        f"--http {http} and --inspect {inspect} are the same address: give one another port"
    ]


@pytest.mark.parametrize(
    ("http", "inspect"), [(":0", ":0"), (":1", ":2"), ("127.0.0.1:1", "127.0.0.2:1"), ("", ":9417"), (":9418", "")]
)
def test_two_servers_beside_each_other(http: str, inspect: str) -> None:
    assert build(http=http, inspect=inspect).node_name == "n1"


def test_folders_that_spoil_each_other() -> None:
    (line,) = refusal(state_dir="/var/lib/kubelet/plugins_registry/x")
    assert line.startswith("--state-dir /var/lib/kubelet/plugins_registry/x: kubelet searches")
    (line,) = refusal(state_dir="/x", cdi_dir="/x")
    assert line.startswith("--state-dir and --cdi-dir are both /x")


def test_paths_that_must_be_there_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    settings = build(sysfs=missing, procfs=str(tmp_path), dev=missing, kubeconfig=missing)
    assert options.missing_paths(settings) == (
        f"--sysfs {missing}: not a directory",
        f"--dev {missing}: not a directory",
        f"--kubeconfig {missing}: no such file",
    )
    assert options.missing_paths(build(mock="dgx-h100")) == ()


@given(st.sampled_from(options.OPTIONS), st.text(max_size=40))
def test_any_text_is_taken_or_refused_with_the_option_s_name(option: options.Option, text: str) -> None:
    given = {"node_name": options.Given(text="n1"), option.field: options.Given(text=text)}
    try:
        message = f"{option.flag} {options.build_settings(given)}"
    except ConfigError as err:
        message = str(err)
    assert option.flag in message


def test_the_documentation_lists_every_option() -> None:
    """To rewrite the table: python -m driver.options."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert options.table() in page
