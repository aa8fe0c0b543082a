# SPDX-License-Identifier: Apache-2.0
"""What a person hears of a command that failed, and the exit status that programs get."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import click

from discovery.errors import DiscoveryError
from driver.errors import ConfigError, DriverError
from driver.version import VERSION

logger = logging.getLogger(__name__)


def tell(err: Exception) -> int:
    """Say why on standard error, in one line; the exit status: 1 failed, 2 usage or configuration, 141 nobody reads the output."""
    match err:
        case click.ClickException():
            err.show()
            return err.exit_code
        case ConfigError():
            return said(str(err), status=2)
        case DriverError() | DiscoveryError():
            return said(str(err))
        case BrokenPipeError():
            return nobody_reads()
        case OSError():
            logger.debug("An operation of the system failed", exc_info=err)
            reason = err.strerror or str(err)
            return said(f"{err.filename}: {reason}" if err.filename else reason)
    # The last door: a person gets a sentence, the log at level debug the traceback.
    logger.debug("A defect ended the command", exc_info=err)
    at = traceback.extract_tb(err.__traceback__)[-1]
    return said(
        f"Internal error: {type(err).__name__}: {err} ({Path(at.filename).name}:{at.lineno}). This is a defect of"
        f" nearfield {VERSION}; please report it with the command line."
    )


def said(message: str, *, status: int = 1) -> int:
    """Say a sentence; the exit status given."""
    click.echo(f"Error: {message}", err=True)
    return status


def nobody_reads() -> int:
    """Be silent where the reader of the output has left; the exit status."""
    silence()
    return 128 + signal.SIGPIPE


def silence() -> None:
    """Give standard output another end, so that the interpreter's own last flush has nothing to complain about."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
