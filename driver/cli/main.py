# SPDX-License-Identifier: Apache-2.0
"""The command `nearfield`. Each verb is a module of this package, imported when it runs.

Law of the door: exit status 0 done, 1 failed, 2 usage or configuration, 130 interrupted, 141 nobody reads the output; a
person sees one line that names the object and the next step, never a traceback.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import click

from driver.cli import failure
from driver.version import VERSION

VERBS: dict[str, str] = {
    "run": "Run the agent of this node.",
    "demo": "Run the agent on a mock machine, from the wires to a prepared claim.",
    "topo": "Show how GPUs, NICs and NVMe controllers of this machine are wired.",
    "devices": "Show the devices that would be published.",
    "slices": "Show the ResourceSlices that would be published.",
    "claims": "Show the claims that are prepared on this node.",
    "mps": "Supervise the MPS daemons of this node, or show them.",
    "machines": "Show the machines that --mock takes by name.",
    "capture": "Write this machine, redacted, as a file for --mock.",
    "config": "Check a configuration file, or print its schema.",
}
"""The verbs and what `nearfield --help` says about them; each is the click command `command` of the module of its name."""

EXAMPLES = """\b
Examples:
  nearfield topo                              this machine, as a matrix
  nearfield topo --mock dgx-h100 -o json      a machine that you do not have
  nearfield slices --node-name n1 -o yaml | kubectl create -f -
  nearfield capture -o node.json.gz           this machine as a file, redacted
  nearfield run --node-name n1 --mock dgx-h100 --kubeconfig ~/.kube/config
"""


class Verbs(click.Group):
    """A group that knows its verbs without importing them."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All verbs, in the order in which a person meets them."""
        return list(VERBS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """Import one verb."""
        if name not in VERBS:
            return None
        command = importlib.import_module(f"driver.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the verb that was meant."""
        close = get_close_matches(args[0], VERBS, n=1)
        if close and args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=EXAMPLES,
    help="Nearfield finds out how the GPUs of a node are wired, publishes it as ResourceSlices, and prepares claims.\n\n"
    "Every option has an environment variable: --node-name is NEARFIELD_NODE_NAME.",
)
@click.version_option(VERSION, "-V", "--version", prog_name="nearfield", message="%(prog)s %(version)s")
def group() -> None:
    """Nothing happens before a verb."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A product name that the terminal's encoding lacks must not end the command.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    # What a verb made for its own time goes with it; `run` has its own way to end.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if os.environ.get("NEARFIELD_LOG_LEVEL") == "debug":
        logging.basicConfig(level=logging.DEBUG)
    status = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = failure.nobody_reads()
    except OSError as err:
        # A full disk behind a redirection shows at the flush.
        status = status or failure.said(f"The output could not be written: {err.strerror}")
        failure.silence()
    sys.exit(status)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        if "_NEARFIELD_COMPLETE" in os.environ:
            # click's own door knows how to complete a command line for a shell.
            group.main(args=arguments, prog_name="nearfield")
        with group.make_context("nearfield", list(sys.argv[1:] if arguments is None else arguments)) as ctx:
            result = group.invoke(ctx)
    except click.exceptions.Exit as err:
        return err.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except Exception as err:  # noqa: BLE001 - the last door: a person hears of it, the log has the trace
        return failure.tell(err)
    return result if isinstance(result, int) else 0
