# SPDX-License-Identifier: Apache-2.0
"""Which NIC a Data Direct function belongs to. A ConnectX-8 reads and writes the memory of a GPU by a function of its own in the
PCIe tree of that GPU, while the NIC itself stands in another, so that neither root nor path says that they are one.

What says so is the vital product data of both: the UUID in V3, as NVIDIA's own tools match them (rdma_topo of rdma-core,
mstflint); where it is missing, the serial number of the board, if one NIC and one such function have it, as a board may carry
several. It is read only on machines that have such a function: a read takes milliseconds, and on broken hardware longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from discovery import errors, findings, model, pci, sysfs, vpd
from discovery.address import PciAddress

Vpds = Mapping[PciAddress, vpd.Vpd]


def read(
    files: sysfs.Sysfs,
    functions: Iterable[pci.Function],
    nics: Iterable[model.PciFunction],
    found: findings.Findings,
) -> Vpds | None:
    """The vital product data of Data Direct functions, and of those of `nics` that one may belong to; none where there is no
    such function, None where it is not for us to read. What cannot be read or understood is a Finding.
    """
    known = {function.address: function for function in functions}
    wanted = [function for function in known.values() if function.kind is pci.Kind.DATA_DIRECT]
    if not wanted:
        return {}
    wanted += [known[nic.address] for nic in nics if nic.vendor_id == pci.MELLANOX and nic.physical_function is None]
    told: dict[PciAddress, vpd.Vpd] = {}
    for function in wanted:
        try:
            data = files.read(f"{function.path}/vpd")
        except errors.SourceError as err:
            if err.kind not in errors.DENIED:
                found.failed(function.address, err)
                continue
            found.warning(
                "vpd-restricted",
                "sysfs",
                "vital product data are not readable (it takes root), so it is not known which NICs stand beside which GPUs "
                "by Data Direct",
            )
            return None
        if data is None:
            continue
        try:
            told[function.address] = vpd.parse(data)
        except ValueError as err:
            found.warning("vpd-malformed", function.address, f"/{function.path}/vpd {err}: it tells nothing")
    return told


def paired(
    functions: Sequence[model.PciFunction], nics: Sequence[model.Nic], vpds: Vpds, found: findings.Findings
) -> tuple[model.Nic, ...]:
    """The NICs, each physical function with the Data Direct function that it has. One that belongs to no NIC, or about which
    the data are not clear, is a Finding.
    """
    if not functions:
        return tuple(nics)
    physical = [nic.pci for nic in nics if nic.pci.physical_function is None]
    candidates = {function.address: _owners(function.address, physical, vpds) for function in functions}
    claims: dict[PciAddress, list[model.PciFunction]] = {}
    for function in functions:
        for owner in candidates[function.address]:
            claims.setdefault(owner, []).append(function)
    for function in functions:
        owners = candidates[function.address]
        reason = None
        if function.address not in vpds:
            reason = "its vital product data are not known"
        elif not owners:
            reason = "no NIC has its UUID, or its serial number alone"
        elif any(len(claims[owner]) > 1 for owner in owners):
            reason = f"{', '.join(str(other.address) for other in claims[owners[0]])} all name the same NIC"
        if reason is not None:
            found.warning(
                "data-direct-unpaired",
                function.address,
                f"{reason}: the NIC that it belongs to counts by its own place only",
            )
    return tuple(
        replace(nic, data_direct=claims[nic.address][0]) if len(claims.get(nic.address, ())) == 1 else nic
        for nic in nics
    )


def _owners(where: PciAddress, nics: Sequence[model.PciFunction], vpds: Vpds) -> tuple[PciAddress, ...]:
    """The functions of the NIC that a Data Direct function belongs to."""
    own = vpds.get(where)
    if own is None:
        return ()
    told = [(nic.address, vpds[nic.address]) for nic in nics if nic.address in vpds]
    if own.unique is not None:
        same = tuple(address for address, other in told if other.unique == own.unique)
        if same:
            return same
    board = tuple(
        address
        for address, other in told
        if own.serial is not None and other.serial == own.serial and None in (own.unique, other.unique)
    )
    return board if len({address[:3] for address in board}) == 1 else ()
