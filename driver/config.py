# SPDX-License-Identifier: Apache-2.0
"""What the agent is told to do, as frozen values: the options of `nearfield run` and the content of the configuration file.

`options` makes Settings from what somebody typed, `configfile` makes AgentConfig from a file; both validate everything,
so nobody after them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from discovery.address import PciAddress
from driver.sharing import rules


class NumaNodeForm(StrEnum):
    """How `resource.kubernetes.io/numaNode` is written. A list needs the DRAListTypeAttributes feature of the cluster."""

    SCALAR = "scalar"
    LIST = "list"


class LogFormat(StrEnum):
    """One log line: for people, or one JSON object for programs."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe lines that are written. INFO: changes of state only."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a TCP server listens. `host` is empty for every address of the machine; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def overlaps(self, other: Listen) -> bool:
        """Whether both cannot be had at once, as far as the spelling tells."""
        everywhere = ("", "0.0.0.0", "::")  # noqa: S104 - recognised, not bound
        return self.port == other.port != 0 and (
            self.host == other.host or self.host in everywhere or other.host in everywhere
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """Section `publish` of the configuration file."""

    numa_node: NumaNodeForm = NumaNodeForm.SCALAR
    pcie_switches: bool = False
    """Publish all switches above a GPU as a list; needs the DRAListTypeAttributes feature of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyConfig:
    """Section `topology` of the configuration file. `rails`: NIC -> index of its rail. `overlay_file` is absolute where the
    configuration is a file; not read yet.
    """

    overlay_file: Path | None = None
    rails: Mapping[PciAddress, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The content of the configuration file; as it is made here, that of an agent without one."""

    publish: PublishConfig = field(default_factory=PublishConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    sharing: tuple[rules.Rule, ...] = ()
    """Section `sharing`: the first rule that matches a GPU wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All options of `nearfield run`. Every path is absolute."""

    node_name: str
    """The Node's name: name of the pool, field selector of slices, subject of Events."""
    mock: str | None
    """A machine of the zoo or a file; None: this machine, or the one that the Node's label names."""
    mock_node_label: str | None
    """The key of the label of the Node whose value names a machine of the zoo; None: no label is asked for."""
    kubeconfig: Path | None
    """None: the service account of the pod."""
    kubelet_dir: Path
    """kubelet's --root-dir, at the same path here and on the host, as kubelet dials what the agent tells it."""
    cdi_dir: Path
    state_dir: Path
    """The record of prepared claims; by default in the plugin's folder, which every instance of the agent mounts."""
    http: Listen | None
    """/metrics, /healthz and /readyz; None: off."""
    inspect: Listen | None
    """/topology and /snapshot, which show claim names, hence on the loopback by default; None: off."""
    driver_root: Path
    """The root of the NVIDIA driver installation as the host sees it; CDI names it."""
    driver_root_mount: Path
    """The same folder as the agent sees it."""
    mps_dir: Path
    """Where the supervisor of the MPS daemons listens, and where their sockets lie: the same path here, there and on the host, as
    CDI names it.
    """
    cgroup_root: Path | None
    """Below it kubelet has the cgroups of pods; None: /sys/fs/cgroup, or that of the machine that is replayed."""
    sysfs: Path
    procfs: Path
    dev: Path
    driver_name: str
    pod_uid: str | None
    """Part of the socket names, so that two instances can serve during a rolling update; None: fixed names."""
    config: Path | None
    overlay: Path | None
    """The overlay; None: the one that the configuration file names, if any."""
    allow_coexistence: bool
    """Publish although another driver or device plugin hands out the same GPUs."""
    probe_interval_s: float
    collect_interval_s: float
    log_format: LogFormat
    log_level: LogLevel

    @property
    def mocked(self) -> bool:
        """Whether a machine is replayed, also where it is not known yet which."""
        return self.mock is not None or self.mock_node_label is not None

    @property
    def registry_dir(self) -> Path:
        """Where kubelet looks for registration sockets."""
        return self.kubelet_dir / "plugins_registry"

    @property
    def plugin_dir(self) -> Path:
        """Where the agent's service socket is."""
        return self.kubelet_dir / "plugins" / self.driver_name
