# SPDX-License-Identifier: Apache-2.0
"""The codec: round trips of every value, strictness with the place in the message, tolerance towards newer writers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import codec, errors, mig, model, paths
from discovery.address import HostBridge, PciAddress

ADDRESSES = st.builds(
    PciAddress,
    domain=st.integers(0, 0xFFFFFFFF),
    bus=st.integers(0, 255),
    device=st.integers(0, 31),
    function=st.integers(0, 7),
)
GPU = PciAddress(0, 0x1B, 0, 0)
SNAPSHOT = model.Snapshot(
    origin=model.Origin.RECORDING,
    taken_at=12.5,
    host=model.Host(boot_id="b", memory_bytes=1 << 40, sockets={0: (0, 1), 1: (2,)}, online_cpus=(0, 1, 2)),
    nvidia_driver=model.NvidiaDriver(version="580.65.06", cuda_version=(13, 0)),
    numa_nodes=(model.NumaNode(node=1, cpus=(), distances={0: 20, 1: 10}),),
    gpus=(
        model.Gpu(
            pci=model.PciFunction(
                address=GPU,
                vendor_id=0x10DE,
                device_id=0x2330,
                class_code=0x30200,
                host_bridge=HostBridge("pci0000:15"),
                bridges=(PciAddress(0, 0x15, 1, 0),),
                numa_source=model.Provenance.SYSFS,
                link=model.PcieLink(max_width=16, max_speed_gts=32.0),
            ),
            state=model.GpuState.READY,
            compute_capability=(9, 0),
            mig_mode=model.MigMode(current=False, pending=True),
            nvlinks=(model.NvLink(link=0, active=True, remote_kind=model.RemoteKind.SWITCH),),
        ),
    ),
    findings=(model.Finding(code="c", severity=model.Severity.INFO, subject="s", message="Ünïcode"),),
)


def document(**changes: Any) -> dict[str, Any]:
    """The document of SNAPSHOT as a file would hold it, with some top-level fields replaced."""
    text = json.dumps(codec.to_json(SNAPSHOT), allow_nan=False)
    return {**json.loads(text), **changes}


def refusal(obj: object) -> str:
    with pytest.raises(errors.DocumentError) as caught:
        codec.from_json(obj)
    return str(caught.value)


def test_a_snapshot_survives_json_unchanged() -> None:
    assert codec.from_json(document()) == SNAPSHOT


PROFILE = mig.MigProfile(
    id=9, number=2, compute_number=2, name="3g.40gb", slices=3, memory_bytes=40 << 30, multiprocessors=60, decoders=3,
    instances=2, placements=(mig.MigPlacement(start=0, size=4), mig.MigPlacement(start=4, size=4)),
)  # fmt: skip


def test_mig_survives_json_unchanged() -> None:
    instance = mig.MigInstance(
        gpu_instance=1,
        profile_id=9,
        placement=mig.MigPlacement(start=0, size=4),
        compute_instance=0,
        uuid="MIG-1",
        nodes=(mig.CapabilityNode(path="/dev/nvidia-caps/nvidia-cap12", major=510, minor=12),),
    )
    other = dataclasses.replace(PROFILE, id=19)
    (gpu,) = SNAPSHOT.gpus
    gpus = tuple(
        dataclasses.replace(gpu, mig_profiles=profiles, mig_instances=instances)
        for profiles, instances in (
            ((PROFILE,), (instance,)), ((PROFILE,), ()), ((PROFILE, other), None), ((PROFILE,), (instance, instance)), ((), None),
        )
    )  # fmt: skip
    snapshot = dataclasses.replace(SNAPSHOT, gpus=gpus)
    read = codec.from_json(json.loads(json.dumps(codec.to_json(snapshot))))
    assert read == snapshot
    assert "migInstances" not in codec.to_json(snapshot)["gpus"][2]


def test_what_follows_sound_profiles_is_read_as_strictly() -> None:
    changed = document()
    (first,) = changed["gpus"]
    odd = {**codec.encode(PROFILE), "slices": 1.5}
    changed["gpus"] = [{**first, "migProfiles": [codec.encode(PROFILE)]}, {**first, "migProfiles": [odd]}]
    assert "$.gpus[1].migProfiles[0].slices: expected a whole number" in refusal(changed)


def test_a_rescan_survives_json_unchanged() -> None:
    reading = model.GpuReading(address=GPU, state=model.GpuState.READY, mig="11 1:9@0+4:0")
    scan = model.Rescan(gpus=(reading,), fingerprint="1-2")
    assert codec.decode(model.Rescan, json.loads(json.dumps(codec.encode(scan))), place="$") == scan


@given(ADDRESSES)
@settings(max_examples=50)
def test_any_address_survives(address: PciAddress) -> None:
    assert codec.decode(PciAddress, codec.encode(address), place="$") == address


def test_unknown_is_absent_and_not_null() -> None:
    assert "null" not in json.dumps(document())
    assert "uuid" not in document()["gpus"][0]


def test_fields_of_a_newer_writer_are_ignored() -> None:
    newer = document(colour="green")
    newer["gpus"][0]["pci"]["aura"] = {"deep": [1]}
    assert codec.from_json(newer) == SNAPSHOT


def test_fields_that_an_older_writer_had_not_take_their_default() -> None:
    older = document()
    del older["bridges"], older["gpus"][0]["groups"]
    assert codec.from_json(older) == SNAPSHOT


@pytest.mark.parametrize("name", ["turbo", ""])
def test_other_values_refuse_unknown_fields(name: str) -> None:
    with pytest.raises(errors.DocumentError, match=rf"here: unknown field '{name}'; known are current, pending"):
        codec.decode(model.MigMode, {"current": True, "pending": True, name: 1}, place="here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apiVersion": "v1"}, "expected apiVersion"),
        ({"kind": "Machine"}, "expected apiVersion"),
        ({"schemaVersion": 2}, "newer Nearfield"),
        ({"schemaVersion": True}, "schemaVersion"),
        ({"schemaVersion": 0}, "schemaVersion"),
        ({"takenAt": "now"}, "$.takenAt: expected a number, found 'now'"),
        ({"takenAt": float("nan")}, "$.takenAt"),
        ({"takenAt": float("inf")}, "$.takenAt"),
        ({"takenAt": 10**5000}, "$.takenAt: a huge number is out of range"),
        ({"origin": "moon"}, "$.origin: 'moon' is none of this-node, recording"),
        ({"gpus": {}}, "$.gpus: expected a list, found an object"),
        ({"gpus": [{"state": "ready"}]}, "$.gpus[0]: pci missing"),
        ({"host": None}, "$.host: expected an object"),
        ({"host": {"sockets": {"zero": []}}}, "$.host.sockets: the key 'zero'"),
        ({"host": {"sockets": {"٣": []}}}, "$.host.sockets: the key"),
        ({"host": {"sockets": {"9" * 5000: []}}}, "$.host.sockets: the key"),
        ({"host": {"bootId": "\ud800"}}, "$.host.bootId: text with a lone surrogate"),
        ({"host": {"memoryBytes": 1 << 64}}, "$.host.memoryBytes: the number does not fit 64 bits"),
        ({"host": {"memoryBytes": 1.0}}, "$.host.memoryBytes: expected a whole number"),
        ({"host": {"onlineCpus": [False]}}, "$.host.onlineCpus[0]: expected a whole number"),
        ({"nvidiaDriver": {"version": "1", "cudaVersion": [1]}}, "$.nvidiaDriver.cudaVersion: expected a list of 2"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(document(**changes))


@pytest.mark.parametrize("address", ["0000:1B:00.0", "00000000:1b:00.0", "0000:1b:20.0", "", "x" * 10_000])
def test_addresses_in_other_spellings_are_refused(address: str) -> None:
    doc = document()
    doc["gpus"][0]["pci"]["address"] = address
    assert refusal(doc).startswith("$.gpus[0].pci.address: ")
    assert len(refusal(doc)) < 300


@pytest.mark.parametrize("obj", [None, [], "x", 1])
def test_what_is_no_object_is_refused(obj: object) -> None:
    assert "no JSON object" in refusal(obj)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pci", "address", "gpus"]), inner),
    max_leaves=8,
)


@given(st.sampled_from([field.name for field in dataclasses.fields(model.Snapshot)]), JSON)
@settings(max_examples=150)
def test_garbage_is_read_or_refused_and_nothing_else(field: str, garbage: object) -> None:
    with contextlib.suppress(errors.DocumentError):
        codec.from_json(document(**{field: garbage}))


def test_same_content_leaves_out_when_it_was_taken() -> None:
    assert codec.same_content(SNAPSHOT, dataclasses.replace(SNAPSHOT, taken_at=99.0))
    assert not codec.same_content(SNAPSHOT, dataclasses.replace(SNAPSHOT, gpus=()))


def test_a_type_without_a_json_form_is_an_error_of_the_program() -> None:
    with pytest.raises(TypeError):
        codec.encode(object())
    with pytest.raises(TypeError):
        codec.decode(bytes, "", place="$")


def test_the_document_for_people_has_the_paths_and_reads_back_without_them() -> None:
    nic = model.Nic(
        pci=dataclasses.replace(SNAPSHOT.gpus[0].pci, address=PciAddress(0, 0x18, 0, 0), class_code=0x20000)
    )
    whole = dataclasses.replace(SNAPSHOT, nics=(nic,))
    written = codec.to_document(whole)
    assert [(path["a"], path["b"]) for path in written["paths"]] == [("0000:18:00.0", "0000:1b:00.0")]
    assert written["paths"] == [codec.encode(path) for path in paths.between_all(whole)]
    assert codec.from_json(written) == whole


@pytest.mark.parametrize("numbers", [[True], [1, 2.0], ["1"], [1 << 64], [1, -(1 << 64)], [None], {"0": 1}])
def test_a_list_of_numbers_holds_whole_ones_of_64_bits(numbers: object) -> None:
    with pytest.raises(errors.DocumentError, match=r"\$\.host\.onlineCpus"):
        codec.from_json(document(host={"onlineCpus": numbers}))


def test_a_list_of_numbers_is_read_as_it_is() -> None:
    for numbers in ([], [0], [3, 1, (1 << 64) - 1]):
        assert codec.from_json(document(host={"onlineCpus": numbers})).host.online_cpus == tuple(numbers)


@pytest.fixture(name="hasty")
def fixture_hasty() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_threads_that_meet_at_a_type_for_the_first_time_all_write_and_read_all_of_it() -> None:
    names = [f"f{number}" for number in range(20)]
    document = dict.fromkeys(names, 1)
    meeting = threading.Barrier(4)

    def both(cls: type[Any]) -> tuple[Any, Any]:
        meeting.wait(20)
        return codec.encode(cls(**document)), codec.decode(cls, document, place="$")

    with futures.ThreadPoolExecutor(4) as pool:
        for _ in range(200):
            cls = dataclasses.make_dataclass("Fresh", [(name, int) for name in names], frozen=True)
            answers = list(pool.map(both, [cls] * 4))
            assert answers == [(document, cls(**document))] * 4
