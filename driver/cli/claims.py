# SPDX-License-Identifier: Apache-2.0
"""`nearfield claims`: what the record of a node holds, read beside a running agent or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from driver import options
from driver.cli import output, parameters

if TYPE_CHECKING:
    from driver.prepare import ledger, shareuse

OPTIONS = ("kubelet-dir", "driver-name", "state-dir")


@click.command(
    "claims",
    help="""Show the claims that are prepared on this node.

    Reads the record of the agent, which may be running or not, and changes nothing in it.""",
    epilog="""\b
    Examples:
      nearfield claims
      nearfield claims --state-dir /var/lib/nearfield -o json
    """,
)
@parameters.add(*OPTIONS)
@output.option()
def command(output_format: output.Format, **values: str | None) -> None:
    """List the entries of the record."""
    from driver.prepare import store

    chosen = [option for option in options.OPTIONS if option.name in OPTIONS]
    parsed = options.parse_given(chosen, parameters.given(values))
    entries = store.read_rows(options.state_dir(parsed))
    if output_format is not output.Format.TABLE:
        claims = [
            {
                "uid": entry.claim.uid,
                "namespace": entry.claim.namespace,
                "name": entry.claim.name,
                "state": str(entry.state),
                "bootId": entry.boot_id,
                "devices": [
                    {
                        "request": result.request,
                        "pool": result.pool,
                        "device": result.device,
                        "adminAccess": result.admin,
                        "cdiDeviceIds": list(cdi_ids),
                        **({"shareId": result.share_id} if result.share_id is not None else {}),
                        **({"consumedCapacity": dict(result.consumed_capacity)} if result.consumed_capacity else {}),
                        **({"share": _share(result.share)} if result.share is not None else {}),
                    }
                    for result, cdi_ids in zip(entry.results, entry.cdi_ids, strict=True)
                ],
            }
            for entry in entries
        ]
        output.write_document(output.items("PreparedClaimList", claims), output_format)
    elif entries:
        output.write_table(
            ("NAMESPACE", "NAME", "STATE", "DEVICES", "UID"),
            [
                (
                    entry.claim.namespace,
                    entry.claim.name,
                    str(entry.state),
                    ",".join(map(_device, entry.results)) or output.MISSING,
                    entry.claim.uid,
                )
                for entry in entries
            ],
        )
    else:
        output.write_line("No claim is prepared.")


def _device(result: ledger.Result) -> str:
    """`gpu-0000-9d-00-0`, and of a share how much it is: `gpu-0000-9d-00-0 (20G, 25 %)`."""
    if result.share is None:
        return result.device
    from driver.cli import shared

    return f"{result.device} ({shared.amounts(result.share)})"


def _share(share: shareuse.ShareUse) -> dict[str, object]:
    from driver.cli import shared

    levels = share.enforcement
    return {
        **shared.held_to(share),
        "memoryEnforcement": str(levels.memory),
        "computeEnforcement": str(levels.compute),
        **({"belowNormal": True} if share.below_normal else {}),
    }
