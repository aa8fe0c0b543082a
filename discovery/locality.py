# SPDX-License-Identifier: Apache-2.0
"""What is odd about the NUMA nodes that the firmware and overlays tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from discovery import findings, model


def note_unknown(snapshot: model.Snapshot, found: findings.Findings) -> None:
    """A Finding for every function whose NUMA node neither the firmware nor an overlay tells."""
    kinds: tuple[tuple[str, Callable[[str, object, str], None], Iterable[model.PciFunction]], ...] = (
        ("GPU", found.warning, (gpu.pci for gpu in snapshot.gpus)),
        ("NVSwitch", found.info, snapshot.nvswitches),
        ("NIC", found.info, (nic.pci for nic in snapshot.nics)),
        ("NVMe", found.info, (nvme.pci for nvme in snapshot.nvmes)),
    )
    for kind, note, functions in kinds:
        for function in functions:
            if function.numa_node is None and function.physical_function is None:
                note(
                    "numa-unknown",
                    function.address,
                    f"the firmware tells no NUMA node for this {kind}; paths over the CPU are UNKNOWN",
                )


def note_alike(snapshot: model.Snapshot, found: findings.Findings) -> None:
    """A Finding where the firmware puts all GPUs at one NUMA node, though they hang on several host bridges and other nodes have
    CPUs too. A server may be built so; firmware that tells the same for everything looks the same.
    """
    gpus = [gpu.pci for gpu in snapshot.gpus if gpu.pci.physical_function is None]
    others = [device.pci for devices in (snapshot.nics, snapshot.nvmes) for device in devices]
    told = {function.numa_node for function in (*gpus, *others)}
    bridges = {function.host_bridge for function in gpus}
    nodes = [node.node for node in snapshot.numa_nodes if node.cpus]
    if len(told) != 1 or len(bridges) < 2 or len(nodes) < 2:
        return
    if any(function.numa_node is None or function.numa_source is not model.Provenance.SYSFS for function in gpus):
        return
    found.info(
        "numa-alike",
        "node",
        f"the firmware puts every device at NUMA node {gpus[0].numa_node}, though the GPUs hang on {len(bridges)} host bridges and "
        f"{len(nodes)} nodes have CPUs; look into the server's block diagram, and correct it by an overlay if it is wrong",
    )
