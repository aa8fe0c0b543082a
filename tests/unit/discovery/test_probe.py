# SPDX-License-Identifier: Apache-2.0
"""The probe over a made tree and a made NVML: states of GPUs, sources that differ, faults that hide nothing else, rescans,
samples, sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from discovery import check, errors, model, nvml, paths, probe
from discovery.address import parse
from discovery.options import ProbeOptions
from tests.fakes import nvmllib, pcitree
from tests.fakes.nvmllib import FakeGpu, FakeLibrary, FakeLink
from tests.fakes.pcitree import DOWNSTREAM, GPU, NIC, NVME, ROOT, UPSTREAM

BUSES = ("18", "28", "38", "48")
UUID = "GPU-00000000-0000-0000-0000-0000000000{}"


def path(bus: str, slot: str = "0") -> str:
    """A function below a switch of its own, on a host bridge of its own."""
    upper = f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus[0]}9:00.0/0000:{bus[0]}a:0{slot}.0"
    return f"{upper}/0000:{bus[0]}{'bc'[int(slot)]}:00.0"


GPUS = tuple(path(bus) for bus in BUSES)
ADDRESSES = tuple(parse(place.rpartition("/")[2]) for place in GPUS)


def fake(index: int, **changes: object) -> FakeGpu:
    where = ADDRESSES[index]
    defaults: dict[str, object] = {"uuid": UUID.format(f"{index:02d}").encode(), "minor": index}
    bus_id = f"{where.domain:08X}:{where.bus:02X}:{where.device:02X}.0"
    return FakeGpu(bus_id=bus_id, **{**defaults, **changes})  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> pcitree.Tree:
    """Four GPUs, each with a NIC on its switch, two to a socket, and an NVMe controller."""
    tree = pcitree.Tree(tmp_path)
    tree.cpus("0-3", "4-7")
    for index, bus in enumerate(BUSES):
        node = index // 2
        near = {"numa_node": str(node), "local_cpulist": f"{4 * node}-{4 * node + 3}"}
        place = GPUS[index].split("/")
        for depth, port in ((2, ROOT), (3, UPSTREAM), (4, DOWNSTREAM)):
            tree.bridge("/".join(place[:depth]), port, max_link_width="16")
        tree.bridge("/".join(path(bus, "1").split("/")[:4]), DOWNSTREAM)
        tree.function(GPUS[index], driver="nvidia", **{**GPU, **near}, max_link_width="16", current_link_width="16")
        tree.function(path(bus, "1"), driver="mlx5_core", **{**NIC, **near})
        tree.class_device("infiniband", f"{path(bus, '1')}/infiniband/mlx5_{index}")
        tree.write(f"dev/nvidia{index}", "")
    tree.function("pci0000:01/0000:01:00.0", driver="nvme", **NVME)
    tree.class_device("nvme", "pci0000:01/0000:01:00.0/nvme/nvme0")
    tree.write("proc/meminfo", "MemTotal: 4 kB\nMemFree: 1 kB")
    tree.write("sys/module/nvidia/version", "580.65.06")
    tree.write("sys/module/nvidia_peermem/version", "580.65.06")
    tree.write("proc/1/net/dev", "Inter-|   Receive\n face |bytes    packets")
    return tree


@pytest.fixture(autouse=True)
def sessions_end() -> Iterator[None]:
    """A session that stays open would block all others of this process."""
    yield
    with nvml.Nvml(FakeLibrary()):
        pass


def machine(tree: pcitree.Tree, library: object | None, *, keep: bool = False) -> probe.Machine:
    return probe.Machine(
        files=tree.files(),
        dev=tree.dev,
        library=library,
        origin=model.Origin.RECORDING,
        options=ProbeOptions(),
        clock=lambda: 5.0,
        keep_session=keep,
    )


def look(tree: pcitree.Tree, *gpus: FakeGpu, missing: tuple[str, ...] = (), init: int = 0) -> model.Snapshot:
    snapshot = machine(tree, FakeLibrary(*gpus, missing=missing, init=init)).probe()
    assert check.violations(snapshot) == ()
    return snapshot


def notes(snapshot: model.Snapshot, *besides: str) -> list[tuple[str, str]]:
    return [(finding.code, finding.subject) for finding in snapshot.findings if finding.code not in besides]


def all_four(**changes: object) -> list[FakeGpu]:
    return [fake(index, **changes) for index in range(4)]


def test_a_sound_machine(tree: pcitree.Tree) -> None:
    snapshot = look(tree, *all_four(links=(FakeLink(), FakeLink())))
    assert notes(snapshot) == []
    assert snapshot.taken_at == 5.0
    assert [gpu.state for gpu in snapshot.gpus] == [model.GpuState.READY] * 4
    assert [gpu.pci.cpu_socket for gpu in snapshot.gpus] == [0, 0, 1, 1]
    assert [gpu.pci.switch for gpu in snapshot.gpus] == [parse(f"0000:{bus[0]}9:00.0") for bus in BUSES]
    assert [(gpu.nic.name, gpu.nic.distance, gpu.nic.rail) for gpu in snapshot.gpus if gpu.nic is not None] == [
        (f"mlx5_{index}", model.PathClass.PIX, index) for index in range(4)
    ]
    first = snapshot.gpus[0].address
    assert {gpu.groups.nvlink_domain for gpu in snapshot.gpus} == {first}
    assert {path.nvlinks for path in paths.between_all(snapshot) if path.a == first and path.b in ADDRESSES} == {2}
    assert snapshot.nvmes[0].controllers == ("nvme0",)
    assert len(snapshot.bridges) == 16


def test_without_any_gpu_it_says_so(tmp_path: Path) -> None:
    tree = pcitree.Tree(tmp_path)
    tree.write("proc/meminfo", "MemTotal: 4 kB\nMemFree: 1 kB")
    library = FakeLibrary()
    snapshot = machine(tree, library).probe()
    assert snapshot.gpus == ()
    assert notes(snapshot) == [("no-gpu", "node")]
    assert library.opened == 0


def test_without_nvml_gpus_are_there_and_unreadable(tree: pcitree.Tree) -> None:
    snapshot = machine(tree, None).probe()
    assert {gpu.state for gpu in snapshot.gpus} == {model.GpuState.UNREADABLE}
    assert ("nvml-library-not-found", "nvml") in notes(snapshot)
    assert snapshot.nvidia_driver == model.NvidiaDriver(version="580.65.06")


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        (None, model.GpuState.NO_DRIVER),
        ("vfio-pci", model.GpuState.VFIO),
        ("nvgrace_gpu_vfio_pci", model.GpuState.VFIO),
        ("nouveau", model.GpuState.FOREIGN_DRIVER),
    ],
)
def test_a_gpu_with_another_driver(tree: pcitree.Tree, driver: str | None, state: model.GpuState) -> None:
    link = tree.sys / "devices" / GPUS[1] / "driver"
    link.unlink()
    if driver is not None:
        tree.link(f"sys/devices/{GPUS[1]}/driver", f"bus/pci/drivers/{driver}")
    snapshot = look(tree, *(fake(index) for index in (0, 2, 3)))
    assert [gpu.state for gpu in snapshot.gpus].count(model.GpuState.READY) == 3
    assert (snapshot.gpus[1].state, snapshot.gpus[1].uuid) == (state, None)
    assert notes(snapshot) == [("gpu-not-ready", str(ADDRESSES[1]))]


@pytest.mark.parametrize(
    ("function", "status", "state"),
    [
        ("nvmlDeviceGetHandleByPciBusId_v2", nvmllib.GPU_IS_LOST, model.GpuState.LOST),
        ("nvmlDeviceGetUUID", nvmllib.GPU_IS_LOST, model.GpuState.LOST),
        ("nvmlDeviceGetNvLinkState", nvmllib.GPU_IS_LOST, model.GpuState.LOST),
        ("nvmlDeviceGetUUID", nvmllib.UNKNOWN, model.GpuState.UNREADABLE),
        ("nvmlDeviceGetName", nvmllib.NOT_SUPPORTED, model.GpuState.UNREADABLE),
    ],
)
def test_a_sick_gpu_hides_no_other(tree: pcitree.Tree, function: str, status: int, state: model.GpuState) -> None:
    sick = fake(0, links=(FakeLink(),), errors={function: status})
    others = [fake(index, links=(FakeLink(),)) for index in (1, 2, 3)]
    snapshot = look(tree, sick, *others)
    assert [gpu.state for gpu in snapshot.gpus] == [state, *[model.GpuState.READY] * 3]
    # What helps a lost GPU is said; why another is unreadable is not known here.
    assert ("reboot the node" in str(snapshot.gpus[0].state_reason)) is (state is model.GpuState.LOST)
    healthy = look(tree, fake(0, links=(FakeLink(),)), *others)
    assert [gpu.groups for gpu in snapshot.gpus[1:]] == [gpu.groups for gpu in healthy.gpus[1:]]
    assert notes(snapshot, "nvlink-inferred") == [("gpu-not-ready", str(ADDRESSES[0]))]


def test_a_gpu_that_the_driver_excludes_says_why(tree: pcitree.Tree) -> None:
    tree.write(f"proc/driver/nvidia/gpus/{ADDRESSES[0]}/information", "GPU Excluded: Yes\nDevice Minor: 0")
    excluded = look(tree, *(fake(index) for index in (1, 2, 3))).gpus[0]
    assert excluded.state is model.GpuState.UNREADABLE
    assert "NVreg_ExcludedGpus" in str(excluded.state_reason)
    assert excluded.minor == 0


def test_where_sources_differ_there_is_a_finding_and_nvml_is_believed(tree: pcitree.Tree) -> None:
    other = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
    tree.write(f"proc/driver/nvidia/gpus/{ADDRESSES[0]}/information", f"GPU UUID: {other}\nDevice Minor: 7")
    tree.write("sys/module/nvidia/version", "550.1.2")
    tree.write(f"sys/devices/{GPUS[1]}/current_link_width", "8")
    (tree.dev / "nvidia2").unlink()
    snapshot = look(tree, *all_four())
    assert snapshot.gpus[0].uuid == UUID.format("00")
    assert sorted(notes(snapshot)) == [
        ("device-node-missing", str(ADDRESSES[2])),
        ("driver-version-differs", "nvidia"),
        ("link-width-differs", str(ADDRESSES[1])),
        ("minor-differs", str(ADDRESSES[0])),
        ("pcie-link-narrow", str(ADDRESSES[1])),
        ("uuid-differs", str(ADDRESSES[0])),
    ]


def test_a_gpu_that_only_nvml_knows_is_left_out(tree: pcitree.Tree) -> None:
    stranger = FakeGpu(bus_id="00000000:99:00.0")
    snapshot = look(tree, *all_four(), stranger)
    assert len(snapshot.gpus) == 4
    assert notes(snapshot) == [("gpu-without-function", "0000:99:00.0")]


def test_a_link_that_is_down_and_a_mode_that_waits_for_a_reset(tree: pcitree.Tree) -> None:
    flawed = fake(0, links=(FakeLink(), FakeLink(active=0)), mig=(0, 1))
    snapshot = look(tree, flawed, *(fake(index) for index in (1, 2, 3)))
    assert notes(snapshot) == [("mig-mode-pending", str(ADDRESSES[0])), ("nvlink-down", str(ADDRESSES[0]))]


def test_links_that_contradict_each_other_are_an_error_in_the_findings(tree: pcitree.Tree) -> None:
    spelled = fake(1).bus_id.encode()
    one_way = FakeLink(kind=0, remote=spelled, remote_domain=0)
    snapshot = machine(tree, FakeLibrary(fake(0, links=(one_way,)), *(fake(index) for index in (1, 2, 3)))).probe()
    (finding,) = (finding for finding in snapshot.findings if finding.code == "contradiction")
    assert finding.severity is model.Severity.ERROR
    assert "active NVLinks" in finding.message


def test_rails_of_the_configuration(tree: pcitree.Tree) -> None:
    nic = parse(path("28", "1").rpartition("/")[2])
    snapshot = probe.probe(
        sysfs=tree.files(),
        dev=tree.dev,
        library=FakeLibrary(*all_four()),
        origin=model.Origin.THIS_NODE,
        options=ProbeOptions(rails={nic: 9}),
        clock=lambda: 0.0,
    )
    assert [gpu.nic.rail for gpu in snapshot.gpus if gpu.nic is not None] == [None, 9, None, None]


def test_a_root_that_is_missing_ends_the_probe(tree: pcitree.Tree) -> None:
    gone = pcitree.Tree(tree.sys.parent / "other")
    gone.proc.rmdir()
    with pytest.raises(errors.ProbeError, match="no directory"):
        machine(gone, None).probe()
    with pytest.raises(errors.ProbeError, match="no directory"):
        machine(gone, None).rescan()


def test_a_rescan_reads_identity_and_state(tree: pcitree.Tree) -> None:
    lost = fake(0, errors={"nvmlDeviceGetMemoryInfo_v2": nvmllib.GPU_IS_LOST})
    scanned = machine(tree, FakeLibrary(lost, *(fake(index) for index in (1, 2, 3)))).rescan()
    assert [(reading.address, reading.state, reading.driver) for reading in scanned.gpus] == [
        (ADDRESSES[0], model.GpuState.LOST, "nvidia"),
        *((where, model.GpuState.READY, "nvidia") for where in ADDRESSES[1:]),
    ]
    assert scanned.gpus[1].uuid == UUID.format("01")


def test_the_fingerprint_changes_with_identity_and_place_and_with_nothing_else(tree: pcitree.Tree) -> None:
    def fingerprint(*gpus: FakeGpu) -> str:
        return machine(tree, FakeLibrary(*(gpus or all_four()))).rescan().fingerprint

    before = fingerprint()
    tree.write(f"sys/devices/{GPUS[0]}/current_link_width", "4")
    tree.write(f"sys/devices/{path('18', '1')}/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert fingerprint() == before
    assert fingerprint(*all_four(links=(FakeLink(active=0),))) == before
    seen = {before}
    for change in (
        (tree.sys / "devices" / GPUS[3] / "driver").unlink,
        (tree.sys / "devices" / path("18", "1") / "driver").unlink,
        (tree.sys / "bus/pci/devices/0000:01:00.0").unlink,
        lambda: tree.function("pci0000:02/0000:02:00.0", **NIC),
        lambda: tree.write("sys/module/nvidia/version", "580.99"),
    ):
        change()
        assert fingerprint() not in seen
        seen.add(fingerprint())
    assert fingerprint(fake(0, uuid=b"GPU-other"), *(fake(index) for index in (1, 2))) not in seen


def test_the_fingerprint_changes_when_the_gpus_have_joined_their_fabric(tree: pcitree.Tree) -> None:
    def scanned(state: int) -> model.Rescan:
        fabric = {"state": state, "status": 0, "clusterUuid": bytes(range(16)), "cliqueId": 7}
        return machine(tree, FakeLibrary(*all_four(fabric=fabric))).rescan()

    joining, joined = scanned(2), scanned(3)
    assert (joining.gpus[0].fabric, joined.gpus[0].fabric) == ("in_progress", "completed")
    assert joining.fingerprint != joined.fingerprint
    odd = scanned(99)
    assert (odd.gpus[0].state, odd.gpus[0].fabric) == (model.GpuState.READY, None)


def test_names_of_nics_are_read_and_change_no_fingerprint(tree: pcitree.Tree) -> None:
    own = machine(tree, FakeLibrary(*all_four()))
    before = own.rescan()
    nic = parse(path("18", "1").rpartition("/")[2])
    assert before.nics[0] == model.NicReading(address=nic, rdma="mlx5_0")
    (tree.sys / "class/infiniband/mlx5_0").unlink()
    tree.class_device("net", f"{path('18', '1')}/net/eth0")
    after = own.rescan()
    assert after.nics[0] == model.NicReading(address=nic, interface="eth0")
    assert after.fingerprint == before.fingerprint


def test_samples_of_the_gpus_that_answer(tree: pcitree.Tree) -> None:
    lost = fake(0, errors={"nvmlDeviceGetUtilizationRates": nvmllib.GPU_IS_LOST})
    idle = fake(1, errors={"nvmlDeviceGetUtilizationRates": nvmllib.NOT_SUPPORTED})
    samples = machine(tree, FakeLibrary(lost, idle, fake(2), fake(3))).sample()
    assert samples == (
        model.GpuSample(address=ADDRESSES[1], memory_used_bytes=20 << 30),
        *(model.GpuSample(address=where, utilization_ratio=0.4, memory_used_bytes=20 << 30) for where in ADDRESSES[2:]),
    )
    assert machine(tree, FakeLibrary(init=nvmllib.DRIVER_NOT_LOADED)).sample() == ()


@pytest.mark.parametrize(("persistence", "keep", "opened"), [(1, True, 3), (0, False, 3), (0, True, 1)])
def test_a_session_is_kept_only_where_closing_it_puts_gpus_to_sleep(
    tree: pcitree.Tree, persistence: int, *, keep: bool, opened: int
) -> None:
    library = FakeLibrary(*all_four(persistence=persistence))
    own = machine(tree, library, keep=keep)
    own.probe()
    own.rescan()
    own.sample()
    assert library.opened == opened
    own.close()
    assert library.sessions == 0


def test_a_session_is_not_kept_while_a_gpu_needs_a_new_one(tree: pcitree.Tree) -> None:
    sick = fake(0, errors={"nvmlDeviceGetUUID": nvmllib.GPU_IS_LOST})
    library = FakeLibrary(sick, *(fake(index, persistence=0) for index in (1, 2, 3)))
    own = machine(tree, library, keep=True)
    own.probe()
    assert library.sessions == 0


def test_a_driver_replaced_under_the_library_asks_for_a_new_process(tree: pcitree.Tree) -> None:
    own = machine(tree, FakeLibrary(init=nvmllib.LIB_RM_VERSION_MISMATCH))
    before = own.outlived
    snapshot = own.probe()
    assert (before, own.outlived) == (False, True)
    assert {gpu.state for gpu in snapshot.gpus} == {model.GpuState.UNREADABLE}
    assert "nvml-lib-rm-version-mismatch" in [finding.code for finding in snapshot.findings]


def test_a_driver_that_comes_later_is_seen(tree: pcitree.Tree) -> None:
    library = FakeLibrary(*all_four(), init=nvmllib.DRIVER_NOT_LOADED)
    own = machine(tree, library)
    assert {gpu.state for gpu in own.probe().gpus} == {model.GpuState.UNREADABLE}
    library.init = nvmllib.SUCCESS
    assert {reading.state for reading in own.rescan().gpus} == {model.GpuState.READY}
