# SPDX-License-Identifier: Apache-2.0
"""What each machine of the zoo publishes, attribute by attribute, written down by hand in `published/`; faulty machines and those
with MIG differ from the others by what `published_faulty` and `published_divided` say.

People's selectors depend on these values: a change there is a change for them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import child, options
from discovery.mock import render, zoo
from driver.publish import devices, wire
from tests.machines import published_divided, published_faulty
from tests.machines.attributes import BUS_ID, DIVIDED, FAULTY, FOLDER, HEALTHY, written

DRIVER = "gpu.nearfield.dev"
OTHERS = {**published_faulty.MACHINES, **published_divided.MACHINES}
"""What is not in the folder, as it follows from what is."""


def test_every_machine_is_written_down() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.txt" for name in HEALTHY if name not in DIVIDED}
    assert published_faulty.MACHINES.keys() == set(FAULTY)
    assert published_divided.MACHINES.keys() == set(DIVIDED)


@pytest.mark.parametrize("name", zoo.names())
def test_a_machine_publishes(name: str, tmp_path: Path) -> None:
    tree = render.render(zoo.load(name), tmp_path / "tree")
    source = options.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
    prober = child.InProcessProber(source=source, options=options.ProbeOptions())
    try:
        snapshot = prober.probe(timeout_s=60.0)
    finally:
        prober.close()
    offered = devices.build_devices(snapshot, options=devices.PublishOptions(driver_name=DRIVER))
    bodies = [wire.device_to_json(device, driver_name=DRIVER) for device in offered]
    said = [{key: next(iter(value.values())) for key, value in body["attributes"].items()} for body in bodies]
    uuids = [attributes.pop("uuid") for attributes in said]
    expected, capacity = OTHERS.get(name) or written(name)
    assert said == expected
    assert len({uuid for uuid in uuids if uuid.startswith("GPU-")}) == len(expected)
    for body, attributes in zip(bodies, expected, strict=True):
        assert body["name"] == "gpu-" + attributes[BUS_ID].replace(":", "-").replace(".", "-")
        assert {key: value["value"] for key, value in body["capacity"].items()} == capacity | {"compute": "100"}
