# SPDX-License-Identifier: Apache-2.0
"""Section `sharing` of the configuration file.

- the documented spelling gives the rules it says; what is left out has its default
- what is misspelt, out of bounds, contradictory or hidden is an error that names the line
- hostile documents end in one readable error
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery import address, document
from driver import configfile
from driver.errors import ConfigError
from driver.sharing import rules
from driver.sharing.rules import Fallback, Match, Mode, Rule
from driver.sharing.shares import Compute, Memory, Shares

ROOT = Path(__file__).parents[4]
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
UUID = "GPU-9c4f1b7e-0000-1111-2222-0123456789ab"


def parse(text: str) -> tuple[rules.Rule, ...]:
    return configfile.parse(document.parse(text.encode(), name="c.yaml"), folder=Path()).sharing


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(HEAD + text)
    return str(raised.value).splitlines()


def test_the_documented_rules_are_read() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shown = page.split("### Sharing\n\n```yaml\n")[1].split("```")[0]
    assert parse(HEAD + shown) == (
        Rule(
            match=Match(product="*H100*", count=4),
            mode=Mode.MIG_DYNAMIC,
            fallback=Fallback.WHOLE,
            profiles=("1g.10gb", "3g.*"),
        ),
        Rule(match=Match(numa_node=1), mode=Mode.MIG_STATIC),
        Rule(
            match=Match(address=address.parse("0000:9d:00.0")),
            mode=Mode.SHARES,
            shares=Shares(
                memory_step=1 << 30, compute_step=5, max_sharers=8, memory=Memory.CGROUP, compute=Compute.MPS
            ),
        ),
    )


def test_a_rule_without_a_match_is_for_every_gpu() -> None:
    assert parse(HEAD + "sharing: [{mode: mig-static}]\n") == (Rule(mode=Mode.MIG_STATIC),)
    assert parse(HEAD + "sharing: [{match: {}, mode: exclusive, fallback: none}]\n") == (Rule(fallback=Fallback.NONE),)


def test_every_condition_is_read() -> None:
    text = f"sharing:\n- match: {{address: 0000:1B:00.0, uuid: {UUID}, product: A30, numaNode: 0, count: 1}}\n"
    assert parse(HEAD + text + "  mode: mig-dynamic\n") == (
        Rule(
            match=Match(address=address.parse("0000:1b:00.0"), uuid=UUID, product="A30", numa_node=0, count=1),
            mode=Mode.MIG_DYNAMIC,
        ),
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("sharing:\n", ["c.yaml:3: sharing: must be a list, not null"]),
        ("sharing: {mode: exclusive}\n", ["c.yaml:3: sharing: must be a list"]),
        (
            "sharing:\n- mode: share\n",
            ["c.yaml:4: sharing[0].mode: must be 'exclusive', 'mig-static', 'mig-dynamic' or 'shares', not 'share'"],
        ),
        (
            "sharing:\n- mod: exclusive\n",
            ["c.yaml:4: sharing[0].mode: missing", "c.yaml:4: sharing[0].mod: unknown key; did you mean mode?"],
        ),
        # The lines of `match` in the wrong column must not mean every GPU.
        (
            "sharing:\n- match:\n  product: A30\n  mode: exclusive\n",
            [
                "c.yaml:4: sharing[0].match: must not be null: give a value, or leave it out",
                "c.yaml:5: sharing[0].product: unknown key; known here: fallback, match, mode, profiles, shares",
            ],
        ),
        (
            "sharing:\n- match:\n    address: 1b:00.0\n    uuid: MIG-1\n    product: ''\n    numaNode: 1024\n    count: 0\n  mode: exclusive\n",
            [
                "c.yaml:5: sharing[0].match.address: '1b:00.0' is not a PCI address (domain:bus:device.function)",
                "c.yaml:6: sharing[0].match.uuid: 'MIG-1' is not the UUID of a GPU, as nvidia-smi -L prints it (GPU-...)",
                "c.yaml:7: sharing[0].match.product: String should have at least 1 character, not ''",
                "c.yaml:8: sharing[0].match.numaNode: must be less than or equal to 1023, not 1024",
                "c.yaml:9: sharing[0].match.count: must be greater than or equal to 1, not 0",
            ],
        ),
        (
            "sharing:\n- {match: {numaNode: true, count: 1.0}, mode: exclusive}\n",
            [
                "c.yaml:4: sharing[0].match.numaNode: must be a whole number, not true",
                "c.yaml:4: sharing[0].match.count: must be a whole number, not 1.0",
            ],
        ),
        (
            "sharing:\n- {match: {product: '[H100'}, mode: exclusive}\n",
            [
                "c.yaml:4: sharing[0].match.product: '[H100' is no pattern: the [ at character 1 is never closed ([[] is a bracket)",
            ],
        ),
        (
            "sharing:\n- mode: mig-static\n  profiles: [1g.*]\n",
            [
                "c.yaml:5: sharing[0].profiles: only mode mig-dynamic makes instances of profiles, not mig-static",
            ],
        ),
        (
            "sharing:\n- mode: mig-dynamic\n  profiles: []\n",
            [
                "c.yaml:5: sharing[0].profiles: must not be empty: leave it out where every profile is offered",
            ],
        ),
        (
            "sharing:\n- mode: mig-dynamic\n  profiles: [1g.*, 2g, 3]\n",
            [
                "c.yaml:5: sharing[0].profiles[2]: must be text, not 3",
            ],
        ),
        (
            (
                "sharing:\n- match: {product: 'NVIDIA*'}\n  mode: exclusive\n- match: {numaNode: 0}\n  mode: exclusive\n"
                "- match:\n    product: NVIDIA A30\n    count: 1\n  mode: mig-dynamic\n"
            ),
            [
                (
                    "c.yaml:8: sharing[2]: has no effect: every GPU that it matches is taken by sharing[0] (line 4) before"
                    " it; put it in front of that, or remove it"
                ),
            ],
        ),
    ],
)
def test_errors_name_line_and_key(text: str, lines: list[str]) -> None:
    assert refusal(text) == lines


def test_lists_have_bounds() -> None:
    rule = "- {mode: exclusive, match: {count: 1}}\n"
    assert len(parse(HEAD + "sharing:\n" + rule * configfile.RULES_MAX)) == configfile.RULES_MAX
    assert refusal("sharing:\n" + rule * (configfile.RULES_MAX + 1)) == ["c.yaml:3: sharing: has more than 100 rules"]
    many = "".join(f"{number}, " for number in "a" * (configfile.PROFILES_MAX + 1))
    assert refusal(f"sharing:\n- mode: mig-dynamic\n  profiles: [{many}]\n") == [
        "c.yaml:5: sharing[0].profiles: has more than 32 patterns"
    ]


def test_the_worst_patterns_are_read_in_no_time() -> None:
    """Bounded by what the two patterns are long, for every pair of rules: far under the suite's limit of a test."""
    rule = "- {{match: {{numaNode: 1, product: {}}}, mode: exclusive}}\n"
    lines = [rule.format(f"'{'*a' * (number % 47)}{'?*' * (47 - number % 47)}b{number % 10}'") for number in range(100)]
    assert len(parse(HEAD + "sharing:\n" + "".join(lines))) == len(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sharing:\n- match: {product: *H100*}\n  mode: exclusive\n", "not YAML"),
        ("sharing: &a\n- mode: exclusive\n", "anchors"),
        ("sharing: [" * 70, "nested deeper"),
        ("sharing:\n- mode: exclusive\n  mode: mig-static\n", "duplicate key"),
        ("sharing:\n- mode: !!python/object/apply:os.system [ls]\n", "tags"),
        ("sharing:\n- mode: exclusive\n---\nsharing: []\n", "second document"),
    ],
)
def test_hostile_documents_end_in_one_readable_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as raised:
        configfile.load(path)
    assert len(str(raised.value).splitlines()) == 1
