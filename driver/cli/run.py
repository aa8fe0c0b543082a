# SPDX-License-Identifier: Apache-2.0
"""`nearfield run`: the agent of a node."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click

from driver import config, configload, overlay
from driver.cli import failure, run_options

PATIENCE_S = 45.0
"""How long a Prepare that is under way may go on after SIGTERM: kubelet waits no longer for its answer."""

STOP_S = 1.8
"""From the signal, or from the answer to the last Prepare under way, to the end, whatever hangs in it: a disk, a mount, a
server that takes requests and never answers. Nothing is lost by an end without ceremony, as it could come at any moment; only
sockets may stay, for the next start to remove.
"""


@click.command(
    "run",
    help="""Run the agent of this node.

    Serves kubelet on its plugin sockets, publishes ResourceSlices, and stays until SIGTERM or SIGINT, which end it within
    two seconds. SIGTERM lets a Prepare under way finish, for 45 s at most; a second signal does not. What it cannot do
    now (an API server that is away, a GPU that does not answer) it waits for and says on /readyz.""",
    epilog="""\b
    Examples:
      nearfield run --node-name "$NODE_NAME"
      nearfield run --node-name n1 --mock dgx-h100 --kubeconfig ~/.kube/config
    """,
)
@run_options.options
def command(**values: str | None) -> NoReturn:
    """Serve until told to stop."""
    settings = run_options.settings(**values)
    agent_config = config.AgentConfig() if settings.config is None else _read(settings.config)
    document = overlay.load(settings.overlay, agent_config)
    from discovery import child
    from driver.app import hardware
    from driver.observe import logs

    logs.set_up(settings.log_format, settings.log_level)
    logs.log_start(settings)
    # The process that looks at the hardware loads what it needs while this one does.
    prober = hardware.prober(settings, child.ProbeOptions(rails=agent_config.topology.rails, overlay=document))
    prober.start()
    from driver.app import agent

    status = 0

    def ending(failed: Exception | None) -> None:
        nonlocal status
        status = 0 if failed is None else failure.tell(failed)
        _end_in(STOP_S, status)

    running = agent.Agent(settings, agent_config, prober, load=configload.load, ending=ending)
    signals = itertools.count()

    def stop(number: int, _frame: object) -> None:
        patient = number == signal.SIGTERM and next(signals) == 0
        _end_in(running.stop(patience_s=PATIENCE_S if patient else 0.0) + STOP_S, 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, lambda *_: running.reload())
    running.ended.wake_by_signals()
    try:
        running.run()
    except Exception as error:  # noqa: BLE001 - as at the door of the command line
        # Said here, as the interpreter would join gRPC's worker threads first, and one may hang in a dead disk.
        status = failure.tell(error)
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End the process now that everything was stopped. An interpreter that takes itself apart under threads that are in foreign
    code, as daemon threads may be, can end with SIGSEGV.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _read(path: Path) -> config.AgentConfig:
    """The configuration in a file, read by another process while this one loads what it will need. Raises ConfigError."""
    reading = configload.Reading(path)
    importlib.import_module("driver.app.agent")
    return reading.result()


def _end_in(seconds: float, status: int) -> None:
    """End the process then, if it has not ended by itself."""
    last = threading.Timer(seconds, os._exit, (status,))
    last.daemon = True
    last.start()
