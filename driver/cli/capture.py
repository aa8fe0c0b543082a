# SPDX-License-Identifier: Apache-2.0
"""`nearfield capture`: this machine as a file that --mock replays anywhere."""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from pathlib import Path

import click

from driver import options
from driver.cli import parameters, source
from driver.errors import DriverError

OPTIONS = ("sysfs", "procfs", "dev")

TOLD = (
    "Serial numbers, MAC addresses, GUIDs, UUIDs and the boot id were replaced by pseudonyms; host names, network addresses"
    " and vital product data were not read. Look through the file before you give it away."
)


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
    captured = capture.capture(sys=parsed["sysfs"], proc=parsed["procfs"], dev=parsed["dev"])
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
