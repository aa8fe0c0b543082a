# SPDX-License-Identifier: Apache-2.0
"""The overlay file.

- which of the two forms a file has is told by its content
- every value has its line; a NCCL topology may stand for one kind of machine of a fleet
- unknown keys, wrong types, null, empty lists and what is never reached are errors that name the line
- the published JSON Schema is the one of the code; the documented files are read
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import document, overlay, overlayfile, strict
from discovery.address import parse
from discovery.errors import DocumentError

ROOT = Path(__file__).parents[3]
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: TopologyOverlay\nmachines:\n"
XML = '<system version="1"><cpu numaid="0"><pci busid="0001:00:00.0"/></cpu></system>'


def read(directory: Path, text: str | bytes) -> overlay.Overlay:
    path = directory / "o.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return overlayfile.read(path)


def refusal(directory: Path, text: str | bytes) -> list[str]:
    with pytest.raises(DocumentError) as raised:
        read(directory, text)
    return [line.replace(f"{directory}/", "") for line in str(raised.value).splitlines()]


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = HEAD + (
        "- match: {vendor: Cloud, product: big, gpu: 10de:2330}\n"
        "  numaNodes:\n"
        "  - node: 1\n"
        "    devices:\n"
        "    - 0001:00:00.0\n"
        "    - '00000002:00:00.0'\n"
        "  switches:\n"
        "  - {name: outer}\n"
        "  - {name: inner, parent: outer, devices: [0001:00:00.0]}\n"
        "  rails:\n"
        "  - nic: 0101:00:00.0\n"
        "    rail: 3\n"
        "- rails: [{nic: 0102:00:00.0, rail: 0}]\n"
    )
    name = str(tmp_path / "o.yaml")
    one, two = parse("0001:00:00.0"), parse("0002:00:00.0")
    assert read(tmp_path, text) == overlay.Overlay(
        file=name,
        machines=(
            overlay.Machine(
                file=name,
                line=4,
                match=overlay.Match(vendor="Cloud", product="big", gpu=(0x10DE, 0x2330)),
                numa_nodes=(
                    overlay.NumaNode(
                        node=1,
                        line=6,
                        devices=(overlay.Device(address=one, line=8), overlay.Device(address=two, line=9)),
                    ),
                ),
                groups=(
                    overlay.Group(name="outer", line=11),
                    overlay.Group(
                        name="inner", line=12, parent="outer", devices=(overlay.Device(address=one, line=12),)
                    ),
                ),
                rails=(overlay.Rail(nic=parse("0101:00:00.0"), rail=3, line=14),),
            ),
            overlay.Machine(file=name, line=16, rails=(overlay.Rail(nic=parse("0102:00:00.0"), rail=0, line=16),)),
        ),
    )


@pytest.mark.parametrize("before", ["", "\n  ", "\ufeff", "<!-- cloud -->\n", '<?xml version="1.0"?>\n'])
def test_xml_is_told_by_its_content(tmp_path: Path, before: str) -> None:
    read_back = read(tmp_path, before + XML)
    assert [machine.numa_nodes[0].node for machine in read_back.machines] == [0]


def test_a_fleet_may_have_a_nccl_topology_for_some_of_its_machines(tmp_path: Path) -> None:
    (tmp_path / "topologies").mkdir()
    other = tmp_path / "topologies/a.xml"
    other.write_text(XML, encoding="utf-8")
    (machine,) = read(tmp_path, HEAD + "- match: {gpu: 10de:20b0}\n  ncclTopology: topologies/a.xml\n").machines
    assert (machine.file, machine.match) == (str(other), overlay.Match(gpu=(0x10DE, 0x20B0)))
    other.write_text("<system/>", encoding="utf-8")
    assert refusal(tmp_path, HEAD + "- ncclTopology: topologies/a.xml\n") == [
        "o.yaml:4: machines[0].ncclTopology: topologies/a.xml:1: system has no version, and NCCL takes version 1 only"
    ]
    other.write_text("kind: x", encoding="utf-8")
    assert refusal(tmp_path, HEAD + "- ncclTopology: topologies/a.xml\n") == [
        'o.yaml:4: machines[0].ncclTopology: topologies/a.xml:1: not XML: a NCCL topology begins with <system version="1">'
    ]
    other.write_text(XML, encoding="utf-8")
    assert refusal(tmp_path, HEAD + "- ncclTopology: topologies/a.xml\n" * 2) == [
        "o.yaml:5: never reached, as each machine that matches here matches on line 4 already"
    ]
    assert refusal(tmp_path, HEAD + "- ncclTopology: b.xml\n") == [
        "o.yaml:4: machines[0].ncclTopology: b.xml: cannot be read: No such file or directory"
    ]


def test_what_was_read_can_be_written_as_a_document(tmp_path: Path) -> None:
    text = HEAD + (
        "- match: {vendor: Cloud, gpu: 10de:2330}\n"
        "  numaNodes: [{node: 1, devices: [0001:00:00.0, 0002:00:00.0]}]\n"
        "  switches: [{name: outer}, {name: inner, parent: outer, devices: [0001:00:00.0]}]\n"
        "  rails: [{nic: 0101:00:00.0, rail: 3}]\n"
        "- ncclTopology: a.xml\n"
    )
    (tmp_path / "a.xml").write_text(XML, encoding="utf-8")
    written = overlayfile.to_json(read(tmp_path, text))
    assert json.loads(json.dumps(written)) == {
        "apiVersion": "config.nearfield.dev/v1alpha1",
        "kind": "TopologyOverlay",
        "machines": [
            {
                "match": {"vendor": "Cloud", "gpu": "10de:2330"},
                "numaNodes": [{"node": 1, "devices": ["0001:00:00.0", "0002:00:00.0"]}],
                "switches": [{"name": "outer"}, {"name": "inner", "parent": "outer", "devices": ["0001:00:00.0"]}],
                "rails": [{"nic": "0101:00:00.0", "rail": 3}],
            },
            {"numaNodes": [{"node": 0, "devices": ["0001:00:00.0"]}]},
        ],
    }
    assert overlayfile.to_json(read(tmp_path, json.dumps(written))) == written


@pytest.mark.parametrize(
    ("data", "is_overlay"),
    [
        (XML.encode(), True),
        (b"apiVersion: x\nkind: TopologyOverlay\n", True),
        (b'kind: "TopologyOverlay" # mine', True),
        (b"kind: AgentConfig\nmachines: kind: TopologyOverlay", False),
        (b"kind: TopologyOverlays\n", False),
        (b"", False),
    ],
)
def test_an_overlay_is_told_from_a_configuration(data: bytes, is_overlay: bool) -> None:
    assert overlayfile.is_overlay(data) is is_overlay


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["o.yaml:1: expected apiVersion: config.nearfield.dev/v1alpha1 and kind: TopologyOverlay"]),
        ("[]", ["o.yaml:1: expected apiVersion: config.nearfield.dev/v1alpha1 and kind: TopologyOverlay"]),
        (
            "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n",
            ["o.yaml:2: kind: must be 'TopologyOverlay', not 'AgentConfig'", "o.yaml:1: machines: missing"],
        ),
        (HEAD + "  []\n", ["o.yaml:3: machines: must not be empty"]),
        (HEAD + "- {}\n", ["o.yaml:4: machines[0]: says nothing: give numaNodes, switches, rails or ncclTopology"]),
        (
            HEAD + "- match:\n  numaNode: []\n  switches:\n  - {nane: a, parent: , devices: [1]}\n",
            [
                "o.yaml:4: machines[0].match: must not be null: give a value, or leave it out",
                "o.yaml:7: machines[0].switches[0].name: missing",
                "o.yaml:7: machines[0].switches[0].parent: must not be null: give a value, or leave it out",
                "o.yaml:7: machines[0].switches[0].devices[0]: must be text, not 1",
                "o.yaml:7: machines[0].switches[0].nane: unknown key; did you mean name?",
                "o.yaml:5: machines[0].numaNode: unknown key; did you mean numaNodes?",
            ],
        ),
        (
            HEAD + "- match: {}\n  numaNodes:\n  - {node: 1024, devices: []}\n  - {node: -1, devices: [0000:0g:00.0]}\n",
            [
                "o.yaml:4: machines[0].match: give vendor, product or gpu; leave match out where any machine is meant",
                "o.yaml:6: machines[0].numaNodes[0].node: must be less than or equal to 1023, not 1024",
                "o.yaml:6: machines[0].numaNodes[0].devices: must not be empty",
                "o.yaml:7: machines[0].numaNodes[1].node: must be greater than or equal to 0, not -1",
                "o.yaml:7: machines[0].numaNodes[1].devices[0]: '0000:0g:00.0' is not a PCI address (domain:bus:device.function)",
            ],
        ),
        (
            HEAD + "- ncclTopology: a.xml\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n",
            ["o.yaml:4: machines[0]: ncclTopology stands instead of numaNodes, switches and rails, not beside them"],
        ),
        (
            HEAD + "- match: {gpu: H100}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n",
            ["o.yaml:4: machines[0].match.gpu: String should match pattern '^[0-9a-f]{4}:[0-9a-f]{4}$', not 'H100'"],
        ),
        (
            HEAD + "- rails: [{nic: 0000:01:00.0, rail: 0}]\n- rails: [{nic: 0000:01:00.0, rail: 0}]\n",
            ["o.yaml:5: never reached, as each machine that matches here matches on line 4 already"],
        ),
        (
            HEAD
            + "- match: {vendor: a, gpu: 10de:2330}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n"
            + "- match: {vendor: a}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n"
            + "- match: {gpu: 10de:2330}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n"
            + "- match: {gpu: 10de:2330, product: b}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n"
            + "- match: {vendor: a}\n  rails: [{nic: 0000:01:00.0, rail: 0}]\n",
            [
                "o.yaml:10: never reached, as each machine that matches here matches on line 8 already",
                "o.yaml:12: never reached, as each machine that matches here matches on line 6 already",
            ],
        ),
        (
            HEAD + "- switches:\n  - {name: a, parent: b, devices: [0000:01:00.0]}\n  - {name: b, parent: a}\n",
            [
                "o.yaml:5: group 'a' is inside itself: 'a' in 'b' in 'a'",
                "o.yaml:6: group 'b' is inside itself: 'b' in 'a' in 'b'",
            ],
        ),
        (HEAD + "- &a {}\n", ["o.yaml:4: anchors (&a) are not accepted; write the value out where it is used"]),
    ],
)  # fmt: skip
def test_errors_name_line_and_key(tmp_path: Path, text: str, lines: list[str]) -> None:
    assert refusal(tmp_path, text) == lines


WORDS = st.sampled_from(
    (
        "machines", "match", "numaNodes", "node", "devices", "switches", "name", "parent", "rails", "nic", "rail", "ncclTopology",
        "vendor", "product", "gpu", "10de:2330", "0000:01:00.0", "a", "kind", "", "\0", "~",
    )
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 2**70), st.floats(allow_nan=False, allow_infinity=False), WORDS
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.lists(VALUES, max_size=3))
def test_whatever_the_document_holds_it_is_an_overlay_or_an_error(machines: list[object]) -> None:
    told = {"apiVersion": strict.API_VERSION, "kind": overlayfile.KIND, "machines": machines}
    source = document.parse(json.dumps(told).encode(), name="o.yaml")
    try:
        read_back = overlayfile.parse(source, folder=Path("/nonexistent"))
    except DocumentError:
        return
    assert [overlay.problems(machine) for machine in read_back.machines] == [()] * len(machines)


def test_too_much_is_refused(tmp_path: Path) -> None:
    rails = "".join(f"  - {{nic: {i >> 8:04x}:{i & 0xFF:02x}:00.0, rail: 0}}\n" for i in range(overlay.MAX_DEVICES + 1))
    assert refusal(tmp_path, f"{HEAD}- rails:\n{rails}") == [
        "o.yaml: more than 4096 devices and groups are named; split the file"
    ]
    groups = "".join(f"  - {{name: g{i}, parent: g{i + 1}}}\n" for i in range(6_000))
    lines = refusal(tmp_path, f"{HEAD}- switches:\n{groups}  - {{name: g6000}}\n")
    assert lines[0] == "o.yaml:5: group 'g0' is nested deeper than 16 groups, or inside one that is inside itself"
    assert lines[-1] == "o.yaml: and 5966 more problems"
    same = "  - {nic: 0000:01:00.0, rail: 0}\n" * 30
    lines = refusal(tmp_path, f"{HEAD}- rails:\n{same}")
    assert len(lines) == 21
    assert lines[-1] == "o.yaml: and 9 more problems"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"none\.yaml: cannot be read: No such file"):
        overlayfile.read(tmp_path / "none.yaml")


def test_without_lxml_the_message_names_the_extra(tmp_path: Path) -> None:
    path = tmp_path / "t.xml"
    path.write_text(XML, encoding="utf-8")
    program = (
        "import sys; sys.modules['lxml'] = None\n"
        "from pathlib import Path\n"
        "from discovery import overlayfile, errors\n"
        "try:\n    overlayfile.read(Path(sys.argv[1]))\n"
        "except errors.DocumentError as err:\n    print(err)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith(f"{path}: a NCCL topology is XML, and what reads it is not installed")
    assert "extra `nccl`" in done.stdout


def test_yaml_needs_no_lxml_and_values_need_neither_it_nor_pydantic() -> None:
    program = (
        "import sys\n"
        "from discovery import overlay, overlaid, options, worker\n"
        "print('pydantic' in sys.modules, 'lxml' in sys.modules)\n"
        "from discovery import overlayfile\n"
        "print('pydantic' in sys.modules, 'lxml' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False False\nTrue False\n"


def test_the_published_schema_is_that_of_the_code() -> None:
    """To rewrite it: nearfield config schema TopologyOverlay > docs/overlay.schema.json."""
    published = json.loads((ROOT / "docs/overlay.schema.json").read_text(encoding="utf-8"))
    assert published == overlayfile.json_schema()


def test_the_documented_files_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs/overlay.md").read_text(encoding="utf-8")
    shown = [part.split("```")[0] for part in page.split("```yaml\n")[1:]]
    (tmp_path / "ndv4-topo.xml").write_text(XML, encoding="utf-8")
    documents = [read(tmp_path, text) for text in shown if "TopologyOverlay" in text]
    assert [len(document.machines) for document in documents] == [1, 3]
