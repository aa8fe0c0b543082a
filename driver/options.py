# SPDX-License-Identifier: Apache-2.0
"""The options of `nearfield run`: `OPTIONS` is the one table, from which the command line, the environment variables and the
documentation are made; `build_settings` turns what was given into Settings.

Law: unknown, malformed or contradictory input is a ConfigError that names it; there is no default that guesses.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from driver import config, values
from driver.errors import ConfigError

DNS_SUBDOMAIN_MAX = 253
DRIVER_NAME_MAX = 63
"""resource.k8s.io refuses a longer ResourceSlice.spec.driver (DriverNameMaxLength)."""

POD_UID_MAX = 63
INTERVAL_MIN_S = 0.1
INTERVAL_MAX_S = 24 * 3600.0

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_DRIVER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_POD_UID = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m(?!s))?(?:([0-9]{1,9})s)?(?:([0-9]{1,9})ms)?")


def parse_duration(text: str) -> float:
    """Seconds in `90s`, `10m`, `1h30m` or `500ms`. ValueError that says what is expected."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        hint = f"; did you mean {text}s?" if text.isdecimal() else ""
        raise ValueError(f"not a duration such as 60s, 10m or 1h30m{hint}")
    hours, minutes, seconds, milliseconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def parse_interval(text: str) -> float:
    """A duration at which work is repeated."""
    seconds = parse_duration(text)
    if not INTERVAL_MIN_S <= seconds <= INTERVAL_MAX_S:
        raise ValueError("not between 100ms and 24h")
    return seconds


def parse_listen(text: str) -> config.Listen | None:
    """`:9417`, `127.0.0.1:9418`, `[::1]:9418` or `localhost:9418`; empty for none."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon:
        hint = f"; did you mean :{text}?" if text.isdecimal() else ""
        raise ValueError(f"not host:port or :port{hint}")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{port!r} is not a port from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ip(socket.AF_INET6, host):
            raise ValueError(f"{host!r} is not an IPv6 address")
    elif ":" in host:
        raise ValueError("an IPv6 address is written in brackets: [::1]:9418")
    elif host and not _is_ip(socket.AF_INET, host) and (not is_dns_subdomain(host) or host[-1].isdigit()):
        raise ValueError(f"{host!r} is neither an IP address nor a host name")
    return config.Listen(host=host, port=int(port))


def is_dns_subdomain(text: str) -> bool:
    """Whether Kubernetes takes it as an object name (RFC 1123, lower case)."""
    return len(text) <= DNS_SUBDOMAIN_MAX and _DNS_SUBDOMAIN.fullmatch(text) is not None


def parse_node_name(text: str) -> str:
    """The name of a Node."""
    if not is_dns_subdomain(text):
        raise ValueError(
            "not a node name: lower-case letters, digits, '-' and '.', each part beginning and ending with a letter or"
            f" digit, at most {DNS_SUBDOMAIN_MAX} characters"
        )
    return text


def parse_label_key(text: str) -> str | None:
    """The key of a label (`name` or `domain/name`); empty for none."""
    prefix, slash, name = text.rpartition("/")
    if text and (_LABEL_NAME.fullmatch(name) is None or (slash and not is_dns_subdomain(prefix))):
        raise ValueError("not the key of a label such as mock.nearfield.dev/machine")
    return text or None


def parse_driver_name(text: str) -> str:
    """A DRA driver name that can be a CDI vendor too, which must begin with a letter (CDI specification, `kind`)."""
    if len(text) > DRIVER_NAME_MAX:
        raise ValueError(f"longer than {DRIVER_NAME_MAX} characters, which Kubernetes refuses for a driver")
    if text != text.lower():
        raise ValueError("a driver name is lower case")
    if _DRIVER_NAME.fullmatch(text) is None:
        raise ValueError("not a DNS name such as gpu.nearfield.dev")
    if not text[0].isalpha():
        raise ValueError("a driver name is also the vendor in CDI, which begins with a letter")
    return text


def parse_pod_uid(text: str) -> str | None:
    """A pod's UID; empty for none."""
    if text and (len(text) > POD_UID_MAX or _POD_UID.fullmatch(text) is None):
        raise ValueError(f"not a pod UID: letters, digits and '-', at most {POD_UID_MAX} characters")
    return text or None


def parse_path(text: str) -> Path:
    """A path here; a relative one is taken from the working directory."""
    if not text:
        raise ValueError("empty")
    if "\0" in text:
        raise ValueError("a path has no NUL byte")
    return Path(text).absolute()


def parse_host_path(text: str) -> Path:
    """A path on the host, where there is no working directory of ours."""
    path = parse_path(text)
    if not text.startswith("/") or ".." in path.parts:
        raise ValueError("a path on the host is absolute and has no '..'")
    return path


def parse_switch(text: str) -> bool:
    """Yes or no: true or false, 1 or 0; empty for no."""
    match text.lower():
        case "true" | "1":
            return True
        case "false" | "0" | "":
            return False
        case _:
            raise ValueError("not true or false")


def _is_ip(family: socket.AddressFamily, host: str) -> bool:
    try:
        socket.inet_pton(family, host)
    except (OSError, ValueError):
        return False
    return True


def _optional_path(text: str) -> Path | None:
    return parse_path(text) if text else None


def _word(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def parse(text: str) -> StrEnum:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"not one of {', '.join(kind)}") from None

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of `nearfield run`. `default`: as one would write it; `derived`: the rule, where it follows from others."""

    name: str
    metavar: str
    parse: Callable[[str], object]
    help: str
    default: str | None = None
    derived: str | None = None
    required: bool = False

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--{self.name}"

    @property
    def field(self) -> str:
        """As a Python name."""
        return self.name.replace("-", "_")

    @property
    def setting(self) -> str:
        """Its field in Settings, which carries the unit."""
        return f"{self.field}_s" if self.parse is parse_interval else self.field

    @property
    def variable(self) -> str:
        """As in the environment."""
        return f"NEARFIELD_{self.field.upper()}"


OPTIONS: tuple[Option, ...] = (
    Option(name="node-name", metavar="NAME", parse=parse_node_name, required=True, help="Name of this machine's Node."),
    Option(
        name="mock",
        metavar="MACHINE|FILE",
        parse=lambda text: text or None,
        default="",
        help="Replay a machine of `nearfield machines`, a Machine (YAML) or a Recording (JSON, .gz) instead of this one.",
    ),
    Option(
        name="mock-node-label",
        metavar="KEY",
        parse=parse_label_key,
        default="",
        help="Replay the machine that this label of the Node names; where the Node has no such label, --mock counts.",
    ),
    Option(
        name="kubeconfig",
        metavar="FILE",
        parse=_optional_path,
        default="",
        help="How to reach the API server; without it, the pod's service account.",
    ),
    Option(
        name="kubelet-dir",
        metavar="PATH",
        parse=parse_path,
        default="/var/lib/kubelet",
        help="kubelet's --root-dir, mounted at this same path.",
    ),
    Option(
        name="cdi-dir", metavar="PATH", parse=parse_path, default="/var/run/cdi", help="Where CDI specs are written."
    ),
    Option(
        name="state-dir",
        metavar="PATH",
        parse=parse_path,
        derived="KUBELET_DIR/plugins/DRIVER_NAME/state",
        help="The record of prepared claims.",
    ),
    Option(
        name="http",
        metavar="[HOST]:PORT",
        parse=parse_listen,
        default=":9417",
        help="Serve /metrics, /healthz and /readyz; empty: off.",
    ),
    Option(
        name="inspect",
        metavar="[HOST]:PORT",
        parse=parse_listen,
        default="127.0.0.1:9418",
        help="Serve /topology and /snapshot, which show claim names; empty: off.",
    ),
    Option(
        name="driver-root",
        metavar="PATH",
        parse=parse_host_path,
        default="/",
        help="Root of the NVIDIA driver installation on the host.",
    ),
    Option(
        name="driver-root-mount",
        metavar="PATH",
        parse=parse_path,
        derived="DRIVER_ROOT",
        help="Where the agent sees that root.",
    ),
    Option(
        name="mps-dir",
        metavar="PATH",
        parse=parse_host_path,
        default="/run/nearfield/mps",
        help="Folder of the MPS supervisor (`nearfield mps`), the same path here and on the host.",
    ),
    Option(
        name="cgroup-root",
        metavar="PATH",
        parse=parse_path,
        derived="/sys/fs/cgroup; with --mock that of the machine",
        help="Where the agent sees the cgroups of this node, those of pods below it, to limit GPU memory.",
    ),
    Option(
        name="sysfs", metavar="PATH", parse=parse_path, default="/sys", help="Where the agent sees the host's /sys."
    ),
    Option(name="procfs", metavar="PATH", parse=parse_path, default="/proc", help="Where it sees the host's /proc."),
    Option(name="dev", metavar="PATH", parse=parse_path, default="/dev", help="Where it sees the host's /dev."),
    Option(
        name="driver-name",
        metavar="NAME",
        parse=parse_driver_name,
        default=values.DRIVER_NAME,
        help="Driver of the slices, domain of the attributes, CDI vendor.",
    ),
    Option(
        name="pod-uid",
        metavar="UID",
        parse=parse_pod_uid,
        default="",
        help="UID of the agent's pod: lets two instances serve during a rolling update.",
    ),
    Option(name="config", metavar="FILE", parse=_optional_path, default="", help="Configuration file (AgentConfig)."),
    Option(
        name="overlay",
        metavar="FILE",
        parse=_optional_path,
        default="",
        help="What the machine does not tell of its wiring: a TopologyOverlay (YAML) or a NCCL topology (XML).",
    ),
    Option(
        name="allow-coexistence",
        metavar="[true|false]",
        parse=parse_switch,
        default="false",
        help="Publish although another driver or device plugin hands out the same GPUs.",
    ),
    Option(
        name="probe-interval",
        metavar="DURATION",
        parse=parse_interval,
        default="60s",
        help="Time between two looks at the hardware; what the kernel tells is looked at at once.",
    ),
    Option(
        name="collect-interval",
        metavar="DURATION",
        parse=parse_interval,
        default="10m",
        help="Time between two look-ups of the recorded claims.",
    ),
    Option(
        name="log-format",
        metavar="text|json",
        parse=_word(config.LogFormat),
        default="text",
        help="One line, or one JSON object.",
    ),
    Option(
        name="log-level",
        metavar="debug|info|warning|error",
        parse=_word(config.LogLevel),
        default="info",
        help="The least severe lines written.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What somebody gave for an option, on the command line or in its environment variable."""

    text: str
    from_environment: bool = False


def parse_given(chosen: Iterable[Option], given: Mapping[str, Given]) -> dict[str, Any]:
    """The values of some options from what was given, by field name of Settings; the defaults for the rest. An option whose
    default is derived is left out when it was not given.

    Raises ConfigError with one line for every problem.
    """
    problems: list[str] = []
    parsed: dict[str, Any] = {}
    for option in chosen:
        value = given.get(option.field)
        if value is None and option.default is None:
            if option.required:
                problems.append(f"{option.flag} (or {option.variable}) is missing")
            continue
        text = value.text if value is not None else option.default or ""
        try:
            parsed[option.setting] = option.parse(text)
        except ValueError as err:
            problems.append(f"{_spell(option, value, text)}: {err}")
    for name in ("mock", "mock-node-label"):
        roots = [f"--{root}" for root in ("sysfs", "procfs", "dev") if root in given]
        if parsed.get(name.replace("-", "_")) is not None and roots:
            problems.append(f"--{name} brings its own machine: leave out {', '.join(roots)}, or --{name}")
    if problems:
        raise ConfigError("\n".join(problems))
    return parsed


def state_dir(parsed: Mapping[str, Any]) -> Path:
    """The state folder that was given, or the one that follows from kubelet's folder and the driver's name."""
    given = parsed.get("state_dir")
    return given if isinstance(given, Path) else parsed["kubelet_dir"] / "plugins" / parsed["driver_name"] / "state"


def build_settings(given: Mapping[str, Given]) -> config.Settings:
    """The settings from what was given, by field name; the defaults for the rest.

    Raises ConfigError with one line for every problem.
    """
    parsed = parse_given(OPTIONS, given)
    parsed["state_dir"] = state_dir(parsed)
    parsed.setdefault("driver_root_mount", parsed["driver_root"])
    parsed.setdefault("cgroup_root", None)
    settings = config.Settings(**parsed)
    problems = _contradictions(settings)
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def missing_roots(*, sysfs: Path, procfs: Path, dev: Path) -> tuple[str, ...]:
    """Which of the folders that a probe reads are not there, one line each."""
    folders = (("sysfs", sysfs), ("procfs", procfs), ("dev", dev))
    return tuple(f"--{name} {path}: not a directory" for name, path in folders if not path.is_dir())


def missing_paths(settings: config.Settings) -> tuple[str, ...]:
    """What must be there at start and is not, one line each.

    Not looked at: folders that the agent makes itself, and the driver root, which an operator's container may mount later.
    """
    problems: list[str] = []
    if not settings.mocked:
        problems += missing_roots(sysfs=settings.sysfs, procfs=settings.procfs, dev=settings.dev)
    if settings.cgroup_root is not None and not settings.cgroup_root.is_dir():
        problems.append(f"--cgroup-root {settings.cgroup_root}: not a directory")
    if settings.kubeconfig is not None and not settings.kubeconfig.is_file():
        problems.append(f"--kubeconfig {settings.kubeconfig}: no such file")
    return tuple(problems)


def _spell(option: Option, value: Given | None, text: str) -> str:
    shown = text if len(text) <= 80 and text.isprintable() and text else repr(text[:80])
    return f"{option.variable}={shown}" if value is not None and value.from_environment else f"{option.flag} {shown}"


def _contradictions(settings: config.Settings) -> list[str]:
    problems: list[str] = []
    if settings.http is not None and settings.inspect is not None and settings.http.overlaps(settings.inspect):
        problems.append(
            f"--http {settings.http} and --inspect {settings.inspect} are the same address: give one another port"
        )
    if settings.registry_dir in (settings.state_dir, *settings.state_dir.parents):
        problems.append(
            f"--state-dir {settings.state_dir}: kubelet searches {settings.registry_dir} for sockets; use another"
        )
    if settings.state_dir == settings.cdi_dir:
        problems.append(
            f"--state-dir and --cdi-dir are both {settings.cdi_dir}: runtimes read every file in a CDI folder"
        )
    return problems


def table() -> str:
    """The options as a Markdown table, for docs/configuration.md."""
    rows = ["| option | variable | default | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = "required" if option.required else f"`{option.default}`" if option.default else option.derived or ""
        metavar = option.metavar.replace("|", "\\|")
        rows.append(f"| `{option.flag} {metavar}` | `{option.variable}` | {default} | {option.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
