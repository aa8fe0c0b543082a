# SPDX-License-Identifier: Apache-2.0
"""The devices of a machine that are handed out in shares: a bar of memory for people, a list for programs."""

from __future__ import annotations

from driver.cli import output
from driver.observe import sharers
from driver.prepare import shareuse

COLUMNS = ("DEVICE", "ENFORCED", "MEMORY", "FREE", "COMPUTE", "FREE", "SHARERS")
LEGEND = "= given out  . free  x left, and no further share can have it; ENFORCED: memory, compute"

Held = sharers.Use | shareuse.ShareUse

_WIDTH = 40
"""Of the memory of a device in a bar, without its borders."""


def row(of: sharers.Shared, *, known: bool) -> tuple[str, ...]:
    """The cells of a table. `known`: whether it could be read who has what."""
    memory, compute = of.memory, of.compute
    return (
        of.device,
        f"{of.enforcement.memory}, {of.enforcement.compute}",
        bar(of, known=known),
        output.size(memory.free) if known else output.MISSING,
        "turns" if compute is None else f"{compute.given} of {compute.value} %" if known else f"{compute.value} %",
        f"{compute.free} %" if compute is not None and known else output.MISSING,
        f"{of.sharers if known else '?'} of {of.terms.sharers}",
    )


def bar(of: sharers.Shared, *, known: bool = True) -> str:
    """`|20G=====|10G==|.........................x|`: a cell for each share, and what is left; its widths add up to that of the memory."""
    if not known:
        return f"|{'?' * _WIDTH}|"
    memory = of.memory
    given = [use.memory for use in of.uses]
    parts = [*given, memory.free, memory.stranded]
    total = max(sum(parts), 1)
    # Ends are rounded and not widths, so that they add up.
    ends = [round(_WIDTH * sum(parts[: index + 1]) / total) for index in range(len(parts))]
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    cells = [_cell(amount, width) for amount, width in zip(given, widths, strict=False)]
    rest = "." * widths[-2] + "x" * widths[-1]
    return f"|{''.join(cells)}{rest}|"


def _cell(amount: int, width: int) -> str:
    """A share as wide as it is, with a border at its end; nothing of one that is narrower than that."""
    return f"{_short(amount)}".ljust(width - 1, "=")[: width - 1] + "|" if width else ""


def _short(amount: int) -> str:
    """`20G`, `512M`: sizes of shares are multiples of a MiB."""
    return f"{amount >> 30}G" if amount % (1 << 30) == 0 else f"{amount >> 20}M"


def item(of: sharers.Shared, *, known: bool) -> dict[str, object]:
    """The same for programs."""
    terms = of.terms
    found: dict[str, object] = {
        "device": of.device,
        "address": str(of.address),
        "uuid": of.uuid,
        "mode": str(of.mode),
        "memoryEnforcement": str(of.enforcement.memory),
        "computeEnforcement": str(of.enforcement.compute),
        "memory": {"value": terms.memory.value, "step": terms.memory.step, **_portion(of.memory, known=known)},
    }
    if terms.compute is not None and of.compute is not None:
        found["compute"] = {
            "value": terms.compute.value,
            "step": terms.compute.step,
            "default": terms.compute.default,
            **_portion(of.compute, known=known),
        }
    found["sharers"] = {"most": terms.sharers, **({"now": of.sharers} if known else {})}
    if known:
        found["shares"] = [share(use) for use in of.uses]
    return found


def share(use: sharers.Use) -> dict[str, object]:
    """A share of a claim."""
    return {
        "namespace": use.claim.namespace,
        "name": use.claim.name,
        "uid": use.claim.uid,
        **({"shareId": use.share_id} if use.share_id is not None else {}),
        **held_to(use),
    }


def held_to(use: Held) -> dict[str, int]:
    """How much a share is, and what it is held to; what is not limited is left out."""
    found = {
        "memory": use.memory,
        "compute": use.compute,
        "memoryLimit": use.memory_limit,
        "softLimit": use.soft_limit,
        "computeLimit": use.compute_limit,
    }
    return {name: amount for name, amount in found.items() if amount is not None}


def amounts(use: Held) -> str:
    """How much a share is."""
    return _short(use.memory) if use.compute is None else f"{_short(use.memory)}, {use.compute} %"


def _portion(portion: sharers.Portion, *, known: bool) -> dict[str, int]:
    return {str(state): amount for state, amount in portion.by_state().items()} if known else {}
