# SPDX-License-Identifier: Apache-2.0
"""docs/mig.md tells the truth of what a slice says of itself, of Findings, and of what the manifests and examples are called.

- the attributes and capacities are those of a slice of which everything is known
- the Findings are in docs/findings.md, the metrics in the catalogue
- the examples with a slice are those of the table
"""

from __future__ import annotations

import re
from dataclasses import replace

from discovery import model
from driver.observe import catalog
from driver.publish import attributes, devices
from driver.sharing import rules
from tests.e2e.kit import examples
from tests.fakes import divided, publishing

PAGE = examples.FOLDER.parents[1] / "docs/mig.md"


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def complete() -> devices.Device:
    """A slice of a GPU of which everything is known, as it is offered."""
    one = publishing.at(0x1B)
    profiles = tuple(
        replace(profile, copy_engines=1, decoders=1, encoders=1, jpeg_engines=1, ofa_engines=1)
        for profile in divided.H100
    )
    gpu = replace(
        divided.gpu(
            0x1B,
            divided.instance(19, 0),
            pci={"switch": one, "switches": (one,), "cpu_socket": 0},
            fabric=model.Fabric(state="completed", cluster_uuid="3f1c9a52-0000-4000-8000-000000000001", clique_id=7),
            groups=model.GpuGroups(nvlink_domain=one, nvlink_clique=one, aligned_pair=one, aligned_quad=one),
            nic=model.NicPairing(address=one, distance=model.PathClass.PIX, name="mlx5_0", rail=0),
        ),
        mig_profiles=profiles,
    )
    static = {gpu.address: rules.Policy(mode=rules.Mode.MIG_STATIC)}
    (device,) = devices.build_devices(publishing.snapshot(gpu), options=publishing.OPTIONS, policies=static)
    return device


def test_the_attributes_and_capacities_are_those_of_a_complete_slice() -> None:
    table = text().partition("| attribute | type | meaning |")[2].partition("\n\n")[0]
    named = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    }
    standard = f"{attributes.STANDARD}/"
    offered = complete()
    assert named - {attributes.STANDARD} == {name.removeprefix(standard) for name in offered.attributes}
    capacities = text().partition("\nCapacities: ")[2].partition(". ")[0]
    assert set(re.findall(r"`([^`]+)`", capacities)) == set(offered.capacity)


def test_the_findings_and_metrics_are_there() -> None:
    table = text().partition("| Finding | says |")[2].partition("\n\n")[0]
    codes = set(re.findall(r"`([a-z-]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])))
    findings = (PAGE.parent / "findings.md").read_text(encoding="utf-8")
    assert len(codes) > 5
    assert {code for code in codes if f"\n| `{code}` | " not in findings} == set()
    metrics = set(re.findall(r"`(nearfield_\w+)`", text()))
    assert metrics == {metric.name for metric in catalog.METRICS if metric.name.startswith("nearfield_mig_")}


def test_the_examples_are_all_there() -> None:
    with_slices = {
        name
        for name in examples.names()
        if '"mig"' in str(examples.load(name)) or "mig.nearfield.dev" in str(examples.load(name))
    }
    table = text().partition("## Claims\n")[2].partition("\n\nWhat a slice")[0]
    assert set(re.findall(r"/([a-z0-9-]+)\.yaml\)", table)) == with_slices
