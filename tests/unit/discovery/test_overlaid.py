# SPDX-License-Identifier: Apache-2.0
"""An overlay held against a machine.

- NUMA nodes, with CPUs and socket of the node, groups and rails are applied, each with its source and a Finding
- what sysfs knows of switches stays; addresses, host bridges, roots and bridges are never touched
- a contradiction refuses the whole document, with a line for each; devices that are missing cost their own entries only
- the machine is chosen by vendor, product and GPU; none is no error
- paths, pairs and NICs follow from what was applied
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from discovery import aligned, check, findings, model, nvlink, overlaid, overlay, paths, probe
from discovery.address import HostBridge, PciAddress
from discovery.model import PathClass, Provenance
from discovery.options import ProbeOptions
from tests.fakes import wiring
from tests.fakes.wiring import at

GPUS = (at(1), at(2), at(3), at(4))
NICS = (at(0x11), at(0x13))
VF = PciAddress(0, 0x11, 0, 1)


def hidden(address: PciAddress, *, numa: int | None = None, class_code: int = 0x030200) -> model.PciFunction:
    """A function as a virtual machine shows it: a host bridge of its own, and nothing else."""
    root = HostBridge(f"pci{address.domain:04x}:{address.bus:02x}")
    return replace(wiring.function(address, root=root, numa=numa), cpu_socket=numa, class_code=class_code)


def vm(**changes: object) -> model.Snapshot:
    nic_functions = [hidden(nic, class_code=0x020000) for nic in NICS]
    nic_functions.insert(1, replace(hidden(VF, class_code=0x020000), physical_function=NICS[0]))
    snapshot = model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(vendor="Cloud", product="big", sockets={0: (0, 1), 1: (2, 3)}),
        numa_nodes=(model.NumaNode(node=0, cpus=(0, 1)), model.NumaNode(node=1, cpus=(2, 3))),
        bridges=(model.Bridge(pci=wiring.function(at(0xE0), root="pci0000:e0")),),
        gpus=tuple(wiring.gpu(gpu, pci=hidden(gpu)) for gpu in GPUS),
        nics=tuple(model.Nic(pci=pci) for pci in nic_functions),
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]


def devices(*addresses: PciAddress, line: int) -> tuple[overlay.Device, ...]:
    return tuple(overlay.Device(address=address, line=line + i) for i, address in enumerate(addresses))


def told(**content: object) -> overlay.Overlay:
    return overlay.Overlay(file="o.yaml", machines=(overlay.Machine(file="o.yaml", line=1, **content),))  # type: ignore[arg-type]


WHOLE = told(
    numa_nodes=(
        overlay.NumaNode(node=0, line=10, devices=devices(at(1), at(2), at(0x11), line=11)),
        overlay.NumaNode(node=1, line=20, devices=devices(at(3), at(4), at(0x13), line=21)),
    ),
    groups=(
        overlay.Group(name="l", line=30, devices=devices(at(1), at(2), at(0x11), line=31)),
        overlay.Group(name="r", line=40, devices=devices(at(3), at(4), at(0x13), line=41)),
    ),
    rails=(overlay.Rail(nic=at(0x11), rail=5, line=50),),
)


def applied(snapshot: model.Snapshot, document: overlay.Overlay) -> tuple[overlaid.Applied, tuple[model.Finding, ...]]:
    found = findings.Findings()
    return overlaid.apply(snapshot, document, found), found.result()


def refusals(snapshot: model.Snapshot, document: overlay.Overlay) -> list[tuple[str, str]]:
    """Where it is refused and why. Nothing may be applied, and nothing else be said."""
    result, found = applied(snapshot, document)
    assert result == overlaid.Applied(snapshot=snapshot)
    assert {(finding.code, finding.severity) for finding in found} == {("overlay-refused", model.Severity.ERROR)}
    tail = "; nothing of this overlay is applied: correct it"
    return [(finding.subject, finding.message.removesuffix(tail)) for finding in found]


def test_without_an_overlay_nothing_happens() -> None:
    found = findings.Findings()
    assert overlaid.apply(vm(), None, found) == overlaid.Applied(snapshot=vm())
    assert found.result() == ()


def test_everything_told_is_applied_and_says_where_it_comes_from() -> None:
    result, found = applied(vm(), WHOLE)
    left, right = (
        {"numa_node": 0, "cpus": (0, 1), "cpu_socket": 0, "switches": (at(1),), "switch": at(1)},
        {"numa_node": 1, "cpus": (2, 3), "cpu_socket": 1, "switches": (at(3),), "switch": at(3)},
    )
    sources = {"numa_source": Provenance.OVERLAY, "switch_source": Provenance.OVERLAY}
    functions = [
        *(gpu.pci for gpu in result.snapshot.gpus),
        *(nic.pci for nic in result.snapshot.nics),
    ]
    before = [*(gpu.pci for gpu in vm().gpus), *(nic.pci for nic in vm().nics)]
    places = [left, left, right, right, left, left, right]
    assert functions == [
        replace(function, **sources, **place)  # type: ignore[arg-type]
        for function, place in zip(before, places, strict=True)
    ]
    assert result.rails == {at(0x11): 5}
    assert [(finding.code, finding.severity, finding.subject) for finding in found] == [
        ("numa-from-overlay", model.Severity.INFO, "o.yaml:10"),
        ("numa-from-overlay", model.Severity.INFO, "o.yaml:20"),
        ("switch-from-overlay", model.Severity.INFO, "o.yaml:1"),
    ]
    assert "0000:01:00.0, 0000:02:00.0, 0000:11:00.0; node 0 comes" in found[0].message
    assert "6 devices are 2 groups" in found[2].message


def test_a_node_of_the_firmware_is_corrected_with_a_warning_for_each_device() -> None:
    snapshot = vm(gpus=tuple(wiring.gpu(gpu, pci=hidden(gpu, numa=0)) for gpu in GPUS))
    result, found = applied(snapshot, WHOLE)
    assert [gpu.pci.numa_source for gpu in result.snapshot.gpus] == [
        *[Provenance.SYSFS] * 2,
        *[Provenance.OVERLAY] * 2,
    ]
    assert [gpu.pci.numa_node for gpu in result.snapshot.gpus] == [0, 0, 1, 1]
    warnings = [finding for finding in found if finding.severity is model.Severity.WARNING]
    assert [(finding.code, finding.subject, finding.message) for finding in warnings] == [
        ("numa-from-overlay", f"0000:0{bus}:00.0", f"o.yaml:2{line} says NUMA node 1 and is believed; sysfs says 0")
        for bus, line in ((3, 1), (4, 2))
    ]


def test_a_node_without_cpus_gives_no_cpus_and_no_socket() -> None:
    snapshot = vm(numa_nodes=(model.NumaNode(node=0, cpus=(0, 1)), model.NumaNode(node=1, cpus=())))
    gpu = applied(snapshot, WHOLE)[0].snapshot.gpus[2]
    assert (gpu.pci.numa_node, gpu.pci.cpus, gpu.pci.cpu_socket) == (1, (), None)


SWITCH, OTHER = at(0xE1), at(0xE2)


def below(address: PciAddress, *switches: PciAddress, class_code: int = 0x030200) -> model.PciFunction:
    return replace(
        hidden(address, class_code=class_code),
        switches=switches,
        switch=switches[0],
        switch_source=Provenance.SYSFS,
    )


def test_switches_of_sysfs_stay_and_agree() -> None:
    snapshot = vm(
        gpus=(
            *(wiring.gpu(gpu, pci=below(gpu, SWITCH)) for gpu in GPUS[:2]),
            *(wiring.gpu(gpu, pci=hidden(gpu)) for gpu in GPUS[2:]),
        ),
        nics=(
            model.Nic(pci=below(NICS[0], OTHER, SWITCH, class_code=0x020000)),
            model.Nic(pci=hidden(NICS[1], class_code=0x020000)),
        ),
    )
    result, found = applied(snapshot, WHOLE)
    assert [gpu.pci.switches for gpu in result.snapshot.gpus] == [(SWITCH,), (SWITCH,), (at(3),), (at(3),)]
    assert [gpu.pci.switch_source for gpu in result.snapshot.gpus[1:3]] == [Provenance.SYSFS, Provenance.OVERLAY]
    assert "3 devices are 1 group of" in found[-1].message


@pytest.mark.parametrize(
    ("switches", "line", "message"),
    [
        (
            {at(1): (SWITCH,), at(2): (OTHER,)},
            "32",
            ("group 'l' holds 0000:02:00.0 and 0000:01:00.0, and sysfs shows switch 0000:e2:00.0 above the one and switch "
            "0000:e1:00.0 above the other"),
        ),
        (
            {at(2): (OTHER,), at(1): ()},
            "32",
            ("group 'l' holds 0000:02:00.0 and 0000:01:00.0, and sysfs shows switch 0000:e2:00.0 above the one and no switch "
            "above the other"),
        ),
        (
            {at(1): (SWITCH,), at(2): (SWITCH,), at(0x11): (SWITCH,), at(4): (SWITCH,), at(3): (SWITCH,), at(0x13): (SWITCH,)},
            "41",
            "sysfs shows 0000:03:00.0 and 0000:01:00.0 below one switch 0000:e1:00.0, and no group holds both",
        ),
    ],
)  # fmt: skip
def test_groups_across_the_switches_of_sysfs_are_refused(
    switches: dict[PciAddress, tuple[PciAddress, ...]], line: str, message: str
) -> None:
    def place(address: PciAddress, class_code: int) -> model.PciFunction:
        above = switches.get(address, ())
        return below(address, *above, class_code=class_code) if above else hidden(address, class_code=class_code)

    snapshot = vm(
        gpus=tuple(wiring.gpu(gpu, pci=place(gpu, 0x030200)) for gpu in GPUS),
        nics=tuple(model.Nic(pci=place(nic, 0x020000)) for nic in NICS),
    )
    assert (f"o.yaml:{line}", message) in refusals(snapshot, WHOLE)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            told(numa_nodes=(overlay.NumaNode(node=7, line=4, devices=devices(at(1), line=5)),)),
            [("o.yaml:4", "there is no NUMA node 7 on this machine, but 0, 1")],
        ),
        (
            told(groups=(overlay.Group(name="g", line=4, devices=devices(at(1), at(0xE0), line=5)),)),
            [("o.yaml:6", "0000:e0:00.0 is a PCI bridge: name the devices below it")],
        ),
        (
            told(rails=(overlay.Rail(nic=VF, rail=0, line=3), overlay.Rail(nic=at(1), rail=1, line=4))),
            [
                ("o.yaml:3", "0000:11:00.1 is a virtual function of 0000:11:00.0: name that one, it counts for all"),
                ("o.yaml:4", "0000:01:00.0 is no NIC but a GPU"),
            ],
        ),
        (
            told(
                groups=(
                    overlay.Group(
                        name="g", line=4, devices=(overlay.Device(address=at(1), line=5, base_class=2),)
                    ),
                )
            ),
            [("o.yaml:5", "0000:01:00.0 is of class 0x02 here and class 0x03 on this machine")],
        ),
        (
            told(
                numa_nodes=(
                    overlay.NumaNode(node=0, line=2, devices=devices(at(1), line=3)),
                    overlay.NumaNode(node=1, line=4, devices=devices(at(2), line=5)),
                ),
                groups=(overlay.Group(name="g", line=6, devices=devices(at(1), at(2), line=7)),),
            ),
            [("o.yaml:8", "0000:02:00.0 is near NUMA node 1 and 0000:01:00.0 near 0: one group 'g' cannot hold both")],
        ),
        (
            told(rails=tuple(overlay.Rail(nic=at(0x11 + i), rail=i, line=i) for i in range(6))),
            [("o.yaml:1", "4 of its 6 devices are not on this machine (0000:12:00.0, 0000:14:00.0, 0000:15:00.0, 0000:16:00.0)")],
        ),
    ],
)  # fmt: skip
def test_what_contradicts_the_machine_is_refused_whole(
    document: overlay.Overlay, expected: list[tuple[str, str]]
) -> None:
    assert refusals(vm(), document) == expected


def test_a_switch_of_sysfs_is_near_one_node() -> None:
    snapshot = vm(gpus=tuple(wiring.gpu(gpu, pci=below(gpu, SWITCH)) for gpu in GPUS), nics=())
    document = told(numa_nodes=WHOLE.machines[0].numa_nodes)
    assert refusals(snapshot, document) == [
        (f"o.yaml:2{line}", f"sysfs shows 0000:0{bus}:00.0 and 0000:01:00.0 below one switch 0000:e1:00.0, which is near one NUMA node")
        for bus, line in ((3, 1), (4, 2))
    ]  # fmt: skip


def test_functions_of_one_device_stand_in_one_place() -> None:
    card = PciAddress(0, 0x13, 0, 1)
    snapshot = vm(nics=(*vm().nics, model.Nic(pci=hidden(card, class_code=0x020000))))
    document = told(
        numa_nodes=(
            overlay.NumaNode(node=0, line=2, devices=devices(at(0x13), line=3)),
            overlay.NumaNode(node=1, line=4, devices=devices(card, line=5)),
        ),
    )
    assert refusals(snapshot, document) == [
        ("o.yaml:5", "0000:13:00.1 and 0000:13:00.0 are functions of one device and stand in two NUMA nodes")
    ]
    document = told(
        groups=(
            overlay.Group(name="a", line=2, devices=devices(at(0x13), line=3)),
            overlay.Group(name="b", line=4, devices=devices(card, line=5)),
        ),
    )
    assert refusals(snapshot, document) == [
        ("o.yaml:5", "0000:13:00.1 and 0000:13:00.0 are functions of one device and stand in two groups")
    ]


def test_a_flood_of_contradictions_is_counted() -> None:
    nodes = tuple(overlay.NumaNode(node=100 + i, line=i, devices=()) for i in range(30))
    document = told(numa_nodes=nodes, rails=(overlay.Rail(nic=at(0x11), rail=0, line=1),))
    assert ("o.yaml", "and 10 more contradictions") in refusals(vm(), document)


def test_a_device_that_fell_off_the_bus_takes_nobody_with_it() -> None:
    """Half of the devices and more have to be there, and the names of groups stay what they were."""
    whole = applied(vm(), WHOLE)[0].snapshot
    result, found = applied(vm(gpus=vm().gpus[1:]), WHOLE)
    assert result.snapshot.gpus == whole.gpus[1:]
    assert result.snapshot.nics == whole.nics
    missing = [finding for finding in found if finding.code == "overlay-unknown-device"]
    assert [(finding.subject, finding.severity) for finding in missing] == [("o.yaml:11", model.Severity.ERROR)]
    assert missing[0].message.startswith("0000:01:00.0 is not on this machine")
    result, found = applied(vm(gpus=vm().gpus[3:]), WHOLE)  # half of the six
    assert result.snapshot.gpus == whole.gpus[3:]
    assert [finding.code for finding in found].count("overlay-unknown-device") == 3
    assert "4 of its 6 devices are not on this machine" in refusals(vm(gpus=()), WHOLE)[0][1]


def test_an_affinity_that_is_not_the_node_s_is_told_and_not_believed() -> None:
    def document(*cpus: int) -> overlay.Overlay:
        return told(numa_nodes=(overlay.NumaNode(node=0, line=2, cpus=cpus, devices=devices(at(1), line=3)),))

    result, found = applied(vm(), document(2, 3))
    assert result.snapshot.gpus[0].pci.cpus == (0, 1)
    assert [finding.code for finding in found] == ["numa-from-overlay", "overlay-affinity-differs"]
    for cpus in ((0, 1), (1, 2)):
        assert [finding.code for finding in applied(vm(), document(*cpus))[1]] == ["numa-from-overlay"]
    assert [finding.code for finding in applied(vm(), document())[1]] == ["numa-from-overlay"]


MATCHES = {
    overlay.Match(vendor="Cloud"): True,
    overlay.Match(vendor="Cloud", product="big"): True,
    overlay.Match(vendor="Cloud", product="small"): False,
    overlay.Match(product="Big"): False,
    overlay.Match(gpu=(0x10DE, 0x2330)): True,
    overlay.Match(gpu=(0x10DE, 0x20B0)): False,
}


def test_the_first_machine_that_matches_counts() -> None:
    rails = (overlay.Rail(nic=at(0x11), rail=1, line=2),)
    for match, fits in MATCHES.items():
        document = overlay.Overlay(
            file="o",
            machines=(
                overlay.Machine(file="o", line=1, match=match, rails=rails),
                overlay.Machine(file="o", line=9, match=overlay.Match(vendor="Cloud"), rails=()),
            ),
        )
        assert bool(applied(vm(), document)[0].rails) == fits


def test_a_file_for_other_machines_is_no_error() -> None:
    document = overlay.Overlay(
        file="o", machines=(overlay.Machine(file="o", line=1, match=overlay.Match(product="small")),)
    )
    result, found = applied(vm(), document)
    assert result == overlaid.Applied(snapshot=vm())
    assert [(finding.code, finding.severity, finding.message) for finding in found] == [
        (
            "overlay-not-for-this-machine",
            model.Severity.INFO,
            "none of its machines matches this one (vendor 'Cloud', product 'big', GPUs 10de:2330)",
        )
    ]


def test_paths_pairs_and_nics_follow() -> None:
    found = findings.Findings()
    snapshot = probe.annotate(vm(), ProbeOptions(overlay=WHOLE), found)
    between = {(path.a, path.b): (path.path_class, path.direct) for path in paths.between_all(snapshot)}
    assert between[at(1), at(2)] == (PathClass.PIX, None)
    assert between[at(1), at(0x11)] == (PathClass.PIX, None)
    assert between[at(1), at(3)][0] is PathClass.SYS
    assert [gpu.groups.aligned_pair for gpu in snapshot.gpus] == [at(1), at(1), at(3), at(3)]
    assert [gpu.nic and (gpu.nic.address, gpu.nic.distance) for gpu in snapshot.gpus] == [
        *[(at(0x11), PathClass.PIX)] * 2,
        *[(at(0x13), PathClass.PIX)] * 2,
    ]
    assert [(nic.rail, nic.rail_source) for nic in snapshot.nics] == [
        (5, Provenance.OVERLAY),
        (None, None),
        (None, None),
    ]
    assert "numa-unknown" not in {finding.code for finding in found.result()}
    assert check.violations(replace(snapshot, bridges=())) == ()
    plain = probe.annotate(vm(), ProbeOptions(), findings.Findings())
    assert {path.path_class for path in paths.between_all(plain)} == {PathClass.UNKNOWN}


def test_groups_alone_make_pairs_where_no_node_is_known() -> None:
    document = told(groups=WHOLE.machines[0].groups)
    snapshot = applied(vm(), document)[0].snapshot
    groups = aligned.groups(snapshot.gpus, nvlink.wiring(snapshot.gpus, findings.Findings()), findings.Findings())
    assert [groups[gpu].aligned_pair for gpu in GPUS] == [at(1), at(1), at(3), at(3)]
    between = {(path.a, path.b): path.path_class for path in paths.between_all(snapshot)}
    assert between[at(1), at(2)] is PathClass.PIX
    assert between[at(1), at(3)] is PathClass.UNKNOWN


def test_the_configuration_s_rails_win() -> None:
    snapshot = probe.annotate(vm(), ProbeOptions(overlay=WHOLE, rails={at(0x11): 7, at(0x13): 8}), findings.Findings())
    assert [nic.rail for nic in snapshot.nics] == [7, None, 8]
