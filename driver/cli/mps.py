# SPDX-License-Identifier: Apache-2.0
"""`nearfield mps`: the supervisor of the MPS daemons of a node, and a look at it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from driver import bell, options
from driver.cli import output, parameters
from driver.mps import values as mps_values

SWEEP_S = 600.0
LOOK_S = 5.0

_RUN = ("driver-root", "driver-root-mount", "mps-dir", "log-format", "log-level")
_STATUS = ("mps-dir",)


class _Verbs(click.Group):
    """A group whose verb is `run` where none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put in the verb that is meant."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args.insert(0, "run")
        return super().parse_args(ctx, args)


@click.group(
    "mps",
    cls=_Verbs,
    help="""Supervise the MPS daemons of this node, or show them.

    Without a verb of its own it supervises them (`nearfield mps run`). GPUs that are shared by NVIDIA's Multi-Process Service
    need a control daemon each, which must not end with the agent. The supervisor starts one when the agent asks for the first share
    of a device, starts it again when it ends, and ends it with the last share.""",
    epilog="""\b
    Examples:
      nearfield mps
      nearfield mps status -o json
    """,
)
def command() -> None:
    """Nothing happens before a verb."""


@command.command(
    "run",
    help="""Supervise the MPS daemons of this node until SIGTERM or SIGINT, which end the daemons, and with them the programs that use
    them.""",
)
@parameters.add(*_RUN)
def run(**values: str | None) -> None:
    """Serve until told to stop."""
    parameters.refuse_misspelt_variables(os.environ)
    settings = _parsed(_RUN, values)
    from driver.mps import server, supervisor
    from driver.observe import logs
    from driver.prepare import rootfs

    logs.set_up(settings["log_format"], settings["log_level"])
    stop, ended = threading.Event(), bell.Bell()

    def end(*_: object) -> None:
        ended.ring()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ended.wake_by_signals()
    directory: Path = settings["mps_dir"]
    root = rootfs.DriverRoot(settings["driver_root"], mount=settings.get("driver_root_mount", settings["driver_root"]))
    kept = supervisor.Supervisor(directory, root)
    kept.begin(stop)
    serving = server.Server(kept, directory)
    logs.logger.info("The MPS supervisor serves %s: %s", directory, _summary(kept.ability()))
    try:
        while not ended.wait(SWEEP_S):
            kept.sweep()
    finally:
        serving.stop()
        kept.stop()
    sys.stderr.flush()


@command.command(
    "status",
    help="""Show the MPS daemons of this node, as the supervisor tells. Exit status 0 says that one serves.""",
    epilog="""\b
    Examples:
      nearfield mps status
      nearfield mps status -o json
    """,
)
@parameters.add(*_STATUS)
@output.option()
def status(output_format: output.Format, **values: str | None) -> None:
    """List the daemons."""
    from driver.mps import client

    reached = client.Client(_parsed(_STATUS, values)["mps_dir"])
    told = reached.status(timeout_s=LOOK_S)
    ability = reached.ability()
    if output_format is not output.Format.TABLE:
        output.write_document(_document(told, ability), output_format)
        return
    output.write_line(
        f"Supervisor {told.instance[:8]}: {'it does not answer' if ability is None else _summary(ability)}"
    )
    if told.daemons:
        output.write_table(
            ("DEVICE", "PROTOCOL", "STATE", "SHARES", "CLIENTS", "RESTARTS", "ERROR"),
            [
                (
                    daemon.device,
                    daemon.protocol,
                    f"{daemon.state} for {daemon.since_s:.0f} s",
                    str(len(daemon.shares)),
                    output.MISSING if daemon.clients is None else str(daemon.clients),
                    str(daemon.restarts),
                    daemon.error or output.MISSING,
                )
                for daemon in told.daemons.values()
            ],
        )
    else:
        output.write_line("No device is shared by MPS.")


def _parsed(names: tuple[str, ...], values: dict[str, str | None]) -> dict[str, Any]:
    return options.parse_given([option for option in options.OPTIONS if option.name in names], parameters.given(values))


def _summary(ability: mps_values.Ability) -> str:
    """What a supervisor can do, in a line."""
    parts = [f"{ability.program or 'no control program'}{f' ({ability.version})' if ability.version else ''}"]
    parts.append(f"MPS {' and '.join(sorted(ability.protocols)) or 'not at all'}")
    parts += dict.fromkeys(ability.reasons.values())
    return "; ".join(parts)


def _document(told: mps_values.Status, ability: mps_values.Ability | None) -> dict[str, object]:
    """What the supervisor tells, without what it does not know."""
    from driver.mps import wire

    content = wire.status_json(told)
    daemons = [_known(daemon) for daemon in content["daemons"]]
    able = {} if ability is None else _known(wire.ability_json(ability))
    return output.document("MpsStatus", {**able, "instance": told.instance, "daemons": daemons})


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
