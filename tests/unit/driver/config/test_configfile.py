# SPDX-License-Identifier: Apache-2.0
"""The configuration file.

- the documented example and the smallest file give the values they spell
- unknown keys, wrong types, duplicate rails and what this version has not are errors that name the line
- the effective configuration reads back as itself
- the published JSON Schema is the one of the code
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import address, document, strict
from driver import config, configfile, configload
from driver.errors import ConfigError
from driver.sharing import hiding, rules, shares

ROOT = Path(__file__).parents[4]
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"


def parse(text: str) -> config.AgentConfig:
    return configfile.parse(document.parse(text.encode(), name="c.yaml"), folder=Path())


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    return str(raised.value).splitlines()


def test_the_documented_example_is_read() -> None:
    text = HEAD + (
        "publish: {numaNode: scalar, pcieSwitches: false}     # numaNode: scalar | list\n"
        'topology: {overlayFile: "", rails: [{nic: "0000:18:00.0", rail: 0}]}\n'
        "sharing: []                                          # later\n"
    )
    assert parse(text) == config.AgentConfig(
        topology=config.TopologyConfig(rails={address.parse("0000:18:00.0"): 0}),
    )


def test_the_smallest_file_is_the_default() -> None:
    assert parse(HEAD) == config.AgentConfig()


def test_every_value_can_differ_from_its_default() -> None:
    text = (
        HEAD
        + "publish:\n  numaNode: list\n  pcieSwitches: true\ntopology:\n  rails:\n  - {nic: 0000:1B:00.0, rail: 3}\n"
    )
    assert parse(text) == config.AgentConfig(
        publish=config.PublishConfig(numa_node=config.NumaNodeForm.LIST, pcie_switches=True),
        topology=config.TopologyConfig(rails={address.parse("0000:1b:00.0"): 3}),
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["c.yaml:1: expected apiVersion: config.nearfield.dev/v1alpha1 and kind: AgentConfig"]),
        ("- a\n", ["c.yaml:1: expected apiVersion: config.nearfield.dev/v1alpha1 and kind: AgentConfig"]),
        ("publish: {}\n", ["c.yaml:1: apiVersion: missing", "c.yaml:1: kind: missing"]),
        (
            "apiVersion: config.nearfield.dev/v2\nkind: Agent\n",
            [
                "c.yaml:1: apiVersion: must be 'config.nearfield.dev/v1alpha1', not 'config.nearfield.dev/v2'",
                "c.yaml:2: kind: must be 'AgentConfig', not 'Agent'",
            ],
        ),
        (HEAD + "publsh: {}\n", ["c.yaml:3: publsh: unknown key; did you mean publish?"]),
        (
            HEAD + "publish:\n  numaNode: both\n  numa_node: list\n  pcieSwitches: 'yes'\n",
            [
                "c.yaml:4: publish.numaNode: must be 'scalar' or 'list', not 'both'",
                "c.yaml:6: publish.pcieSwitches: must be true or false, not 'yes'",
                "c.yaml:5: publish.numa_node: unknown key; did you mean numaNode?",
            ],
        ),
        (HEAD + "publish:\n", ["c.yaml:3: publish: must be a mapping, not null"]),
        (
            HEAD + "topology:\n  overlayFile: [o.yaml]\n",
            ["c.yaml:4: topology.overlayFile: must be text"],
        ),
        (
            HEAD + 'topology: {overlayFile: "a\\0b"}\n',
            ["c.yaml:3: topology.overlayFile: a path has no NUL byte"],
        ),
        (
            HEAD + "sharing:\n- {}\n",
            ["c.yaml:4: sharing[0].mode: missing"],
        ),
        (
            HEAD
            + "topology:\n  rails:\n  - {nic: 18:00.0, rail: 0}\n  - nic: 0000:18:00.0\n    rail: -1\n    speed: 1\n  - 7\n",
            [
                "c.yaml:5: topology.rails[0].nic: '18:00.0' is not a PCI address (domain:bus:device.function)",
                "c.yaml:7: topology.rails[1].rail: must be greater than or equal to 0, not -1",
                "c.yaml:8: topology.rails[1].speed: unknown key; known here: nic, rail",
                "c.yaml:9: topology.rails[2]: must be a mapping, not 7",
            ],
        ),
        (
            HEAD + "topology:\n  rails:\n  - {nic: 0000:18:00.0, rail: true}\n  - {nic: 0000:19:00.0, rail: '1'}\n",
            [
                "c.yaml:5: topology.rails[0].rail: must be a whole number, not true",
                "c.yaml:6: topology.rails[1].rail: must be a whole number, not '1'",
            ],
        ),
        (
            HEAD + "topology:\n  rails:\n  - {nic: 0000:1b:00.0, rail: 0}\n  - {nic: '00000000:1B:00.0', rail: 1}\n",
            ["c.yaml:6: topology.rails[1].nic: 0000:1b:00.0 has a rail already (0)"],
        ),
    ],
)
def test_errors_name_line_and_key(text: str, lines: list[str]) -> None:
    assert refusal(text) == lines


def test_the_overlay_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for told, meant in (("o.yaml", tmp_path / "o.yaml"), ("/etc/o.xml", Path("/etc/o.xml"))):
        path.write_text(f"{HEAD}topology: {{overlayFile: {told}}}\n", encoding="utf-8")
        assert configfile.load(path) == config.AgentConfig(topology=config.TopologyConfig(overlay_file=meant))


def test_what_is_in_effect_may_be_written_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file was named from another folder than its own."""
    path = tmp_path / "etc/c.yaml"
    path.parent.mkdir()
    path.write_text(f"{HEAD}topology: {{overlayFile: o.yaml}}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    effective = configfile.load(Path("etc/c.yaml"))
    path.write_text(json.dumps(configfile.to_json(effective)), encoding="utf-8")
    assert configfile.load(Path("etc/c.yaml")) == effective


def test_a_file_that_is_no_yaml_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(HEAD.encode() + b"publish: {numaNode: list\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:4: not YAML: .*expected ',' or '}'"):
        configfile.load(path)
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read: No such file"):
        configfile.load(tmp_path / "nothing.yaml")


ADDRESSES = st.builds(
    address.PciAddress, st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)
)

RULES = st.builds(
    rules.Rule,
    match=st.builds(
        rules.Match,
        address=st.none() | ADDRESSES,
        uuid=st.none() | st.just("GPU-9c4f1b7e-0000-1111-2222-0123456789ab"),
        product=st.none() | st.sampled_from(("*H100*", "NVIDIA [AH]*", "?*")),
        numa_node=st.none() | st.integers(0, configfile.NUMA_MAX),
        count=st.none() | st.integers(1, configfile.COUNT_MAX),
    ),
    mode=st.just(rules.Mode.MIG_DYNAMIC),
    fallback=st.sampled_from(rules.Fallback),
    profiles=st.lists(st.sampled_from(("1g.*", "3g.40gb+me")), max_size=2).map(tuple),
) | st.builds(
    rules.Rule,
    match=st.builds(rules.Match, address=ADDRESSES),
    mode=st.just(rules.Mode.SHARES),
    fallback=st.sampled_from(rules.Fallback),
    shares=st.builds(
        shares.Shares,
        memory_step=st.integers(1, 1 << 20).map(lambda mebibytes: mebibytes << 20),
        compute_step=st.sampled_from((1, 5, 25)),
        max_sharers=st.integers(1, 128),
        memory=st.sampled_from(shares.Memory),
        compute=st.just(shares.Compute.NONE),
        default_compute=st.none() | st.sampled_from((25, 50, 100)),
        time_slice=st.sampled_from(shares.TimeSlice),
    ),
)


@settings(max_examples=50)
@given(
    st.builds(
        config.AgentConfig,
        publish=st.builds(
            config.PublishConfig, numa_node=st.sampled_from(config.NumaNodeForm), pcie_switches=st.booleans()
        ),
        topology=st.builds(
            config.TopologyConfig,
            overlay_file=st.sampled_from((None, Path("o.yaml"), Path("/etc/o.xml"))),
            rails=st.dictionaries(ADDRESSES, st.integers(0, strict.RAIL_MAX), max_size=4),
        ),
        sharing=st.lists(RULES, max_size=3).filter(lambda rules: not list(hiding.hidden(rules))).map(tuple),
    )
)
def test_the_effective_configuration_reads_back_as_itself(effective: config.AgentConfig) -> None:
    written = json.dumps(configfile.to_json(effective))
    assert parse(written) == effective
    assert configload.decode(json.loads(written)) == effective


def test_the_published_schema_is_that_of_the_code() -> None:
    """To rewrite it: nearfield config schema > docs/configuration.schema.json."""
    published = json.loads((ROOT / "docs/configuration.schema.json").read_text(encoding="utf-8"))
    assert published == configfile.json_schema()


def test_the_documented_file_is_read() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shown = page.split("```yaml\n")[1].split("```")[0]
    assert parse(shown) == config.AgentConfig(
        topology=config.TopologyConfig(rails={address.parse("0000:18:00.0"): 0}),
    )
