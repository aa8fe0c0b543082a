# SPDX-License-Identifier: Apache-2.0
"""The invariants: a sound Snapshot has no violation, and each thing that can be wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from discovery import check, findings, model, probe
from discovery.address import HostBridge, parse
from discovery.options import ProbeOptions
from tests.fakes import wiring
from tests.fakes.wiring import at

ROOT, UP, DOWN = parse("0000:00:01.0"), parse("0000:02:00.0"), parse("0000:03:00.0")
CHAIN = (ROOT, UP, DOWN)


def place(bus: int) -> model.PciFunction:
    return wiring.function(at(bus), bridges=CHAIN, switches=(UP,))


def bridge(depth: int, port: model.PortType) -> model.Bridge:
    switches = (UP,) if depth == 2 else ()
    return model.Bridge(pci=wiring.function(CHAIN[depth], bridges=CHAIN[:depth], switches=switches), port_type=port)


def sound() -> model.Snapshot:
    """Two GPUs and a NIC below one port of a switch."""
    links = wiring.to_switch(2)
    return probe.annotate(
        model.Snapshot(
            origin=model.Origin.RECORDING,
            taken_at=0.0,
            host=model.Host(sockets={0: (0, 1)}, online_cpus=(0, 1)),
            numa_nodes=(model.NumaNode(node=0, cpus=(0, 1), distances={0: 10}),),
            bridges=(
                bridge(0, model.PortType.ROOT),
                bridge(1, model.PortType.UPSTREAM),
                bridge(2, model.PortType.DOWNSTREAM),
            ),
            gpus=tuple(wiring.gpu(at(bus), *links, pci=place(bus)) for bus in (4, 5)),
            nics=(model.Nic(pci=place(6)),),
        ),
        ProbeOptions(),
        findings.Findings(),
    )


def test_a_sound_snapshot_has_no_violation() -> None:
    assert check.violations(sound()) == ()


def gpu(change: Callable[[model.Gpu], model.Gpu]) -> Callable[[model.Snapshot], model.Snapshot]:
    return lambda snapshot: replace(snapshot, gpus=(change(snapshot.gpus[0]), *snapshot.gpus[1:]))


def pci(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return gpu(lambda own: replace(own, pci=replace(own.pci, **changes)))  # type: ignore[arg-type]


def own(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return gpu(lambda was: replace(was, **changes))  # type: ignore[arg-type]


def whole(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return lambda snapshot: replace(snapshot, **changes)  # type: ignore[arg-type]


def pairing(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    def change(was: model.Gpu) -> model.Gpu:
        assert was.nic is not None
        return replace(was, nic=replace(was.nic, **changes))  # type: ignore[arg-type]

    return gpu(change)


def nic(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return lambda snapshot: replace(snapshot, nics=(replace(snapshot.nics[0], **changes),))  # type: ignore[arg-type]


def bridges(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return lambda snapshot: replace(
        snapshot,
        bridges=(replace(snapshot.bridges[0], **changes), *snapshot.bridges[1:]),  # type: ignore[arg-type]
    )


def grouped(**changes: object) -> Callable[[model.Snapshot], model.Snapshot]:
    return gpu(lambda was: replace(was, groups=replace(was.groups, **changes)))  # type: ignore[arg-type]


NODE = model.NumaNode(node=0, cpus=())
DIRECT = model.NvLink(link=0, active=True, remote_kind=model.RemoteKind.GPU, remote=at(5))
FINDING = model.Finding(code="c", severity=model.Severity.INFO, subject="s", message="m")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: replace(s, nics=(*s.nics, model.Nic(pci=place(4)))), "stands 2 times"),
        (lambda s: replace(s, gpus=s.gpus[::-1]), "gpus are not ordered"),
        (pci(bridges=(*CHAIN, ROOT)), "loop"),
        (pci(bridges=(UP, DOWN), switches=(UP,)), "stands in another place"),
        (pci(host_bridge=HostBridge("pci0000:99")), "stands in another place"),
        (pci(switches=(), switch=None), "not the upstream ports"),
        (pci(switch=DOWN), "not the innermost"),
        (pci(switches=(UP, UP), switch_source=model.Provenance.OVERLAY), "stands twice above it"),
        (pci(switches=(), switch=None), "come from sysfs"),
        (pci(narrowest=model.LinkLimit(at=at(99), width=16)), "not the narrowest link above it"),
        (pci(narrowest=model.LinkLimit(at=UP, width=16)), "not the narrowest link above it"),
        (bridges(port_type=None, port_type_inferred=True), "is inferred, and yet"),
        (bridges(port_type_inferred=True, redirects=False), "is inferred, and yet"),
        (
            nic(data_direct=place(7), pci=replace(place(6), physical_function=at(5))),
            "a virtual function has a Data Direct",
        ),
        (nic(data_direct=place(4)), "stands 2 times"),
        (nic(rail=None), "that comes from sysfs"),
        (pci(host_bridge=None), "no host bridge"),
        (pci(numa_source=None), "comes from None"),
        (pci(numa_node=-1), "cannot be"),
        (pci(numa_node=None, numa_source=None), "no NUMA node"),
        (pci(cpu_socket=7), "none of the host's"),
        (pci(vendor_id=1 << 16), "fields of PCI"),
        (whole(numa_nodes=(NODE, NODE)), "one stands twice"),
        (whole(numa_nodes=(model.NumaNode(node=0, cpus=(), distances={9: 1}),)), "not there"),
        (whole(host=model.Host(sockets={0: (1,), 1: (1,)})), "in 2 sockets"),
        (whole(numa_nodes=(model.NumaNode(node=0, cpus=(1,)), model.NumaNode(node=1, cpus=(1,)))), "in 2 NUMA nodes"),
        (own(fabric=model.Fabric(state="completed", cluster_uuid="u")), "but not both"),
        (
            own(fabric=model.Fabric(state="in_progress", cluster_uuid="u", clique_id=0)),
            "its registration is in_progress",
        ),
        (own(uuid=None), "READY without"),
        (own(state=model.GpuState.LOST), "the reason is None"),
        (own(uuid="GPU-0000:05:00.0"), "the same UUID"),
        (own(nvlinks=(replace(DIRECT, link=1), DIRECT)), "NVLinks are not ordered"),
        (own(nvlinks=(replace(DIRECT, remote=at(4)),)), "ends where it begins"),
        (own(nvlinks=(DIRECT,)), "which has 0 back"),
        (grouped(nvlink_domain=at(99)), "not named by the lowest"),
        (grouped(aligned_pair=at(5)), "not named by the lowest"),
        (grouped(nvlink_domain=None), "but not both"),
        (grouped(aligned_quad=at(4)), "not inside one aligned quad"),
        (grouped(nvlink_domain=None, nvlink_clique=None), "reaches over several"),
        (pairing(address=at(99), ties=(at(99),)), "no physical function"),
        (pairing(ties=()), "not among the nearest"),
        (pairing(distance=model.PathClass.SYS), "is not SYS"),
        (pairing(rail=5), "not that of its NIC"),
        (pairing(data_direct=at(7)), "is not what makes its NIC so near"),
        (pairing(direct=True), "reaches it directly is not True"),
        (whole(findings=(FINDING, FINDING)), "stands twice"),
    ],
)
def test_each_thing_that_can_be_wrong_is_found(change: Callable[[model.Snapshot], model.Snapshot], said: str) -> None:
    assert said in "\n".join(check.violations(change(sound())))


def test_a_pair_of_three_is_found() -> None:
    snapshot = sound()
    three = tuple(wiring.gpu(at(bus), pci=place(bus)) for bus in (4, 5, 7))
    gpus = tuple(replace(one, groups=model.GpuGroups(aligned_pair=at(4))) for one in three)
    assert "aligned pair 0000:04:00.0 has 3 members" in check.violations(replace(snapshot, gpus=gpus))
