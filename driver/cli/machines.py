# SPDX-License-Identifier: Apache-2.0
"""`nearfield machines`: the machines that come with Nearfield."""

from __future__ import annotations

import sys

import click

from discovery.errors import DocumentError
from driver.cli import output
from driver.errors import ConfigError


@click.command(
    "machines",
    help="""Show the machines that --mock takes by name.

    With NAME: the description of that machine (kind Machine), a good start for one of your own.""",
    epilog="""\b
    Examples:
      nearfield machines
      nearfield machines dgx-h100 > mine.yaml && nearfield topo --mock mine.yaml
    """,
)
@click.argument("name", required=False)
@output.option(default=None)
def command(name: str | None, output_format: output.Format | None) -> None:
    """List the zoo, or print one machine of it."""
    from discovery.mock import zoo

    if name is None:
        machines = [{"name": known, "description": zoo.describe(known)} for known in zoo.names()]
        if output_format in (None, output.Format.TABLE):
            output.write_table(("NAME", "DESCRIPTION"), [(each["name"], each["description"]) for each in machines])
        else:
            output.write_document(output.items("MachineList", machines), output_format)
        return
    try:
        text = zoo.text(name)
    except DocumentError as err:
        raise ConfigError(str(err)) from err
    match output_format:
        case None | output.Format.YAML:
            sys.stdout.write(text)
        case output.Format.JSON:
            from discovery import document

            output.write_document(document.parse(text.encode(), name=name).value, output_format)
        case output.Format.TABLE:
            output.write_table(("NAME", "DESCRIPTION"), [(name, zoo.describe(name))])
