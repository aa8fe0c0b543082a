# SPDX-License-Identifier: Apache-2.0
"""Reads a configuration file in a process of its own: what checks it takes as much memory as a sixth of the agent, which reads one
now and then and runs for months, and a hostile file may keep it busy for seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discovery import address
from driver import config, quantity
from driver.errors import ConfigError
from driver.sharing import rules, shares

TIMEOUT_S = 60.0
INVALID = 2
"""Exit status of `python -m driver.configfile` for a file that is not valid; the problems are on its standard error."""


class Reading:
    """A file that is being read from now on. `result` once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        if not path.is_file():
            # A pipe has a name here that it has in no other process, and what is not there needs none to be said.
            return
        root = str(Path(__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "driver.configfile", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root},
            )
        except OSError as error:
            raise ConfigError(f"{path}: no process could be started to read it: {error}") from error

    def result(self) -> config.AgentConfig:
        """What is in the file. ConfigError with one line for every problem."""
        if self._process is None:
            from driver import configfile  # noqa: PLC0415 - only here it is needed in this process

            return configfile.load(self._path)
        try:
            answer, said = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.communicate()
            raise ConfigError(f"{self._path}: was not read within {TIMEOUT_S:g} s") from error
        status = self._process.returncode
        if status == INVALID:
            raise ConfigError(said.strip())
        if status:
            last = said.strip().splitlines()[-1:] or ["nothing was said"]
            raise ConfigError(f"{self._path}: the process that read it ended with status {status}: {last[0]}")
        return decode(json.loads(answer))


def load(path: Path) -> config.AgentConfig:
    """The configuration in a file. ConfigError with one line for every problem."""
    return Reading(path).result()


def decode(body: Mapping[str, Any]) -> config.AgentConfig:
    """What `configfile.to_json` made."""
    publish, topology = body["publish"], body["topology"]
    return config.AgentConfig(
        publish=config.PublishConfig(
            numa_node=config.NumaNodeForm(publish["numaNode"]), pcie_switches=publish["pcieSwitches"]
        ),
        topology=config.TopologyConfig(
            overlay_file=Path(topology["overlayFile"]) if topology["overlayFile"] else None,
            rails={address.parse(entry["nic"]): entry["rail"] for entry in topology["rails"]},
        ),
        sharing=tuple(map(_rule, body["sharing"])),
    )


def _rule(body: Mapping[str, Any]) -> rules.Rule:
    match = body["match"]
    return rules.Rule(
        match=rules.Match(
            address=address.parse(match["address"]) if "address" in match else None,
            uuid=match.get("uuid"),
            product=match.get("product"),
            numa_node=match.get("numaNode"),
            count=match.get("count"),
        ),
        mode=rules.Mode(body["mode"]),
        fallback=rules.Fallback(body["fallback"]),
        profiles=tuple(body.get("profiles", ())),
        shares=_shares(body["shares"]) if "shares" in body else None,
    )


def _shares(body: Mapping[str, Any]) -> shares.Shares:
    charge = body["defaultCompute"]
    return shares.Shares(
        memory_step=int(quantity.parse(body["memoryStep"])),
        compute_step=body["computeStep"],
        max_sharers=body["maxSharers"],
        memory=shares.Memory(body["memory"]),
        compute=shares.Compute(body["compute"]),
        default_compute=charge if isinstance(charge, int) else None,
        time_slice=shares.TimeSlice(body["timeSlice"]),
    )
