# SPDX-License-Identifier: Apache-2.0
"""What machines publish of GPUs that can be divided. `partitions/<machine>.txt` has, for a machine whose GPUs are all alike, the
partitions of one GPU in the order in which they are offered, with their capacities; what stands on divided machines is below.

Aspects: the tables; every machine of the zoo under each policy is valid, says all that it must, and the same of its whole GPUs
as without a policy; the order over GPUs; sixteen GPUs; GPUs that somebody has divided.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from discovery import child, model, options
from discovery.mock import render, zoo
from driver import values
from driver.publish import attributes, devices, limits, slices
from driver.sharing import rules
from tests.machines.attributes import DIVIDED

FOLDER = Path(__file__).parent / "partitions"
OPTIONS = devices.PublishOptions(driver_name="gpu.nearfield.dev")
ALL_LISTS = devices.PublishOptions(driver_name="gpu.nearfield.dev", numa_list=True, pcie_switches=True)
PLACE = slices.Place(driver_name="gpu.nearfield.dev", node_name="n1")
COLUMNS = ("memory", "compute", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines")
UNIFORM = {
    "cloud-vm-h100-8-efa": "dgx-h100",
    "dgx-b200": "dgx-b200",
    "dgx-h100": "dgx-h100",
    "gb200-tray": "gb200-tray",
    "gh200": "gh200",
    "h100-16-pcie": "h100-16-pcie",
    "hgx-h100": "dgx-h100",
    "hgx-h200": "hgx-h200",
}
"""Machines all of whose GPUs can be divided while they are in use, and the table of one."""


@functools.cache
def snapshot(name: str) -> model.Snapshot:
    with tempfile.TemporaryDirectory() as folder:
        tree = render.render(zoo.load(name), Path(folder) / "tree")
        source = options.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
        prober = child.InProcessProber(source=source, options=options.ProbeOptions())
        try:
            return prober.probe(timeout_s=60.0)
        finally:
            prober.close()


def offer(name: str, mode: rules.Mode, *, how: devices.PublishOptions = OPTIONS) -> devices.Offer:
    seen = snapshot(name)
    policies = {gpu.address: rules.Policy(mode=mode) for gpu in seen.gpus}
    return devices.build_offer(seen, options=how, policies=policies)


def parts(offered: devices.Offer) -> dict[str, list[devices.Device]]:
    """The partitions of each GPU, in order."""
    found: dict[str, list[devices.Device]] = {}
    for device in offered.devices:
        if device.attributes[attributes.TYPE] == attributes.TYPE_MIG:
            found.setdefault(values.gpu_of(device.name), []).append(device)
    return found


def line(device: devices.Device) -> tuple[str, ...]:
    start = device.name.rpartition("-")[2]
    return str(device.attributes["profile"]), start, *(str(device.capacity[column]) for column in COLUMNS)


def written(table: str) -> list[tuple[str, ...]]:
    """The lines of a table; memory is in MiB there."""
    header, *rows = (
        tuple(text.split())
        for text in (FOLDER / f"{table}.txt").read_text(encoding="utf-8").splitlines()
        if text and not text.startswith("#")
    )
    assert header == ("profile", "start", *COLUMNS)
    return [(profile, start, str(int(memory) << 20), *rest) for profile, start, memory, *rest in rows]


def test_every_table_is_of_a_machine() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(set(UNIFORM.values()))


@pytest.mark.parametrize("name", zoo.names())
def test_a_machine_under_every_policy(name: str) -> None:
    """One test, as a machine takes long to read."""
    offers = {mode: offer(name, mode) for mode in rules.Mode}
    for mode, offered in offers.items():
        every_slice_is_valid(offered)
        every_slice_is_valid(offer(name, mode, how=ALL_LISTS))
    alone = {device.name: device for device in offers[rules.Mode.EXCLUSIVE].devices}
    wholes = [device for device in offers[rules.Mode.MIG_DYNAMIC].devices if device.attributes["type"] == "gpu"]
    if name not in DIVIDED:
        assert [device.name for device in wholes] == list(alone)
    for device in wholes:
        said = alone.get(device.name, device)
        assert (device.attributes, device.capacity) == (said.attributes, said.capacity)
    if name in UNIFORM:
        found = parts(offers[rules.Mode.MIG_DYNAMIC])
        assert list(found) == [device.name for device in reversed(wholes)]
        expected = written(UNIFORM[name])
        for of_gpu in found.values():
            assert [line(device) for device in of_gpu] == expected
        assert offers[rules.Mode.MIG_DYNAMIC].findings == ()


def every_slice_is_valid(offered: devices.Offer) -> None:
    assert limits.violations(slices.build_slices(offered.devices, place=PLACE)) == ()
    for device in offered.devices:
        is_part = device.attributes["type"] == "mig"
        assert set(attributes.MIG_DESCRIPTIONS if is_part else attributes.DESCRIPTIONS) <= device.attributes.keys()
        assert len(device.attributes) + len(device.capacity) <= attributes.MOST


def test_sixteen_gpus_publish_within_every_limit() -> None:
    bodies = slices.build_slices(offer("h100-16-pcie", rules.Mode.MIG_DYNAMIC).devices, place=PLACE)
    assert [len(body["spec"].get("devices", ())) for body in bodies] == [64] * 6 + [32, 0, 0]
    assert [len(body["spec"].get("sharedCounters", ())) for body in bodies] == [0] * 7 + [8, 8]


def test_ampere_is_whole_while_mig_is_off() -> None:
    offered = offer("dgx-a100-40gb", rules.Mode.MIG_DYNAMIC)
    assert Counter(str(device.attributes["type"]) for device in offered.devices) == {"gpu": 8}
    assert all(device.consumes is None for device in offered.devices)


def at(offered: devices.Offer) -> dict[str, str]:
    """`profile@start` of each partition of each GPU."""
    return {
        gpu: " ".join(f"{device.attributes['profile']}@{device.name.rpartition('-')[2]}" for device in listed)
        for gpu, listed in parts(offered).items()
    }


def test_existing_instances_of_divided_hopper_gpus() -> None:
    offered = offer("dgx-h100-mig", rules.Mode.MIG_STATIC)
    assert at(offered) == {
        "gpu-0000-d1-00-0": "2g.20gb@0",
        "gpu-0000-c3-00-0": "7g.80gb@0",
        "gpu-0000-9d-00-0": "4g.40gb@0",
        "gpu-0000-61-00-0": "1g.20gb@6 2g.20gb@4 3g.40gb@0",
        "gpu-0000-52-00-0": "1g.10gb@5 1g.10gb@4 1g.10gb@3 1g.10gb@2 1g.10gb@1 1g.10gb@0 1g.10gb+me@6",
    }
    assert len(offered.devices) == 13
    assert offered.findings == (), "what is wrong there is said with the GPUs and the policy"


def test_divided_hopper_gpus_are_offered_beside_what_stands_there() -> None:
    offered = offer("dgx-h100-mig", rules.Mode.MIG_DYNAMIC)
    found = at(offered)
    assert [device.name for device in offered.devices if device.attributes["type"] == "gpu"] == [
        "gpu-0000-1b-00-0",
        "gpu-0000-43-00-0",
        "gpu-0000-df-00-0",
    ]
    assert {gpu: len(places.split()) for gpu, places in found.items()} == {
        "gpu-0000-df-00-0": 25,
        "gpu-0000-d1-00-0": 10,
        "gpu-0000-43-00-0": 25,
        "gpu-0000-1b-00-0": 25,
    }
    assert found["gpu-0000-d1-00-0"] == (
        "1g.10gb@6 1g.10gb@5 1g.10gb@4 1g.10gb+me@6 1g.10gb+me@5 1g.10gb+me@4 1g.20gb@6 1g.20gb@4 2g.20gb@4 3g.40gb@4"
    )


def test_divided_ampere_gpus_are_offered_by_their_mode() -> None:
    offered = offer("a30-4-mig", rules.Mode.MIG_DYNAMIC)
    assert [device.name for device in offered.devices if device.attributes["type"] == "gpu"] == ["gpu-0000-17-00-0"]
    assert at(offered) == {
        "gpu-0000-e3-00-0": "1g.6gb@3 1g.6gb@2 1g.6gb@1 1g.6gb@0 1g.6gb+me@3 1g.6gb+me@2 1g.6gb+me@1 1g.6gb+me@0 "
        "2g.12gb@2 2g.12gb@0 2g.12gb+me@2 2g.12gb+me@0 4g.24gb@0"
    }
