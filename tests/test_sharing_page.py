# SPDX-License-Identifier: Apache-2.0
"""docs/sharing.md tells the truth of levels, keys, capacities, examples, Findings and metrics.

- the levels are those of the code, in its order; the Findings and metrics exist
- the examples with a share are those of the table; the configuration and the claim of the page are read as they stand
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from driver import configfile
from driver.observe import catalog
from driver.sharing import rules, shares
from tests.e2e.kit import examples

PAGE = examples.FOLDER.parents[1] / "docs/sharing.md"


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    return text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_levels_are_those_of_the_code() -> None:
    for title, levels in (("What holds the memory", shares.Memory), ("What holds compute", shares.Compute)):
        named = re.findall(r"^\| `([a-z]+)` \|", section(title), re.MULTILINE)
        assert named == [str(level) for level in levels]


def test_the_configuration_is_read_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(text().partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    (rule,) = configfile.load(file).sharing
    assert rule.mode is rules.Mode.SHARES
    assert rule.shares is not None
    assert (rule.shares.memory, rule.shares.compute) == (shares.Memory.CGROUP, shares.Compute.MPS)


def test_the_claim_is_a_claim() -> None:
    (body,) = yaml.safe_load_all(
        section("Coming from NVIDIA's device plugin").partition("```yaml\n")[2].partition("```")[0]
    )
    (request,) = body["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "share.nearfield.dev"


def test_the_examples_are_all_there() -> None:
    with_shares = {name for name in examples.names() if "share.nearfield.dev" in str(examples.load(name))}
    assert set(re.findall(r"/([a-z0-9-]+)\.yaml\)", section("Claims"))) == with_shares


def test_findings_and_metrics_exist() -> None:
    documented = (PAGE.parent / "findings.md").read_text(encoding="utf-8")
    codes = set(re.findall(r"`(shar(?:e|ing)-[a-z-]+)`", text()))
    assert codes
    assert {code for code in codes if f"| `{code}` |" not in documented} == set()
    named = set(re.findall(r"\b(nearfield_[a-z_]+)", text()))
    assert named
    assert named <= {metric.name for metric in catalog.METRICS}
