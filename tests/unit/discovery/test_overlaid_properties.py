# SPDX-License-Identifier: Apache-2.0
"""Any overlay on any machine: refused and nothing changed, or applied and the Snapshot is sound."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import check, codec, findings, model, overlay, paths, probe, topology
from discovery.address import PciAddress
from discovery.model import PathClass, Provenance
from discovery.options import ProbeOptions
from tests.fakes import wiring
from tests.fakes.wiring import at

BUSES = st.integers(1, 8)
UPSTREAM, ROOT, DOWN = at(0xE1), at(0xE0), at(0xE2)
BRIDGES = tuple(
    model.Bridge(
        pci=wiring.function(
            address, root="pci0000:e0", bridges=above, switches=(UPSTREAM,) if UPSTREAM in above else ()
        ),
        port_type=port,
    )
    for address, above, port in (
        (ROOT, (), model.PortType.ROOT),
        (UPSTREAM, (ROOT,), model.PortType.UPSTREAM),
        (DOWN, (ROOT, UPSTREAM), model.PortType.DOWNSTREAM),
    )
)


@st.composite
def functions(draw: st.DrawFn) -> tuple[model.PciFunction, ...]:
    """GPUs and NICs: below a real switch, below a host bridge with others, or alone; with or without a NUMA node."""
    found = []
    for bus in sorted(draw(st.sets(BUSES, min_size=5, max_size=8))):
        place = draw(st.sampled_from(("alone", "alone", "alone", "shared", "switch", "nowhere")))
        numa = draw(st.sampled_from((None, None, None, 0, 1)))
        root = {"switch": "pci0000:e0", "shared": "pci0000:00", "alone": f"pci{bus:04x}:00", "nowhere": None}[place]
        below = place == "switch"
        pci = wiring.function(
            at(bus),
            root=root,
            numa=numa,
            bridges=(ROOT, UPSTREAM, DOWN) if below else (),
            switches=(UPSTREAM,) if below else (),
        )
        cpus = None if numa is None else (numa,)
        found.append(
            replace(
                pci,
                cpus=cpus,
                switch_source=Provenance.SYSFS if below else None,
                class_code=draw(st.sampled_from((0x030200, 0x020000))),
            )
        )
    return tuple(found)


@st.composite
def machines(draw: st.DrawFn) -> overlay.Machine:
    """An overlay that is a sound document: what readers let through."""

    def devices(buses: set[int]) -> tuple[overlay.Device, ...]:
        return tuple(overlay.Device(address=at(bus), line=bus) for bus in sorted(buses))

    count = draw(st.integers(0, 4))
    group_of = draw(st.dictionaries(BUSES, st.integers(0, 3), max_size=6))
    node_of = draw(st.dictionaries(BUSES, st.sampled_from((0, 0, 0, 0, 1, 1, 1, 1, 5)), max_size=6))
    groups = tuple(
        overlay.Group(
            name=f"g{i}",
            line=i,
            parent=draw(st.sampled_from((None, *(f"g{j}" for j in range(i))))),
            devices=devices({bus for bus, group in group_of.items() if group == i}),
        )
        for i in range(count)
    )
    nodes = tuple(
        overlay.NumaNode(
            node=node, line=node, devices=devices({bus for bus, at_node in node_of.items() if at_node == node})
        )
        for node in sorted(set(node_of.values()))
    )
    rails = draw(st.dictionaries(BUSES, st.integers(0, 3), max_size=3))
    return overlay.Machine(
        file="o",
        line=1,
        groups=groups,
        numa_nodes=nodes,
        rails=tuple(overlay.Rail(nic=at(bus), rail=rail, line=bus) for bus, rail in sorted(rails.items())),
    )


@settings(max_examples=200)
@given(functions(), machines())
def test_it_is_refused_whole_or_the_snapshot_is_sound(
    members: tuple[model.PciFunction, ...], machine: overlay.Machine
) -> None:
    assert overlay.problems(machine) == ()
    snapshot = model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(sockets={0: (0,), 1: (1,)}),
        numa_nodes=(model.NumaNode(node=0, cpus=(0,)), model.NumaNode(node=1, cpus=(1,))),
        bridges=BRIDGES,
        gpus=tuple(wiring.gpu(pci.address, pci=pci) for pci in members if pci.class_code == 0x030200),
        nics=tuple(model.Nic(pci=pci) for pci in members if pci.class_code == 0x020000),
    )
    found = findings.Findings()
    result = probe.annotate(snapshot, ProbeOptions(overlay=overlay.Overlay(file="o", machines=(machine,))), found)
    assert check.violations(result) == ()
    assert codec.from_json(codec.to_json(result)) == result
    refused = any(finding.code == "overlay-refused" for finding in found.result())
    if refused:
        assert result == probe.annotate(snapshot, ProbeOptions(), findings.Findings())
        return
    after = {pci.address: pci for pci in topology.endpoints(result.gpus, result.nics, ())}
    for pci in members:
        now = after[pci.address]
        assert (now.host_bridge, now.pcie_root, now.bridges) == (pci.host_bridge, pci.pcie_root, pci.bridges)
        assert pci.switches in ((), now.switches)
    for path in paths.between_all(result):
        _agrees(path, after, machine)


def _agrees(path: model.Path, after: dict[PciAddress, model.PciFunction], machine: overlay.Machine) -> None:
    """What the overlay holds together is PIX or PXB, and what it does not is not, unless sysfs shows a switch."""
    chains = overlay.chains(machine)
    if path.a not in chains or path.b not in chains or UPSTREAM in after[path.a].switches + after[path.b].switches:
        return
    one, other = chains[path.a], chains[path.b]
    if one[0] == other[0]:
        assert path.path_class is PathClass.PIX
    elif set(one) & set(other):
        assert path.path_class is PathClass.PXB
    else:
        assert path.path_class not in (PathClass.PIX, PathClass.PXB)
