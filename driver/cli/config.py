# SPDX-License-Identifier: Apache-2.0
"""`nearfield config`: the configuration file, before an agent reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from driver.cli import output


@click.group("config", help="Check a configuration file, or print its schema.")
def command() -> None:
    """Nothing happens before a verb."""


@command.command(
    "check",
    short_help="Check a file, and print what is in effect.",
    help="""Check a configuration file, an overlay or the ClaimConfig of a claim as the agent would, and print what is in effect.

    FILE may be - for standard input. Exit status 2, with a line for each problem, where the agent would not start. The overlay
    that a configuration names is read too, unless that comes from standard input. A NCCL topology is printed as the TopologyOverlay that it is. Whether an overlay
    fits a machine, `nearfield topo --overlay` says there.""",
    epilog="""\b
    Examples:
      nearfield config check agent.yaml
      nearfield config check ndv4-topo.xml > overlay.yaml
      kubectl get configmap nearfield -o jsonpath='{.data.agent\\.yaml}' | nearfield config check -
    """,
)
@click.argument("file", type=click.Path(path_type=Path))
@output.option(default=None)
def check(file: Path, output_format: output.Format | None) -> None:
    """Print the effective configuration."""
    from discovery import document, overlayfile
    from discovery.errors import DocumentError
    from driver import configfile, overlay
    from driver.errors import ClaimError, ConfigError
    from driver.prepare import claimconfig

    form = output.Format.JSON if output_format is output.Format.JSON else output.Format.YAML
    from_pipe = file == Path("-")
    try:
        data = sys.stdin.buffer.read(document.MAX_BYTES + 1) if from_pipe else document.read_bytes(file)
        name = Path("standard input") if from_pipe else file
        if overlayfile.is_overlay(data):
            output.write_document(overlayfile.to_json(overlayfile.parse_bytes(data, name)), form)
            return
        source = document.parse(data, name=str(name))
        if isinstance(source.value, dict) and source.value.get("kind") == claimconfig.KIND:
            claimconfig.parse(source.value, where=f"{name}: {claimconfig.KIND}")
            output.write_document(source.value, form)
            return
        effective = configfile.parse(source, folder=Path() if from_pipe else file.parent.absolute())
    except (DocumentError, ClaimError) as err:
        raise ConfigError(str(err)) from err
    if not from_pipe:
        overlay.load(None, effective)
    output.write_document(configfile.to_json(effective), form)


@command.command(
    "schema",
    short_help="Print the JSON Schema of the file.",
    help="""Print the JSON Schema of the configuration file, of an overlay, or of the configuration of a claim, for editors and other checkers.""",
    epilog="""\b
    Examples:
      nearfield config schema > agent.schema.json
      nearfield config schema TopologyOverlay > overlay.schema.json
      nearfield config schema ClaimConfig > claimconfig.schema.json
    """,
)
@click.argument("kind", type=click.Choice(["AgentConfig", "TopologyOverlay", "ClaimConfig"]), default="AgentConfig")
def schema(kind: str) -> None:
    """Print the JSON Schema."""
    sys.stdout.write(json.dumps(_schema(kind), indent=2) + "\n")


def _schema(kind: str) -> dict[str, Any]:
    from discovery import overlayfile
    from driver import configfile
    from driver.prepare import claimconfig, claimschema

    if kind == claimconfig.KIND:
        return claimschema.json_schema()
    return overlayfile.json_schema() if kind == overlayfile.KIND else configfile.json_schema()
