# SPDX-License-Identifier: Apache-2.0
"""The Machine document: what it means, and what is said of a wrong one.

- buses, addresses and names follow from it, always the same
- shapes that no machine of the zoo has: VMD, Hyper-V, devices on a root bus, wide domains
- every mistake names its line
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.errors import DocumentError
from discovery.mock import machine, pcitree, recording, zoo
from discovery.mock import products as parts
from discovery.mock.recording import Tree
from tests.fakes import mockmachine


def _addresses(files: recording.Recording) -> list[str]:
    return sorted(posixpath.basename(path) for path in Tree(files.files).below("sys/bus/pci/devices"))


def test_buses_are_numbered_depth_first() -> None:
    assert _addresses(mockmachine.parsed()) == [
        "0000:15:01.0",  # root port
        "0000:16:00.0",  # upstream port
        "0000:17:00.0",  # downstream ports
        "0000:17:01.0",
        "0000:17:02.0",
        "0000:18:00.0",
        "0000:19:00.0",
        "0000:1a:00.0",
        "0000:80:01.0",
        "0000:81:00.0",
    ]


def test_the_published_schema_is_that_of_the_code() -> None:
    """To rewrite it: python -c 'import json; from discovery.mock import zoo; print(json.dumps(zoo.json_schema(), indent=2))'."""
    published = Path(__file__).parents[3] / "docs/machine.schema.json"
    assert json.loads(published.read_text(encoding="utf-8")) == zoo.json_schema()


def test_the_same_document_is_the_same_machine() -> None:
    assert mockmachine.parsed() == mockmachine.parsed()


def test_a_bus_and_a_place_can_be_given() -> None:
    machine_ = mockmachine.parsed(("{nic: connectx-7-400g-ib}", '{at: "1f.0", bus: "40", nic: connectx-7-400g-ib}'))
    assert "0000:40:00.0" in _addresses(machine_)
    assert "0000:17:1f.0" in _addresses(machine_)


def test_a_card_has_all_its_functions() -> None:
    machine_ = mockmachine.parsed(("connectx-7-400g-ib", "connectx-7-200g-dual"))
    tree = Tree(machine_.files)
    assert {"0000:1a:00.0", "0000:1a:00.1"} <= set(_addresses(machine_))
    assert tree.resolve("sys/class/net/enp26s0f1np1") == f"{tree.function('0000:1a:00.1')}/net/enp26s0f1np1"


def test_uuids_follow_from_name_and_address() -> None:
    first, second = (mockmachine.parsed(*changes) for changes in ((), (("name: small", "name: other"),)))
    assert first.nvml is not None
    assert second.nvml is not None
    uuids = {gpu.uuid for gpu in (*first.nvml.gpus, *second.nvml.gpus)}
    assert len(uuids) == 4


def test_without_a_driver_there_is_no_nvml() -> None:
    machine_ = mockmachine.parsed(
        ('driver: {version: 580.95.05, cuda: "13.0"}\n', ""),
        ("nvlink: ", "description: x #"),
        ("description: Two", "seed: 1 # Two"),
    )
    assert machine_.nvml is None
    assert not any(
        path.startswith(("proc/driver/nvidia", "dev/nvidia", "sys/module/nvidia")) for path in machine_.files
    )
    assert Tree(machine_.files).resolve(f"{Tree(machine_.files).function(mockmachine.GPU0)}/driver") is None


def test_a_gpu_can_be_held_by_another_driver() -> None:
    machine_ = mockmachine.parsed(
        ("[{gpu: nvidia-h100-sxm5-80gb},", "[{gpu: nvidia-h100-sxm5-80gb, driver: vfio-pci},")
    )
    assert machine_.nvml is not None
    assert [gpu.pci for gpu in machine_.nvml.gpus] == [mockmachine.GPU1]
    tree = Tree(machine_.files)
    driver = tree.resolve(f"{tree.function(mockmachine.GPU0)}/driver")
    assert driver == "sys/bus/pci/drivers/vfio-pci"


VIRTUAL = """\
apiVersion: mock.nearfield.dev/v1alpha1
kind: Machine
name: virtual
host: {cpu: Example CPU, rootPort: intel-sapphire-rapids-root-port, iommu: "off"}
driver: {version: 580.95.05, cuda: "13.0"}
numa: {nodes: [{node: 0, socket: 0, cpus: "0-3", memory: 8GiB}]}
pci:
  - root: "0001:00"
    under: LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/56475055-0001-0000-3130-303237344131
    devices: [{gpu: nvidia-l40s, at: "00.0"}]
  - root: "0000:97"
    numa: 0
    devices:
      - at: "00.5"
        device: vmd
        name: vmd0
        root: {root: "10000:e0", numa: 0, ports: [{nvme: samsung-pm9a3}]}
products:
  devices:
    vmd: {source: example, name: Volume Management Device, pci: "8086:28c0", class: "010400", driver: vmd,
          pcie: {generation: 4, width: 16}}
"""


def test_a_virtual_machine_has_one_domain_for_each_gpu_below_the_vmbus() -> None:
    tree = Tree(mockmachine.parsed(text=VIRTUAL).files)
    directory = tree.function("0001:00:00.0")
    assert directory is not None
    assert directory.endswith("/VMBUS:00/56475055-0001-0000-3130-303237344131/pci0001:00/0001:00:00.0")
    assert tree.text(f"{directory}/numa_node") == "-1"
    assert tree.text(f"{directory}/local_cpulist") == "0-3"
    assert tree.text(f"{directory}/max_link_width") is None
    assert tree.resolve(f"{directory}/iommu_group") is None


def test_a_volume_management_device_makes_a_domain_of_five_digits() -> None:
    tree = Tree(mockmachine.parsed(text=VIRTUAL).files)
    path = "sys/devices/pci0000:97/0000:97:00.5/pci10000:e0/10000:e0:01.0/10000:e1:00.0"
    assert tree.function("10000:e1:00.0") == path
    assert tree.resolve("sys/class/nvme/nvme0") == f"{path}/nvme/nvme0"


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("name: small", "name: Small!", 3, "name: String should match pattern"),
        ("kind: Machine", "kind: Machinery", 1, "not a document of kind Machine"),
        ("cpu: Example CPU", "cpus: Example CPU", 5, "host.cpus: unknown key; did you mean cpu?"),
        ("intel-sapphire-rapids-root-port", "intel-sapphire-root-port", 16, "did you mean intel-sapphire-rapids-root-port?"),
        ('cuda: "13.0"', "cuda: 13", 6, 'driver.cuda: 13 is no version; write "9.0", in quotes'),
        ("64GiB}\n    - {node: 1", "64}\n    - {node: 1", 9, "numa.nodes[0].memory: 64 is no size"),
        ("node: 1, socket", "node: 0, socket", 7, "numa: a node or a CPU appears twice"),
        ("2-3,6-7", "3-2", 10, "numa.nodes[1].cpus: '3-2' in '3-2' is no range"),
        ("[10, 21], [21, 10]", "[10, 21]", 7, "numa: distances is no table of 2 rows of 2 numbers"),
        ("[10, 21], [21, 10]", "[10, 21], [21, 300]", 7, "numa: a distance is not between 10 and 255"),
        ('"0000:15"', '"15"', 13, "pci[0].root: '15' is no root bus"),
        ('"0000:15"', "15", 13, "pci[0].root: 15 is no root bus"),
        ("numa: 1\n", "numa: 7\n", 20, "there is no NUMA node 7; numa.nodes has [0, 1]"),
        ("[{gpu: nvidia-h100-sxm5-80gb},", "[{gpu: nvidia-h200},", 17, "there is no product 'nvidia-h200'"),
        ("[{gpu: nvidia-h100-sxm5-80gb},", "[{gpu: x, nic: y},", 17, "a slot holds one thing, not gpu and nic"),
        ("[{gpu: nvidia-h100-sxm5-80gb},", "[{minor: 1},", 17, "empty slot takes no minor; only gpu does"),
        ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, ports: [{}]}", 17, "nic takes no ports; only switch does"),
        ("{nic: connectx-7-400g-ib}", '{nic: connectx-7-400g-ib, bus: "18"}', 17, "bus 18 is not free"),
        ("{nic: connectx-7-400g-ib}", '{nic: connectx-7-400g-ib, at: "00.0"}', 17, "there is already a function at 0000:17:00.0"),
        ("gpu: nvidia-h100-sxm5-80gb}", "gpu: nvidia-h100-sxm5-80gb, name: a}", 17, "the name a is taken by 0000:18:00.0"),
        ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, name: gpu0}", 21, "there is no GPU called gpu0"),
        ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, functions: [{}, {}]}", 17, "has 1 functions, not 2"),
        ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, bus: 18}", 17, "18 is not 2 hexadecimal digits in quotes"),
        ("between: [gpu0, gpu1]", "between: [gpu0, gpu7]", 21, "nvlink.pairs[0].between: there is no GPU called gpu7"),
        ("links: 4", "links: 19", 21, "gpu0 would have 19 NVLinks, but a NVIDIA H100 80GB HBM3 has 18"),
        ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}", "nvlink: {}", 21, "nvlink: give one of switched, boards and pairs"),
        ("nvlink:", "faults: [{kind: xid, target: gpu9, xid: 1}]\nnvlink:", 21, "faults[0].target: there is no device called gpu9"),
        ("nvlink:", "faults: [{kind: xid, target: gpu0}]\nnvlink:", 21, "faults[0]: xid needs xid"),
        ("nvlink:", "faults: [{kind: meteor}]\nnvlink:", 21, "faults[0].kind: must be 'gpu-lost', 'fallen-off'"),
        ("socket: 1, cpus", "gpu: gpu9, socket: 1, cpus", 10, "numa.nodes[1].gpu: there is no GPU called gpu9"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_line(before: str, after: str, line: int, message: str) -> None:
    with pytest.raises(DocumentError) as raised:
        mockmachine.parsed((before, after))
    text = str(raised.value)
    assert text.startswith(f"small.yaml:{line}: "), text
    assert message.removeprefix("faults[0]: ") in text


def test_a_gpu_minor_given_twice_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"small\.yaml:17: .*minor 3 is already taken"):
        mockmachine.parsed(("{gpu: nvidia-h100-sxm5-80gb}", "{gpu: nvidia-h100-sxm5-80gb, minor: 3}"))


ONE_PAIR = "nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}"


@pytest.mark.parametrize(
    ("boards", "message"),
    [
        ("[{gpus: [gpu0, gpu0], links: [1]}]", "nvlink: a GPU is on two boards, or twice on one"),
        ("[{gpus: [gpu0], links: [1]}, {gpus: [gpu1, gpu0], links: [1]}]", "nvlink: a GPU is on two boards"),
        ("[{gpus: [], links: [1]}]", "nvlink.boards[0].gpus: "),
        ("[{gpus: [gpu7], links: [1]}]", "nvlink.boards[0].gpus: there is no GPU called gpu7"),
        ("[{gpus: [nic0], links: [1]}]", "nvlink.boards[0].gpus: there is no GPU called nic0"),
        (
            "[{gpus: [gpu0], switches: [s0], links: [1]}]",
            "nvlink.boards[0].switches[0]: there is no device called s0",
        ),
        ("[{gpus: [gpu0], switches: [s0, s1], links: [1]}]", "nvlink.boards[0]: links needs one number for each of"),
    ],
)
def test_a_board_that_cannot_be_is_refused(boards: str, message: str) -> None:
    with pytest.raises(DocumentError, match=re.escape(message)):
        mockmachine.parsed((ONE_PAIR, f"nvlink: {{boards: {boards}}}"))


def test_a_board_links_its_own_gpus_only() -> None:
    nvml = mockmachine.parsed((ONE_PAIR, "nvlink: {boards: [{gpus: [gpu1], links: [2, 1]}]}")).nvml
    assert nvml is not None
    assert [sum(link.active for link in gpu.nvlinks) for gpu in nvml.gpus] == [0, 3]


def test_nvlinks_of_a_gpu_without_them_are_refused() -> None:
    with pytest.raises(DocumentError, match="gpu0 is a NVIDIA L40S, which has no NVLink"):
        mockmachine.parsed(("nvidia-h100-sxm5-80gb", "nvidia-l40s"))


def test_too_many_buses_are_refused() -> None:
    ports = ", ".join(["{}"] * 31)
    with pytest.raises(DocumentError, match="bus 100 is not free"):
        mockmachine.parsed(('root: "0000:15"', 'root: "0000:f0"'), ("[{gpu", f"[{ports}, {{gpu"))


def test_fault_times_can_be_drawn_and_are_drawn_the_same() -> None:
    def drawn(seed: int) -> float:
        text = f"seed: {seed}\nfaults: [{{kind: xid, target: gpu0, xid: 79, at: [10, 60]}}]\nnvlink:"
        return mockmachine.parsed(("nvlink:", text)).faults[0].at_s

    assert drawn(1) == drawn(1)
    assert 10 <= drawn(1) <= 60
    assert drawn(1) != drawn(2)


_PART = {"source": "s", "name": "n", "pci": "1000:c030", "pcie": {"generation": 4, "width": 16}}
_CATALOGUE = parts.Products.model_validate_json(
    json.dumps({"bridges": {"b": _PART}, "devices": {"d": {**_PART, "class": "058000"}}})
)
_THINGS = st.sampled_from([{"device": "d"}, {}])
_SLOTS = st.recursive(
    st.lists(_THINGS, max_size=4),
    lambda below: st.lists(_THINGS | st.builds(lambda ports: {"switch": "b", "ports": ports}, below), max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(_SLOTS)
def test_every_function_lies_in_the_buses_of_the_bridges_above_it(slots: list[object]) -> None:
    described = machine.Machine.model_validate_json(
        json.dumps(
            {
                "apiVersion": "mock.nearfield.dev/v1alpha1",
                "kind": "Machine",
                "name": "any",
                "host": {"cpu": "c", "rootPort": "b"},
                "numa": {"nodes": [{"node": 0, "socket": 0, "cpus": "0"}]},
                "pci": [{"root": "0000:10", "ports": slots}],
            }
        )
    )
    functions = pcitree.build(described, _CATALOGUE)
    by_directory = {function.directory: function for function in functions}
    assert len({function.address for function in functions}) == len(functions)
    for function in functions:
        above = by_directory.get(posixpath.dirname(function.directory))
        if above is not None:
            assert above.bridging is not None
            assert function.address.bus == above.bridging.secondary
            last = function.bridging.subordinate if function.bridging else function.address.bus
            assert last <= above.bridging.subordinate
        if function.bridging is not None:
            assert function.bridging.primary == function.address.bus
    secondaries = [function.bridging.secondary for function in functions if function.bridging]
    assert len(set(secondaries)) == len(secondaries)
