# SPDX-License-Identifier: Apache-2.0
"""`nearfield capture`: this machine as a file that --mock replays anywhere."""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TypeVar

import click

from driver import options
from driver.cli import parameters, source
from driver.errors import DriverError

OPTIONS = ("sysfs", "procfs", "dev", "driver-root", "driver-root-mount")

TIMEOUT_S = 300.0
"""A node with 16 GPUs and 400 CPUs has ten thousand files, of which some take a millisecond; NVML may take seconds for a GPU."""

TOLD = (
    "Serial numbers, MAC addresses, GUIDs, UUIDs, the boot id and vital product data were replaced by pseudonyms; host names and"
    " network addresses were not taken. Look through the file before you give it away."
)

_T = TypeVar("_T")


@click.command(
    "capture",
    help="""Write this machine, redacted, as a file for --mock.

    The file is a Recording: what sysfs, procfs and /dev say of PCI, NUMA, CPUs and NICs, and what NVML says of the GPUs.
    What identifies the machine is replaced by pseudonyms. A name that ends in .gz is compressed.""",
    epilog="""\b
    Examples:
      nearfield capture -o node.json.gz && nearfield topo --mock node.json.gz
      kubectl exec ds/nearfield -- nearfield capture > node.json
    """,
)
@parameters.add(*OPTIONS)
@click.option(
    "-o",
    "--output-file",
    "file",
    cls=parameters.Option,
    envvar="NEARFIELD_OUTPUT_FILE",
    show_envvar=True,
    metavar="FILE",
    default="-",
    show_default="-, standard output",
    help="Where the Recording is written.",
)
def command(file: str, **values: str | None) -> None:
    """Write the Recording of this machine."""
    from discovery.mock import capture, recording

    chosen = [option for option in options.OPTIONS if option.name in OPTIONS]
    parsed = options.parse_given(chosen, parameters.given(values))
    source.require_roots(parsed)
    captured = within(
        TIMEOUT_S,
        lambda: capture.capture(
            sys=parsed["sysfs"],
            proc=parsed["procfs"],
            dev=parsed["dev"],
            driver_root=parsed.get("driver_root_mount", parsed["driver_root"]),
        ),
    )
    data = recording.dump(captured)
    if file == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        _write(Path(file), gzip.compress(data, mtime=0) if file.endswith(".gz") else data)
    gpus = len(captured.nvml.gpus) if captured.nvml is not None else 0
    nvml = f"{gpus} GPUs from NVML" if captured.nvml is not None else "no NVML on this machine"
    where = "standard output" if file == "-" else file
    click.echo(f"Captured {len(captured.files)} files, {nvml}, to {where}. {TOLD}", err=True)


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """What `work` gives, in so many seconds. Raises DriverError when that is over: a file of a broken device and NVML may hold
    who reads them for ever, and nothing can be done about that but to end without them.
    """
    outcome: futures.Future[_T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as err:  # noqa: BLE001 - it is raised again where it is waited for
            outcome.set_exception(err)

    threading.Thread(target=run, name="capture", daemon=True).start()
    try:
        return outcome.result(timeout=seconds)
    except futures.TimeoutError:
        raise DriverError(
            f"The machine was not read in {seconds:.0f} s: a device or NVML does not answer; see the kernel log"
        ) from None


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what is no regular file, such as a pipe, is written into."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            Path(name).chmod(0o666 & ~umask)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as err:
        raise DriverError(f"{path}: cannot be written: {err.strerror}") from err
