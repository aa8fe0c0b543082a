# SPDX-License-Identifier: Apache-2.0
"""docs/claims.md tells the truth: its YAML is that of the examples or is tried as wrong, its tables are those of the code.

- a block of YAML stands in the example that is linked before it, line for line, or says what is wrong with it and is tried on a real node
- every example is linked; classes that ship; attributes with their types, and which of them are keys
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

import pytest
import yaml

from discovery import model
from driver.publish import attributes, devices
from tests.e2e.kit import examples, page
from tests.fakes import publishing

DEPLOY = examples.FOLDER.parent
TRIED = ("test_claim_traps.py", "test_nics.py", "test_hollow.py")
"""The scenarios that try what is wrong."""


def dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def stands_in(block: page.Block, name: str) -> bool:
    """Whether the lines follow one another in an example, whatever their common indentation."""
    lines = (examples.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    size = len(block.lines)
    return any(dedented(lines[at : at + size]) == list(block.lines) for at in range(len(lines) - size + 1))


def test_yaml_is_that_of_the_example_linked_before_it() -> None:
    right = [block for block in page.blocks() if block.wrong is None]
    assert len(right) > 10
    strangers = [block.line for block in right if block.example is None or not stands_in(block, block.example)]
    assert strangers == []


def test_what_is_wrong_is_tried_on_a_real_node() -> None:
    scenarios = "".join((page.PAGE.parents[1] / "tests/e2e" / name).read_text(encoding="utf-8") for name in TRIED)
    titles = [block.wrong for block in page.blocks() if block.wrong is not None]
    assert len(titles) == len(set(titles)) > 5
    assert [title for title in titles if f'"{title}"' not in scenarios] == []
    for title in titles:
        requests, _ = page.wrong(title)
        assert requests


def test_every_example_is_linked() -> None:
    assert page.linked() == set(examples.names())


def test_every_example_is_commented_and_listed() -> None:
    listed = (examples.FOLDER / "README.md").read_text(encoding="utf-8")
    for name in examples.names():
        assert f"({name}.yaml)" in listed
        assert len(examples.comment(name)) > 40
        assert (examples.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: ")


@pytest.mark.parametrize("name", examples.names())
def test_an_example_names_its_objects_alike(name: str) -> None:
    objects = list(yaml.safe_load_all((examples.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
    (pod,) = (body for body in objects if body["kind"] == "Pod")
    assert pod["metadata"]["name"] == name
    for body in objects:
        if body["kind"] == "ResourceClaimTemplate":
            assert body["metadata"]["name"] == name
            assert pod["spec"]["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": name}]


def test_the_classes_that_ship_are_those_of_the_page() -> None:
    manifests = (path.read_text(encoding="utf-8") for path in (DEPLOY / "daemonset").rglob("*.yaml"))
    bodies = (body for text in manifests for body in yaml.safe_load_all(text) if body is not None)
    shipped = [body["metadata"]["name"] for body in bodies if body["kind"] == "DeviceClass"]
    told = page.PAGE.read_text(encoding="utf-8").partition("The manifests bring three classes, ")[2].partition(". ")[0]
    assert re.findall(r"`([^`]+)`", told) == shipped


def complete() -> devices.Device:
    """A GPU of which everything is known, as it is offered."""
    one = publishing.at(0x1B)
    gpu = publishing.gpu(
        0x1B,
        pci={"switch": one, "switches": (one,), "cpu_socket": 0},
        fabric=model.Fabric(state="completed", cluster_uuid="3f1c9a52-0000-4000-8000-000000000001", clique_id=7),
        groups=model.GpuGroups(nvlink_domain=one, nvlink_clique=one, aligned_pair=one, aligned_quad=one),
        nic=model.NicPairing(address=one, distance=model.PathClass.PIX, name="mlx5_0", rail=0),
    )
    options = replace(publishing.OPTIONS, pcie_switches=True)
    (device,) = devices.build_devices(publishing.snapshot(gpu), options=options)
    return device


def test_the_attributes_are_those_of_a_complete_gpu() -> None:
    text = page.PAGE.read_text(encoding="utf-8").partition("\n## Attributes\n")[2]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (\w+) \|", text, re.MULTILINE)
    kinds = {str: "string", int: "int", devices.Version: "version", tuple: "list of strings"}
    offered = complete()
    assert {name: kind for name, kind, _ in rows} == {
        name: kinds[type(value)] for name, value in offered.attributes.items()
    }
    assert {name for name, _, there in rows if there == "always"} == set(attributes.DESCRIPTIONS)
    assert {there for _, _, there in rows} == {"key", "always"}
    assert all(f"`{name}`" in text.rpartition("Capacities")[2] for name in offered.capacity)
