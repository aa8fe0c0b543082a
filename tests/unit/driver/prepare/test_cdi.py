# SPDX-License-Identifier: Apache-2.0
"""cdi: the files that container runtimes read. Aspects: the runtime's rules, ids, environment, mock nodes, the record in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from discovery import mig
from driver.mps import shares as mps
from driver.prepare import cdi, claims, ledger, plan
from driver.sharing import shares
from tests.fakes import cdi_rules, preparing

REAL = cdi.Dialect(driver=preparing.DRIVER, mock=False)
MOCK = cdi.Dialect(driver=preparing.DRIVER, mock=True)


def entry(
    number: int = 1,
    *results: ledger.Result,
    dialect: cdi.Dialect = REAL,
    memory: shares.Memory = shares.Memory.MPS,
    compute: shares.Compute = shares.Compute.MPS,
) -> ledger.Entry:
    allocation = claims.Allocation(
        claim=preparing.ref(number),
        results=results or (ledger.Result(request="gpu", pool="node-1", device=preparing.NAMES[0]),),
    )
    index = preparing.FixedIndex()
    if results and results[0].share_id:
        index.share(memory=memory, compute=compute)
    planned = plan.plan_prepare(
        allocation, devices=index.devices, holders=(), dialect=dialect, boot_id=preparing.BOOT_ID
    )
    assert isinstance(planned, plan.PreparePlan)
    return planned.entry


def many() -> ledger.Entry:
    """As much as a claim can have: 32 results with long names, shares and capacities."""
    return entry(
        1,
        *(
            ledger.Result(
                request=f"{'r' * 63}/{'s' * 63}",
                pool="p" * 253,
                device=preparing.NAMES[number % 8],
                share_id=f"{number:08d}-5b2e-4d51-9c9f-0d3f3f6e8f11",
                consumed_capacity={f"{'d' * 60}.example/{'c' * 30}{number}": "123456789Gi" for number in range(8)}
                | {"memory": "20Gi", "compute": "25"},
            )
            for number in range(32)
        ),
    )


NODE_EDITS = cdi.NodeEdits(
    device_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"),
    mounts=(cdi.Mount(host_path="/run/nvidia/usr/lib64/libcuda.so.1.2", container_path="/usr/lib64/libcuda.so.1"),),
)


def parted() -> ledger.Entry:
    """Two MIG instances of one GPU."""
    names = ("gpu-0000-10-00-0-mig-1g-10gb-19-0", "gpu-0000-10-00-0-mig-3g-40gb-9-4")
    return replace(
        entry(1, *(ledger.Result(request="part", pool="node-1", device=preparing.NAMES[0]) for _ in names)),
        devices=tuple(
            ledger.HeldDevice(
                name=name,
                address="0000:10:00.0",
                uuid=f"MIG-{number}",
                nodes=("/dev/nvidia0",),
                caps=tuple(
                    mig.CapabilityNode(path=f"/dev/nvidia-caps/nvidia-cap{minor}", major=237, minor=minor)
                    for minor in (number * 9, number * 9 + 1)
                ),
                place=mig.MigPlacement(start=number * 4, size=1 + number * 3),
            )
            for number, name in enumerate(names)
        ),
        results=tuple(ledger.Result(request="part", pool="node-1", device=name) for name in names),
        cdi_ids=tuple((REAL.device_id(preparing.ref(1).uid, name, None), REAL.node_id) for name in names),
    )


def test_a_part_is_the_node_of_its_gpu_and_the_nodes_that_give_the_right_to_it() -> None:
    first, second = json.loads(REAL.claim_spec(parted()))["devices"]
    assert first["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0"},
        {"path": "/dev/nvidia-caps/nvidia-cap0", "type": "c", "major": 237, "minor": 0},
        {"path": "/dev/nvidia-caps/nvidia-cap1", "type": "c", "major": 237, "minor": 1},
    ]
    assert [node["path"] for node in second["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap9",
        "/dev/nvidia-caps/nvidia-cap10",
    ]
    variables = [device["containerEdits"]["env"] for device in (first, second)]
    assert [value.partition("=")[2] for (value,) in variables] == ["MIG-0", "MIG-1"]
    assert variables[0] != variables[1]
    mock = json.loads(MOCK.claim_spec(parted()))["devices"][0]["containerEdits"]["deviceNodes"]
    assert {tuple(node) for node in mock} == {("path", "hostPath")}


def share(number: int) -> ledger.Result:
    return ledger.Result(
        request="gpu",
        pool="node-1",
        device=preparing.NAMES[0],
        share_id=preparing.share_id(number),
        consumed_capacity={"memory": "20Gi", "compute": "25"},
    )


def test_each_share_by_mps_is_the_way_to_its_own_namespace_and_to_nothing_else() -> None:
    spec = json.loads(REAL.claim_spec(entry(1, share(1), share(2))))
    folders = []
    for number, device in enumerate(spec["devices"], start=1):
        edits = device["containerEdits"]
        assert device["name"].endswith(preparing.share_id(number))
        (mount,) = edits["mounts"]
        folders.append(mount["hostPath"])
        assert mount["containerPath"] == mount["hostPath"]
        assert mount["options"] == ["rw", "nosuid", "nodev", "noexec", "bind"]
        own, pipe = edits["env"]
        assert preparing.share_id(number).replace("-", "_").upper() in own
        assert pipe == f"CUDA_MPS_PIPE_DIRECTORY={mount['hostPath']}"
    assert len(set(folders)) == 2
    assert all(folder.startswith(f"/run/nearfield/mps/{preparing.NAMES[0]}/pipes/{mps.SERVER}/") for folder in folders)
    assert cdi_rules.violations(REAL.claim_spec(entry(1, share(1), share(2)))) == []


def test_shares_by_legacy_mps_have_their_limits_in_the_environment() -> None:
    made = entry(1, share(1), memory=shares.Memory.COOPERATIVE, compute=shares.Compute.COOPERATIVE)
    elsewhere = replace(REAL, mps=PurePosixPath("/mps"))
    edits = json.loads(elsewhere.claim_spec(made))["devices"][0]["containerEdits"]
    assert edits["env"][1:] == [
        f"CUDA_MPS_PIPE_DIRECTORY=/mps/{preparing.NAMES[0]}/pipes",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=GPU-0=20480M",
    ]
    assert [mount["containerPath"] for mount in edits["mounts"]] == [f"/mps/{preparing.NAMES[0]}/pipes", "/dev/shm"]


@pytest.mark.parametrize("compute", [shares.Compute.TIMESLICE, shares.Compute.NONE])
def test_shares_that_no_server_holds_need_none(compute: shares.Compute) -> None:
    made = entry(1, share(1), share(2), memory=shares.Memory.NONE, compute=compute)
    for device in json.loads(REAL.claim_spec(made))["devices"]:
        assert set(device["containerEdits"]) == {"env", "deviceNodes"}
        assert len(device["containerEdits"]["env"]) == 1


def test_the_record_in_a_file_with_shares_says_who_may_read_it() -> None:
    made = entry(1, share(1))
    assert REAL.entry_of(REAL.claim_spec(made)) == made
    record = json.loads(json.loads(REAL.claim_spec(made))["annotations"][f"{preparing.DRIVER}/record"])
    assert (record["version"], record["readableSince"]) == (3, 3)


def test_the_record_in_a_file_with_parts_says_who_may_read_it() -> None:
    data = REAL.claim_spec(parted())
    assert REAL.entry_of(data) == parted()
    record = json.loads(json.loads(data)["annotations"][f"{preparing.DRIVER}/record"])
    assert (record["version"], record["readableSince"]) == (2, 2)
    plain = json.loads(json.loads(REAL.claim_spec(entry()))["annotations"][f"{preparing.DRIVER}/record"])
    assert (plain["version"], plain["readableSince"]) == (1, 1)


@pytest.mark.parametrize(
    "data",
    [
        REAL.claim_spec(entry()),
        REAL.claim_spec(parted()),
        MOCK.claim_spec(parted()),
        MOCK.claim_spec(entry(dialect=MOCK)),
        REAL.claim_spec(many()),
        REAL.node_spec(NODE_EDITS),
        MOCK.node_spec(cdi.NodeEdits(device_nodes=("/dev/nvidiactl",))),
    ],
)
def test_a_runtime_accepts_the_file(data: bytes) -> None:
    assert cdi_rules.violations(data) == []
    assert len(data) < cdi.FILE_MAX_BYTES


def test_the_version_is_the_lowest_that_allows_annotations() -> None:
    assert json.loads(REAL.claim_spec(entry()))["cdiVersion"] == cdi_rules.least_version(REAL.claim_spec(entry()))


@pytest.mark.parametrize(
    "broken",
    [
        {"cdiVersion": "0.5.0"},
        {"kind": "1gpu/claim"},
        {"devices": []},
        {"annotations": {"_bad": "x"}},
        {"annotations": {"a/b": "x" * 300_000}},
        {"surprise": 1},
        {"devices": [{"name": "a", "containerEdits": {}}]},
        {"devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}] * 2},
        {"devices": [{"name": "-a", "containerEdits": {"env": ["A=1"]}}]},
        {"devices": [{"name": "a", "containerEdits": {"env": ["A"]}}]},
    ],
)
def test_the_rules_that_judge_our_files_refuse_what_runtimes_refuse(broken: dict[str, Any]) -> None:
    spec = {**json.loads(REAL.claim_spec(entry())), **broken}
    assert cdi_rules.violations(json.dumps(spec).encode())


def _devices(data: bytes) -> dict[str, dict[str, Any]]:
    return {device["name"]: device["containerEdits"] for device in json.loads(data)["devices"]}


def test_a_claim_file_gives_each_device_its_node_and_a_variable() -> None:
    name = f"{preparing.ref(1).uid}-{preparing.NAMES[0]}"
    variable = "NEARFIELD_DEVICE_00000001_AAAA_4BBB_8CCC_0123456789AB_GPU_0000_10_00_0"
    assert _devices(REAL.claim_spec(entry())) == {
        name: {"env": [f"{variable}=GPU-0"], "deviceNodes": [{"path": "/dev/nvidia0"}]}
    }
    assert json.loads(REAL.claim_spec(entry()))["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


def test_mock_nodes_stand_for_the_null_device() -> None:
    (edits,) = _devices(MOCK.claim_spec(entry(dialect=MOCK))).values()
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]
    (edits,) = _devices(MOCK.node_spec(cdi.NodeEdits(device_nodes=("/dev/nvidiactl",)))).values()
    assert edits["deviceNodes"] == [{"path": "/dev/nvidiactl", "hostPath": "/dev/null"}]


def test_every_id_of_the_answer_is_a_device_of_a_file() -> None:
    recorded = many()
    files = {"claim": REAL.claim_spec(recorded), "node": REAL.node_spec(NODE_EDITS)}
    for ids in recorded.cdi_ids:
        assert [cdi_id.partition("=")[0].partition("/")[2] for cdi_id in ids] == ["claim", "node"]
        for cdi_id in ids:
            kind, _, name = cdi_id.partition("=")
            data = files[kind.partition("/")[2]]
            assert json.loads(data)["kind"] == kind
            assert name in _devices(data)


def test_variables_of_two_claims_and_of_two_shares_never_meet() -> None:
    variables = [
        variable.partition("=")[0]
        for recorded in (
            entry(1),
            entry(2),
            entry(3, share(1), share(2), memory=shares.Memory.NONE, compute=shares.Compute.NONE),
        )
        for edits in _devices(REAL.claim_spec(recorded)).values()
        for variable in edits["env"]
    ]
    assert len(variables) == len(set(variables)) == 4


def test_a_claim_file_gives_its_record_back() -> None:
    for recorded in (entry(), many()):
        assert REAL.entry_of(REAL.claim_spec(recorded)) == recorded


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"annotations": []}',
        b'{"annotations": {"gpu.nearfield.dev/record": 1, "gpu.nearfield.dev/record-crc32": 2}}',
        REAL.node_spec(NODE_EDITS),
        REAL.claim_spec(entry())[:-40],
        REAL.claim_spec(entry()).replace(b"team-a", b"team-b"),
        cdi.Dialect(driver="other.example", mock=False).claim_spec(entry()),
    ],
)
def test_any_other_file_gives_no_record(data: bytes) -> None:
    with pytest.raises(ledger.DamagedError):
        REAL.entry_of(data)


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        (REAL.claim_file("abc-1"), "abc-1"),
        (REAL.node_file, None),
        ("gpu.nearfield.dev_.json", None),
        ("gpu.nearfield.dev_metadata_abc_gpu.json", None),
        ("gpu.nearfield.dev_a.yaml", None),
        ("gpu.nearfield.dev_../x.json", None),
        ("other_abc.json", None),
        (".gpu.nearfield.dev_abc.json.tmp", None),
    ],
)
def test_only_files_of_claims_are_taken_for_one(name: str, uid: str | None) -> None:
    assert REAL.claim_of(name) == uid
