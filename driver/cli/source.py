# SPDX-License-Identifier: Apache-2.0
"""The machine that a verb looks at, through the same probe in a child process: this one, one that --mock names, or the one
that the agent beside it replays because its Node's label says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discovery import child, model
from discovery import options as probing
from discovery.errors import DocumentError
from driver import config, options, overlay
from driver.cli import parameters
from driver.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from driver.prepare import ledger

OPTIONS = (
    *("mock", "mock-node-label", "config", "overlay", "kubelet-dir", "state-dir", "sysfs", "procfs", "dev"),
    *("driver-root", "driver-root-mount", "driver-name"),
)
"""The options of every verb that looks at a machine, in one spelling with those of `run`."""

PROBE_TIMEOUT_S = 60.0

_MEMORY = "/dev/shm"  # noqa: S108 - a folder of an unguessable name is made in it
_ROOM_BYTES = 64 << 20


def parse(values: Mapping[str, str | None], *more: str) -> dict[str, Any]:
    """The values of OPTIONS and `more`, by field name of Settings. Raises ConfigError."""
    chosen = [option for option in options.OPTIONS if option.name in (*OPTIONS, *more)]
    given = parameters.given(values)
    parsed = options.parse_given(chosen, given)
    parsed["typed"] = parsed["mock"] is not None and not given["mock"].from_environment
    if parsed["typed"]:
        # Who types a machine wants that one, whatever the agent's variables in the same container say.
        parsed["mock_node_label"] = None
    if parsed["mock"] is None and parsed["mock_node_label"] is None:
        require_roots(parsed)
    return parsed


def require_roots(parsed: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the folders that a probe reads are there."""
    missing = options.missing_roots(sysfs=parsed["sysfs"], procfs=parsed["procfs"], dev=parsed["dev"])
    if missing:
        raise ConfigError("\n".join(missing))


def prepared(parsed: Mapping[str, Any]) -> Sequence[ledger.Entry] | None:
    """The claims that have something of the machine that is looked at, by the record of its agent; None where that cannot be read.
    Nobody has anything of a machine that was typed.
    """
    if parsed["typed"]:
        return ()
    from driver.prepare import store

    path = options.state_dir(parsed)
    try:
        with contextlib.suppress(FileNotFoundError):
            (path / store.FILE_NAME).stat()
            return tuple(store.read_rows(path))
    except (RecordError, OSError):
        return None
    return ()


def held(entries: Sequence[ledger.Entry] | None) -> frozenset[str] | None:
    """Names of the devices that claims have; None where that is not known."""
    return None if entries is None else frozenset(device for entry in entries for device in entry.holds)


def read_config(parsed: Mapping[str, Any]) -> config.AgentConfig:
    """The configuration that --config names, the default one without it. Raises ConfigError."""
    if parsed["config"] is None:
        return config.AgentConfig()
    from driver import configfile

    return configfile.load(parsed["config"])


def take_snapshot(parsed: Mapping[str, Any], agent: config.AgentConfig) -> model.Snapshot:
    """Look at the machine once. Raises ConfigError for a machine that does not exist or an overlay
    that is none, ProbeError when nothing was seen.
    """
    document = overlay.load(parsed["overlay"], agent)
    with place(parsed) as source:
        prober = child.ProbeChild(
            source=source, options=probing.ProbeOptions(rails=agent.topology.rails, overlay=document)
        )
        try:
            return prober.probe(timeout_s=PROBE_TIMEOUT_S)
        finally:
            prober.close()


@contextlib.contextmanager
def place(parsed: Mapping[str, Any]) -> Iterator[probing.Source]:
    """Where the machine's files lie; a machine that --mock names is rendered for the length of the block."""
    if parsed.get("mock_node_label") is not None:
        yield _chosen_by_label(parsed)
        return
    if parsed["mock"] is None:
        driver_root = parsed.get("driver_root_mount", parsed["driver_root"])
        yield probing.Source(
            sys=parsed["sysfs"], proc=parsed["procfs"], dev=parsed["dev"], mock=None, driver_root=driver_root
        )
        return
    from discovery.mock import render, zoo

    try:
        machine = zoo.load(parsed["mock"])
    except DocumentError as err:
        raise ConfigError(f"--mock {err}") from err
    agents = render.MockTree(options.state_dir(parsed) / "mock")
    if not parsed.get("typed", True) and render.stands(machine, agents.directory):
        # The agent whose variables these are replays it here, with its faults and MIG instances.
        yield probing.Source(sys=agents.sys, proc=agents.proc, dev=agents.dev, mock=agents.directory)
        return
    with tempfile.TemporaryDirectory(prefix="nearfield-", dir=_quick_folder()) as directory:
        tree = render.render(machine, Path(directory) / "machine")
        yield probing.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)


def _chosen_by_label(parsed: Mapping[str, Any]) -> probing.Source:
    """The machine as the agent rendered it, faults and all. Raises ConfigError where there is none yet."""
    from discovery.mock import live, render

    tree = render.MockTree(options.state_dir(parsed) / "mock")
    if not (tree.directory / live.FILE).is_file():
        raise ConfigError(
            f"{tree.directory} holds no machine: --mock-node-label shows the one that the agent of this node replays, and none"
            " was chosen yet; look at the agent's log, or give --mock MACHINE"
        )
    return probing.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)


def _quick_folder() -> str | None:
    """Memory for the thousands of small files of a machine, several times faster than a disk; None: the usual place."""
    with contextlib.suppress(OSError):
        if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
            return _MEMORY
    return None
