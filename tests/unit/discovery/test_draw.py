# SPDX-License-Identifier: Apache-2.0
"""The picture: well-formed, every device in the frame of its place and inside the picture, hostile text escaped and cut."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import draw, findings, model, probe
from discovery.address import PciAddress, parse
from discovery.options import ProbeOptions
from tests.fakes import wiring
from tests.fakes.wiring import at

UP, UP2 = parse("0000:e1:00.0"), parse("0000:e2:00.0")


def snapshot(*gpus: model.Gpu, nics: tuple[model.Nic, ...] = (), host: model.Host | None = None) -> model.Snapshot:
    return probe.annotate(
        model.Snapshot(
            origin=model.Origin.RECORDING,
            taken_at=0.0,
            host=host or model.Host(vendor="NVIDIA", product="DGX"),
            numa_nodes=(model.NumaNode(node=0, cpus=(0, 1), memory_bytes=1 << 40),),
            gpus=gpus,
            nics=nics,
        ),
        ProbeOptions(),
        findings.Findings(),
    )


def parsed(picture: str) -> ET.Element:
    return ET.fromstring(picture)


def words(picture: str) -> list[str]:
    return [element.text or "" for element in parsed(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_every_device_stands_in_its_place() -> None:
    gpu = wiring.gpu(at(1), pci=wiring.function(at(1), switches=(UP2, UP)))
    nic = model.Nic(pci=wiring.function(at(2), switches=(UP,)), rdma_devices=(model.RdmaDevice(name="mlx5_0"),), rail=3)
    unknown = model.Nic(pci=wiring.function(at(3), numa=None, root="pci0001:00"))
    shown = words(draw.svg(snapshot(gpu, nics=(nic, unknown))))
    order = [
        "NVIDIA DGX",
        "socket 0 · NUMA node 0 · 2 CPUs · 1024 GiB",
        "pci0000:00",
        f"switch {UP}",
        f"switch {UP2}",
        f"GPU {at(1)}",
        f"NIC {at(2)}",
        "NUMA node unknown",
        "pci0001:00",
        f"NIC {at(3)}",
    ]
    assert [word for word in shown if word in order] == order


def test_what_an_overlay_gave_is_marked_and_stands_around_host_bridges() -> None:
    def given(bus: int, *switches: PciAddress) -> model.PciFunction:
        pci = wiring.function(at(bus), root=f"pci000{bus}:00", switches=switches)
        source = model.Provenance.OVERLAY
        return replace(pci, numa_source=source, switch_source=source if switches else None)

    gpus = (
        wiring.gpu(at(1), pci=given(1, UP2, UP)),
        wiring.gpu(at(2), pci=given(2, UP)),
        wiring.gpu(at(3), pci=given(3)),
    )
    nic = model.Nic(pci=given(4, UP2, UP), rail=7, rail_source=model.Provenance.OVERLAY)
    picture = draw.svg(replace(snapshot(*gpus), nics=(nic,)))
    order = [
        "socket 0 · NUMA node 0* · 2 CPUs · 1024 GiB",
        f"switch {UP}*",
        f"switch {UP2}*",
        "pci0001:00",
        f"GPU {at(1)}",
        "pci0004:00",
        "rail 7*",
        "pci0002:00",
        f"GPU {at(2)}",
        "pci0003:00",
        f"GPU {at(3)}",
        "* given by an overlay or the configuration file",
    ]
    assert [word for word in words(picture) if word in order] == order
    assert f"NUMA node 0 from the overlay\nswitch {UP2} in {UP} from the overlay" in picture
    assert "*" not in draw.svg(snapshot(wiring.gpu(at(1))))


def test_nvlink_domains_have_their_own_colours_and_a_legend() -> None:
    links = wiring.to_switch(2)
    shown = draw.svg(snapshot(*(wiring.gpu(at(bus), *links) for bus in (1, 2)), wiring.gpu(at(3))))
    assert f"NVLink domain {at(1)}: 2 GPUs, over NVSwitches, 1 all-to-all group" in words(shown)
    assert shown.count('stroke="#2da44e"') == 2


@pytest.mark.parametrize("state", [state for state in model.GpuState if state is not model.GpuState.READY])
def test_a_gpu_that_is_not_ready_says_so(state: model.GpuState) -> None:
    shown = draw.svg(snapshot(wiring.gpu(at(1), state=state)))
    assert str(state) in words(shown)
    assert "#cf222e" in shown


def test_an_empty_machine_is_a_picture_too() -> None:
    assert words(draw.svg(snapshot(host=model.Host()))) == [
        "this machine",
        "no GPU, NIC or NVMe controller on this machine",
    ]


@given(st.text(max_size=200))
@settings(max_examples=50)
def test_any_text_from_hardware_is_escaped_and_cut(text: str) -> None:
    text = text.encode(errors="replace").decode()
    gpu = replace(wiring.gpu(at(1)), product=text + "</text><script>x</script>", uuid=text)
    nic = model.Nic(pci=wiring.function(at(2)), interfaces=(model.NetworkInterface(name=text * 3),))
    picture = draw.svg(snapshot(gpu, nics=(nic,), host=model.Host(vendor=text, product='"><')))
    assert not list(parsed(picture).iter("{http://www.w3.org/2000/svg}script"))


PLACES = st.lists(
    st.tuples(
        st.sampled_from((0, 1, None)), st.sampled_from(("pci0000:00", "pci0000:80")), st.integers(0, 3), st.booleans()
    ),
    max_size=40,
)
"""NUMA node, host bridge, number of switches, and whether those are an overlay's."""


@given(PLACES)
@settings(max_examples=30, deadline=None)
def test_nothing_leaves_its_frame(places: list[tuple[int | None, str, int, bool]]) -> None:
    switches = tuple(PciAddress(0, 0xE0 + depth, 0, 0) for depth in range(3))
    sources = (model.Provenance.SYSFS, model.Provenance.OVERLAY)
    gpus = tuple(
        wiring.gpu(
            at(bus),
            pci=replace(
                wiring.function(at(bus), numa=numa, root=root, switches=switches[3 - depth :]),
                switch_source=None if depth == 0 else sources[given],
            ),
        )
        for bus, (numa, root, depth, given) in enumerate(places)
    )
    frames = [
        tuple(float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        for rect in parsed(draw.svg(snapshot(*gpus))).iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("rx") in ("4", "6")
    ]
    outer = frames[0]
    for x, y, width, height in frames[1:]:
        assert outer[0] <= x
        assert outer[1] <= y
        assert x + width <= outer[0] + outer[2]
        assert y + height <= outer[1] + outer[3]
    for i, one in enumerate(frames):
        for other in frames[i + 1 :]:
            apart = (
                one[0] + one[2] <= other[0]
                or other[0] + other[2] <= one[0]
                or one[1] + one[3] <= other[1]
                or other[1] + other[3] <= one[1]
            )
            inside = one[0] < other[0] and other[0] + other[2] < one[0] + one[2]
            assert apart or inside
