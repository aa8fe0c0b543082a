# SPDX-License-Identifier: Apache-2.0
"""NVML under real pynvml: sessions, facts, the translation of errors, old drivers, and answers that are not to be believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import errors, findings, model, nvml
from discovery.address import parse
from tests.fakes import nvmllib
from tests.fakes.nvmllib import FakeGpu, FakeLibrary, FakeLink

ONE = parse("0000:1b:00.0")
TWO = parse("0000:43:00.0")


def gpu(**changes: object) -> FakeGpu:
    return FakeGpu(bus_id="00000000:1B:00.0", **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def sessions_end() -> Iterator[None]:
    """A session that stays open would block all others of this process."""
    yield
    with nvml.Nvml(FakeLibrary()):
        pass


def facts(fake: FakeGpu, *missing: str) -> tuple[nvml.Facts, list[str]]:
    found = findings.Findings()
    with nvml.Nvml(FakeLibrary(fake, missing=missing)) as session:
        return session.facts(ONE, found, identity=session.identity(ONE)), [finding.code for finding in found.result()]


def test_sessions_are_counted_and_closed_twice_without_harm() -> None:
    library = FakeLibrary(gpu())
    session = nvml.Nvml(library)
    with session:
        assert session.is_open
        session.open()
        assert library.sessions == 1
    session.close()
    assert (library.sessions, library.opened, session.is_open) == (0, 1, False)
    with pytest.raises(errors.SourceError, match="no session"):
        session.driver()


def test_the_driver() -> None:
    with nvml.Nvml(FakeLibrary()) as session:
        assert session.driver() == model.NvidiaDriver(
            version="580.65.06", cuda_version=(13, 1), nvml_version="13.580.65.06"
        )
    with nvml.Nvml(FakeLibrary(missing=("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetNVMLVersion"))) as session:
        assert session.driver() == model.NvidiaDriver(version="580.65.06")


@pytest.mark.parametrize(
    ("status", "kind"), [(9, "driver-not-loaded"), (18, "lib-rm-version-mismatch"), (999, "unknown"), (4242, "4242")]
)
def test_a_refused_session_has_nvmls_name_for_it(status: int, kind: str) -> None:
    with pytest.raises(errors.SourceError, match="nvmlInitWithFlags") as caught:
        nvml.Nvml(FakeLibrary(init=status)).open()
    assert (caught.value.source, caught.value.kind) == ("nvml", kind)


def test_a_machine_without_the_library_is_told_apart(tmp_path: Path) -> None:
    for session in (nvml.Nvml(), nvml.Nvml(driver_root=tmp_path)):
        with pytest.raises(errors.SourceError) as caught:
            session.open()
        assert caught.value.kind == "library-not-found"


def test_a_library_that_is_none_cannot_be_loaded(tmp_path: Path) -> None:
    place = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"\x7fELF")
    with pytest.raises(errors.SourceError, match=str(place)) as caught:
        nvml.Nvml(driver_root=tmp_path).open()
    assert caught.value.kind == "library-not-loadable"


def test_what_a_gpu_is() -> None:
    with nvml.Nvml(FakeLibrary(gpu())) as session:
        assert session.identity(ONE) == nvml.Identity(
            uuid="GPU-00000000-0000-0000-0000-000000000001", product="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30
        )
        assert session.addresses(findings.Findings()) == (ONE,)
        assert session.sample(ONE) == model.GpuSample(address=ONE, utilization_ratio=0.4, memory_used_bytes=20 << 30)
    assert facts(gpu(minor=5, mig=(0, 1))) == (
        nvml.Facts(
            minor=5,
            architecture="Hopper",
            compute_capability=(9, 0),
            multiprocessors=132,
            mig_mode=model.MigMode(current=False, pending=True),
            link_width=16,
        ),
        [],
    )


def test_an_old_driver_leaves_facts_unknown() -> None:
    assert facts(
        gpu(),
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetGpuFabricInfoV",
    ) == (nvml.Facts(compute_capability=(9, 0)), [])
    with nvml.Nvml(FakeLibrary(gpu(), missing=("nvmlDeviceGetMemoryInfo_v2",))) as session:
        assert session.identity(ONE).memory_bytes == 80 << 30


@pytest.mark.parametrize(("capability", "cores"), [((99, 0), 16896), ((9, 0), 100), ((9, 0), 0)])
def test_multiprocessors_are_not_guessed(capability: tuple[int, int], cores: int) -> None:
    assert facts(gpu(capability=capability, cores=cores))[0].multiprocessors is None


def test_an_unknown_architecture_is_unknown() -> None:
    assert facts(gpu(architecture=0xFFFFFFFF))[0].architecture is None


def test_links_to_gpus_switches_and_cpus() -> None:
    own, codes = facts(
        gpu(
            links=(
                FakeLink(kind=0xFF, version=99),
                FakeLink(kind=0, remote=b"00000000:43:00.0", remote_domain=0, version=7),
                FakeLink(kind=2, version=7),
                FakeLink(kind=1, remote=b"0004:04:00.0", remote_domain=4, version=7),
                FakeLink(active=0, version=7),
            )
        )
    )
    assert own.nvlinks == (
        model.NvLink(link=0, active=True, version=4, remote_kind=model.RemoteKind.SWITCH),
        model.NvLink(link=1, active=True, version=4, remote_kind=model.RemoteKind.GPU, remote=TWO),
        model.NvLink(link=2, active=True, version=4, remote_kind=model.RemoteKind.SWITCH),
        model.NvLink(link=3, active=True, version=4, remote_kind=model.RemoteKind.CPU, remote=parse("0004:04:00.0")),
        model.NvLink(link=4, active=False, version=4, remote_kind=model.RemoteKind.SWITCH),
    )
    assert codes == []


@pytest.mark.parametrize(
    ("number", "architecture", "generation"),
    [
        (1, 4, 1),
        (2, 5, 2),
        (3, 6, 2),  # nvml.h's 2.2
        (4, 6, 2),  # the kernel driver's 2.2
        (4, 7, 3),
        (5, 7, 3),  # as an A100 says
        (6, 9, 4),
        (7, 9, 4),  # as an H100 says
        (7, 10, 5),
        (8, 10, 5),
        (7, 8, None),  # an architecture without NVLink does not tell which
        (5, 8, 3),
        (2, 9, None),  # no Hopper has NVLink 2
        (0, 9, None),
        (255, 9, None),
    ],
)
def test_the_generation_of_nvlink_follows_from_number_and_architecture(
    number: int, architecture: int, generation: int | None
) -> None:
    own, codes = facts(gpu(architecture=architecture, links=(FakeLink(version=number),)))
    assert ([link.version for link in own.nvlinks], codes) == ([generation], [])


def test_whether_it_reaches_its_cpu_by_c2c() -> None:
    assert [facts(gpu(c2c=told))[0].c2c for told in (1, 0, None)] == [True, False, None]
    assert facts(gpu(c2c=1), "nvmlDeviceGetC2cModeInfoV")[0].c2c is None
    own, codes = facts(gpu(errors={"nvmlDeviceGetC2cModeInfoV": nvmllib.UNKNOWN}))
    assert (own.c2c, codes) == (None, ["nvml-unknown"])


def test_a_far_end_that_cannot_be_read_is_unknown_and_said_once_for_links_that_are_up() -> None:
    errors = {
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": nvmllib.UNKNOWN,
        "nvmlDeviceGetNvLinkRemoteDeviceType": nvmllib.UNKNOWN,
    }
    own, codes = facts(gpu(links=(FakeLink(), FakeLink(), FakeLink(active=0)), errors=errors))
    assert [(link.active, link.remote_kind, link.remote) for link in own.nvlinks] == [
        (True, None, None),
        (True, None, None),
        (False, None, None),
    ]
    assert codes == ["nvml-unknown", "nvml-unknown"]


def test_without_the_kind_a_far_end_without_address_is_a_switch() -> None:
    links = (FakeLink(), FakeLink(remote=b"00000000:43:00.0", remote_domain=0))
    own, _ = facts(gpu(links=links), "nvmlDeviceGetNvLinkRemoteDeviceType")
    assert [link.remote_kind for link in own.nvlinks] == [model.RemoteKind.SWITCH, None]


@pytest.mark.parametrize("remote", [b"nonsense", b"\xff\xfe", b""])
def test_a_far_end_that_is_no_address_is_unknown_and_said(remote: bytes) -> None:
    own, codes = facts(gpu(links=(FakeLink(remote=remote, remote_domain=0), FakeLink())))
    assert [(link.active, link.remote) for link in own.nvlinks] == [(True, None), (True, None)]
    assert codes == ["nvml-malformed"]


UUID = bytes(range(16))


@pytest.mark.parametrize("version", [3, 2])
def test_the_fabric_once_it_is_completed(version: int) -> None:
    fabric = {"clusterUuid": UUID, "cliqueId": 7, "state": 3, "status": 0}
    assert facts(gpu(fabric=fabric, fabric_version=version))[0].fabric == model.Fabric(
        state="completed", cluster_uuid="00010203-0405-0607-0809-0a0b0c0d0e0f", clique_id=7
    )


@pytest.mark.parametrize(
    ("fabric", "state", "codes"),
    [
        ({"clusterUuid": UUID, "cliqueId": 7, "state": 2, "status": 0}, "in_progress", []),
        ({"clusterUuid": UUID, "cliqueId": 7, "state": 3, "status": 999}, "completed", ["fabric-failed"]),
        (
            {"clusterUuid": bytes(16), "cliqueId": 0, "state": 3, "status": 0},
            "completed",
            [],
        ),  # no fabric of many nodes
        ({"state": 0, "status": 0}, "not_supported", []),
    ],
)
def test_otherwise_its_identity_is_unknown(fabric: dict[str, object], state: str, codes: list[str]) -> None:
    own, noted = facts(gpu(fabric=fabric))
    assert (own.fabric, noted) == (model.Fabric(state=state), codes)


def test_a_fabric_state_that_nobody_knows_is_a_finding() -> None:
    assert facts(gpu(fabric={"state": 9, "status": 0}))[1] == ["nvml-malformed"]


def test_one_fact_that_fails_costs_one_fact() -> None:
    own, codes = facts(
        gpu(errors={"nvmlDeviceGetMigMode": nvmllib.UNKNOWN, "nvmlDeviceGetNvLinkState": nvmllib.UNKNOWN})
    )
    assert own.mig_mode is None
    assert own.multiprocessors == 132
    assert codes == ["nvml-unknown", "nvml-unknown"]


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetHandleByPciBusId_v2"]
)
def test_a_gpu_that_is_lost_on_the_way_ends_it(function: str) -> None:
    with pytest.raises(errors.SourceError) as caught:
        facts(gpu(errors={function: nvmllib.GPU_IS_LOST}))
    assert caught.value.kind in nvml.LOST


def test_names_that_are_no_text_are_malformed() -> None:
    with nvml.Nvml(FakeLibrary(gpu(name=b"\xff\xfe"))) as session, pytest.raises(errors.SourceError) as caught:
        session.identity(ONE)
    assert caught.value.kind == "malformed"


def test_a_lost_gpu_hides_no_other_from_the_list() -> None:
    lost = FakeGpu(bus_id="00000000:43:00.0", errors={"nvmlDeviceGetHandleByIndex_v2": nvmllib.GPU_IS_LOST})
    found = findings.Findings()
    with nvml.Nvml(FakeLibrary(lost, gpu())) as session:
        assert session.addresses(found) == (ONE,)
        with pytest.raises(errors.SourceError) as caught:
            session.identity(parse("0000:99:00.0"))
    assert caught.value.kind == "not-found"
    assert [finding.subject for finding in found.result()] == ["nvml index 0"]


def test_whether_the_session_keeps_a_gpu_awake() -> None:
    for persistence in (0, 1):
        with nvml.Nvml(FakeLibrary(gpu(persistence=persistence))) as session:
            assert not session.keeps_gpus_awake()
            session.identity(ONE)
            assert session.keeps_gpus_awake() == (persistence == 0)


def test_one_library_is_not_taken_for_another() -> None:
    with nvml.Nvml(FakeLibrary(gpu())) as session:
        assert session.identity(ONE).product == "NVIDIA H100 80GB HBM3"
    with nvml.Nvml(FakeLibrary(gpu(name=b"other"))) as session:
        assert session.identity(ONE).product == "other"
