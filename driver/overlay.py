# SPDX-License-Identifier: Apache-2.0
"""Which overlay an agent or a verb uses: the file of --overlay, else the one that the configuration file names."""

from __future__ import annotations

from pathlib import Path

from discovery import overlay
from discovery.errors import DocumentError
from driver import config
from driver.errors import ConfigError


def load(given: Path | None, agent: config.AgentConfig) -> overlay.Overlay | None:
    """The overlay that counts; None where nobody names one. ConfigError with one line for every problem of the file."""
    path = given if given is not None else agent.topology.overlay_file
    if path is None:
        return None
    from discovery import overlayfile  # noqa: PLC0415 - pydantic is loaded where a document is read, and only there

    try:
        return overlayfile.read(path)
    except DocumentError as err:
        raise ConfigError(str(err)) from err
