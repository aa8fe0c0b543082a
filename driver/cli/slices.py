# SPDX-License-Identifier: Apache-2.0
"""`nearfield slices`: what the scheduler would read of a machine."""

from __future__ import annotations

import os
from typing import Any

import click

from driver import options
from driver.cli import offer, output, parameters, source
from driver.errors import ConfigError, DriverError
from driver.publish import limits, slices


@click.command(
    "slices",
    help="""Show the ResourceSlices that would be published.

    As the agent would create them, but without an owner, so that they stay until somebody deletes them: a cluster without a
    GPU can be shown a node of any shape. The node name is by default the host name, as it is for kubelet.""",
    epilog="""\b
    Examples:
      nearfield slices
      nearfield slices --mock gb200-tray --node-name n1 -o yaml | kubectl create -f -
    """,
)
@parameters.add(*source.OPTIONS, "mps-dir", "cgroup-root", "node-name")
@output.option()
def command(output_format: output.Format, **values: str | None) -> None:
    """Print the slices."""
    if values["node_name"] is None:
        values["node_name"] = _host_name()
    parsed = source.parse(values, "mps-dir", "cgroup-root", "node-name")
    agent = source.read_config(parsed)
    snapshot = source.take_snapshot(parsed, agent)
    ours = source.held(source.prepared(parsed)) or ()
    resolved = offer.shared(snapshot, parsed, agent)
    offered, reason, findings = offer.offered(offer.build(snapshot, parsed, agent, resolved=resolved, ours=ours))
    place = slices.Place(driver_name=parsed["driver_name"], node_name=parsed["node_name"])
    bodies = slices.build_slices(offered, place=place) if reason is None else ()
    violations = limits.violations(bodies)
    if violations:
        raise DriverError("The API server would refuse these slices:\n" + "\n".join(violations))
    match output_format:
        case output.Format.JSON:
            output.write_document(
                output.items("ResourceSliceList", bodies, api_version=slices.API_VERSION), output_format
            )
        case output.Format.YAML:
            output.write_stream(bodies)
        case output.Format.TABLE:
            if bodies:
                output.write_table(("NAME", "DRIVER", "POOL", "DEVICES"), [_row(body) for body in bodies])
            output.write_findings((*snapshot.findings, *findings))
    if reason is not None:
        click.echo(f"Nothing would be published: {output.clean(reason)}", err=True)


def _host_name() -> str:
    name = os.uname().nodename.lower()
    try:
        return options.parse_node_name(name)
    except ValueError as err:
        raise ConfigError(f"The host name {name!r} is {err}; give --node-name") from err


def _row(body: slices.Body) -> tuple[str, ...]:
    spec: dict[str, Any] = body["spec"]
    return body["metadata"]["name"], spec["driver"], spec["pool"]["name"], str(len(spec.get("devices", ())))
