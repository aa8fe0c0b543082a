# SPDX-License-Identifier: Apache-2.0
"""Short ways to say a GPU, a NIC or a bridge as a value, for tests of the pure parts of discovery."""

from __future__ import annotations

from discovery import model
from discovery.address import HostBridge, PciAddress, parse


def at(bus: int, function: int = 0) -> PciAddress:
    """A device on a bus of its own in domain 0."""
    return PciAddress(0, bus, 0, function)


def function(
    address: PciAddress,
    *,
    root: str | None = "pci0000:00",
    bridges: tuple[PciAddress, ...] = (),
    switches: tuple[PciAddress, ...] = (),
    numa: int | None = 0,
    device_id: int = 0x2330,
) -> model.PciFunction:
    """A PCI function in a place."""
    return model.PciFunction(
        address=address,
        vendor_id=0x10DE,
        device_id=device_id,
        class_code=0x030200,
        host_bridge=None if root is None else HostBridge(root),
        bridges=bridges,
        switches=switches,
        switch=switches[0] if switches else None,
        switch_source=model.Provenance.SYSFS if switches else None,
        numa_node=numa,
        numa_source=None if numa is None else model.Provenance.SYSFS,
        cpu_socket=numa,
    )


def gpu(
    address: PciAddress,
    *links: model.NvLink,
    state: model.GpuState = model.GpuState.READY,
    fabric: model.Fabric | None = None,
    pci: model.PciFunction | None = None,
) -> model.Gpu:
    """A GPU; one that is not READY has no links of its own."""
    ready = state is model.GpuState.READY
    return model.Gpu(
        pci=pci or function(address),
        state=state,
        state_reason=None if ready else "made so",
        uuid=f"GPU-{address}" if ready else None,
        product="H100" if ready else None,
        memory_bytes=1 if ready else None,
        nvlinks=links if ready else (),
        fabric=fabric,
    )


def to_switch(count: int, *, down: int = 0) -> tuple[model.NvLink, ...]:
    """Links to NVSwitches, the first `down` of them not active."""
    return tuple(
        model.NvLink(link=link, active=link >= down, remote_kind=model.RemoteKind.SWITCH) for link in range(count)
    )


def mesh(edges: dict[tuple[int, int], int], *, dead: frozenset[int] = frozenset()) -> tuple[model.Gpu, ...]:
    """GPUs 0, 1, ... at bus 1, 2, ... with direct links, so many for each pair; links to dead ones are down, and still
    name them.
    """
    count = max(max(pair) for pair in edges) + 1
    gpus = []
    for me in range(count):
        links: list[model.NvLink] = []
        for (a, b), number in sorted(edges.items()):
            if me in (a, b):
                other = b if me == a else a
                links += [
                    model.NvLink(
                        link=len(links) + i,
                        active=other not in dead,
                        remote_kind=model.RemoteKind.GPU,
                        remote=at(other + 1),
                    )
                    for i in range(number)
                ]
        state = model.GpuState.LOST if me in dead else model.GpuState.READY
        pci = function(
            at(me + 1), numa=me // 4, root=f"pci0000:{me // 4:02x}", switches=(parse(f"0000:f{me // 2}:00.0"),)
        )
        gpus.append(gpu(at(me + 1), *links, state=state, pci=pci))
    return tuple(gpus)


DGX1 = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1,
    (2, 6): 2, (3, 7): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
}  # fmt: skip
"""NVLinks of a DGX-1 with V100s, from its published `nvidia-smi topo -m`: a hybrid cube mesh."""
