# SPDX-License-Identifier: Apache-2.0
"""Capturing, and what must not be in a capture.

- no MAC, GUID, UUID, serial number or boot id of the machine, in whatever spelling and wherever it stands
- the same value has the same pseudonym everywhere; two captures of one machine are the same
- command lines and serial numbers in configuration space are left out; vital product data are the same where they were
- of networks it says what stands on NICs and where the default route leaves, in other words than the host's
- trees that lead out of themselves, and endless ones, are refused
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from discovery import errors, vpd
from discovery.errors import DocumentError
from discovery.mock import (
    capture,
    fault,
    faults,
    library,
    nvmlcapture,
    nvmlstate,
    recording,
    redact,
    render,
    state,
    zoo,
)
from discovery.mock.recording import Entry, Link
from tests.fakes import mockmachine

UUID = "b9b3b0a2-4a4c-4d4e-8f50-112233445566"
PCI = "sys/devices/pci0000:00/0000:00:01.0"


def _redacted(files: dict[str, Entry], nvml: state.Nvml | None = None) -> dict[str, Entry]:
    redaction = redact.Redaction()
    redaction.learn(files, nvml)
    return redaction.files(files)


def _texts(files: dict[str, Entry]) -> str:
    return "\n".join(f"{path}\n{entry!r}" for path, entry in files.items()).lower()


def test_a_mac_goes_in_every_spelling() -> None:
    clean = _redacted(
        {
            f"{PCI}/net/enx0c42a15c77aa/address": "0c:42:a1:5c:77:aa\n",
            "sys/class/net/enx0c42a15c77aa": Link("../../devices/pci0000:00/0000:00:01.0/net/enx0c42a15c77aa"),
            f"{PCI}/note": "0C:42:A1:5C:77:AA 0c42a15c77aa",
        }
    )
    assert "5c77aa" not in _texts(clean).replace(":", "")
    (name,) = {path.rpartition("/")[2] for path in clean if path.startswith("sys/class/net/")}
    assert clean[f"sys/class/net/{name}"] == Link(f"../../devices/pci0000:00/0000:00:01.0/net/{name}")
    address = clean[f"{PCI}/net/{name}/address"]
    assert isinstance(address, str)
    assert name == "enx" + address.strip().replace(":", "")
    assert clean[f"{PCI}/note"] == f"{address.strip()} {name[3:]}"


def test_a_guid_goes_in_every_spelling() -> None:
    clean = _redacted(
        {
            f"{PCI}/infiniband/ibp9c63c00300033240/node_guid": "9c63:c003:0003:3240\n",
            f"{PCI}/infiniband/ibp9c63c00300033240/sys_image_guid": "9c63:c003:0003:3240\n",
            f"{PCI}/net/ib0/address": "00:00:10:29:fe:80:00:00:00:00:00:00:9c:63:c0:03:00:03:32:40\n",
        }
    )
    assert "c0030003" not in _texts(clean).replace(":", "")
    assert len({entry for path, entry in clean.items() if path.endswith("guid")}) == 1


def test_nothings_are_left_as_they_are() -> None:
    files: dict[str, Entry] = {
        f"{PCI}/net/lo/address": "00:00:00:00:00:00\n",
        f"{PCI}/infiniband/mlx5_0/node_guid": "0000:0000:0000:0000\n",
        f"{PCI}/config": b"\x00\x01",
    }
    assert _redacted(files) == files


def test_a_uuid_is_the_same_in_files_and_in_nvml() -> None:
    pci = mockmachine.GPU0
    files: dict[str, Entry] = {
        f"proc/driver/nvidia/gpus/{pci}/information": f"Model: \t X\nGPU UUID: \t GPU-{UUID}\n",
        "proc/sys/kernel/random/boot_id": "11111111-2222-4333-8444-555555555555\n",
    }
    nvml = state.Nvml(
        system=state.System(),
        gpus=(
            state.Gpu(
                pci=pci,
                pci_device_id=0,
                uuid=f"GPU-{UUID}",
                serial="1",
                fabric=state.Fabric(state=3, cluster_uuid="c" * 8 + "-cccc-cccc-cccc-" + "c" * 12),
            ),
        ),
    )
    redaction = redact.Redaction()
    redaction.learn(files, nvml)
    clean, state_ = redaction.files(files), redaction.nvml(nvml)
    assert state_ is not None
    assert UUID not in _texts(clean)
    assert "555555555555" not in _texts(clean)
    (gpu,) = state_.gpus
    assert gpu.uuid is not None
    assert f"GPU UUID: \t {gpu.uuid}\n" in str(clean[f"proc/driver/nvidia/gpus/{pci}/information"])
    assert gpu.serial not in (None, "1")
    assert gpu.fabric is not None
    assert gpu.fabric.cluster_uuid not in (None, "c" * 8 + "-cccc-cccc-cccc-" + "c" * 12)


def test_a_serial_number_is_replaced_where_it_stands_however_short() -> None:
    clean = _redacted({f"{PCI}/nvme/nvme0/serial": "7\n", f"{PCI}/vendor": "0x7\n"})
    assert clean[f"{PCI}/vendor"] == "0x7\n"
    assert clean[f"{PCI}/nvme/nvme0/serial"] not in ("7\n", "")


def _captured(tmp_path: Path, name: str = "machine") -> recording.Recording:
    tree = mockmachine.rendered(tmp_path / name)
    return capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.load_library(tree.directory))


def test_a_capture_has_nothing_of_the_machine_that_identifies_it(tmp_path: Path) -> None:
    machine = mockmachine.parsed()
    captured = _captured(tmp_path)
    text = recording.dump(captured).decode()
    assert machine.nvml is not None
    secrets = [
        *(gpu.uuid or "" for gpu in machine.nvml.gpus),
        *(gpu.serial or "" for gpu in machine.nvml.gpus),
        *(
            entry.strip()
            for path, entry in machine.files.items()
            if isinstance(entry, str)
            and path.rpartition("/")[2] in ("address", "node_guid", "sys_image_guid", "serial", "boot_id")
            and not entry.startswith(("0000:", "00:00:00"))
        ),
    ]
    assert len(secrets) > 8
    assert [secret for secret in secrets if secret in text] == []


def test_two_captures_of_a_machine_are_the_same(tmp_path: Path) -> None:
    assert recording.dump(_captured(tmp_path, "a")) == recording.dump(_captured(tmp_path, "b"))


def test_the_state_behind_nvml_reads_back(tmp_path: Path) -> None:
    machine = mockmachine.parsed()
    mockmachine.rendered(tmp_path)
    read = nvmlcapture.read(library.Library(tmp_path), (mockmachine.GPU0, mockmachine.GPU1))
    assert read == machine.nvml


def test_a_lost_gpu_and_missing_functions_are_captured(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    complete = library.Library(tmp_path)

    class Older:
        def __getattr__(self, name: str) -> object:
            if name == "nvmlDeviceGetNumGpuCores":
                raise AttributeError(name)
            return getattr(complete, name)

    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.GPU_LOST, target=mockmachine.GPU1)])
    read = nvmlcapture.read(Older(), (mockmachine.GPU0, mockmachine.GPU1))
    assert read is not None
    assert set(read.system.missing_functions) == {"nvmlDeviceGetNumGpuCores", *nvmlstate.MEMORY_LIMITS}
    first, second = read.gpus
    assert (first.pci, first.cores, first.errors) == (mockmachine.GPU0, None, {})
    lost = {"nvmlDeviceGetHandleByPciBusId_v2": 15, "nvmlDeviceGetHandleByIndex_v2": 15}
    assert (second.pci, second.errors) == (mockmachine.GPU1, lost)
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NO_DRIVER)])
    assert nvmlcapture.read(library.Library(tmp_path), ()) is None
    faults.apply(tmp_path, [fault.Fault(kind=fault.Kind.NVML_ERROR, function="nvmlInitWithFlags", error=18)])
    refused = nvmlcapture.read(library.Library(tmp_path), ())
    assert refused is not None
    assert refused.system.errors == {"nvmlInitWithFlags": 18}


def test_only_kernel_options_that_matter_are_taken(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    (tree.proc / "cmdline").write_text("root=UUID=1234 ip=10.0.0.7 intel_iommu=on iommu=pt pci=noaer token=hunter2\n")
    (tree.proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: X\nserial\t\t: 77777777\n\n")
    (tree.sys / "class/dmi/id/product_serial").write_text("XYZ\n")
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    assert captured.files["proc/cmdline"] == "intel_iommu=on iommu=pt pci=noaer\n"
    assert captured.files["proc/cpuinfo"] == "processor\t: 0\nmodel name\t: X\n\n"
    assert not any(path.endswith("product_serial") for path in captured.files)


def test_serial_numbers_in_configuration_space_are_blanked(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    path = mockmachine.directory_of(tree, mockmachine.NIC) / "config"
    space = bytearray(path.read_bytes()).ljust(4096, b"\0")
    space[0x61] = 0x80
    space[0x80:0x90] = bytes((0x03, 0x90, 0xAA, 0xAA, 0xAA, 0xAA, 0xAA, 0xAA)) + bytes(8)
    space[0x90:0xA0] = bytes((0x09, 0x00, 0x10)) + b"SECRET-SECRET"
    space[0x100:0x104] = (0x0003 | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    space[0x104:0x10C] = bytes.fromhex("aa775c0003a1420c")
    space[0x200:0x204] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x204:0x20C] = bytes.fromhex("0102030405060708")
    path.write_bytes(space)
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    config = captured.files[recording.Tree(captured.files).function(mockmachine.NIC) + "/config"]  # type: ignore[operator]
    assert isinstance(config, bytes)
    assert len(config) == 4096
    assert b"SECRET" not in config
    assert config[0x82:0x88] == bytes(6)
    assert config[0x104:0x10C] == bytes(8)
    assert config[0x100:0x104] == space[0x100:0x104]
    assert config[0x204:0x20C] == space[0x204:0x20C]
    assert config[:0x62] == bytes(space[:0x62])


def test_capability_lists_that_go_in_circles_end(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    path = mockmachine.directory_of(tree, mockmachine.NIC) / "config"
    space = bytearray(path.read_bytes()).ljust(4096, b"\0")
    space[0x61] = 0x60
    space[0x100:0x104] = (0x0003 | 0x100 << 20).to_bytes(4, "little")
    path.write_bytes(space)
    assert capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev).files


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../../../../etc", "../../../devices/../../../../etc"])
def test_a_link_out_of_the_tree_is_refused(tmp_path: Path, target: str) -> None:
    tree = mockmachine.rendered(tmp_path)
    link = mockmachine.directory_of(tree, mockmachine.GPU0) / "driver"
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(DocumentError, match=r"cannot be captured: .*(leads out of the recording|a target is relative)"):
        capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)


def test_virtual_interfaces_are_nobodys_business(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    (tree.sys / "devices/virtual/net/customer-vpn").mkdir()
    (tree.sys / "class/net/customer-vpn").symlink_to("../../devices/virtual/net/customer-vpn")
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    assert "customer-vpn" not in _texts(dict(captured.files))


def test_of_networks_only_what_stands_on_nics_and_the_default_route_is_taken(tmp_path: Path) -> None:
    network = "network: {vlans: [{name: acme, on: ib0, id: 7}], bridges: [{name: other, of: []}], defaultRoute: acme}"
    changes = (
        ("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, functions: [{interface: ib0}]}"),
        ("nvlink:", f"{network}\nnvlink:"),
    )
    tree = mockmachine.rendered(tmp_path, *changes)
    routes = tree.proc / "1/net/route"
    routes.write_text(routes.read_text() + "acme\t0000000A\t0100000A\t0003\t0\t0\t0\t000000FF\t0\t0\t0\n")
    (tree.proc / "1/net/ipv6_route").write_text(
        "00000000000000000000000000000000 00 00000000000000000000000000000000 00 20010db8000000000000000000000001 00000400 "
        "00000003 00000000 00000003     acme\n"
    )
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    text = _texts(dict(captured.files))
    assert [word for word in ("acme", "other", "0100000A", "20010db8") if word in text] == []
    assert sorted(path for path in captured.files if "/net/" in path and "made0" in path) == [
        "sys/class/net/made0",
        "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1a:00.0/net/ib0/upper_made0",
        "sys/devices/virtual/net/made0/lower_ib0",
        "sys/devices/virtual/net/made0/uevent",
    ]
    assert [line.split()[:2] for line in str(captured.files["proc/1/net/route"]).splitlines()[1:]] == [
        ["made0", "00000000"]
    ]


def test_routes_of_another_namespace_are_not_taken(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    (tree.proc / "1/net/dev").write_text("Inter-|\n face |bytes\n    lo: 0 0\n  eth0: 0 0\n")
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    assert [path for path in captured.files if path.startswith("proc/1/")] == []


@pytest.mark.parametrize("root", [True, False])
def test_vital_product_data_are_the_same_where_they_were_and_nobodys(tmp_path: Path, *, root: bool) -> None:
    tree = render.render(zoo.load("gb300-tray"), tmp_path / "node")
    before = {path.parent.name: path.read_bytes() for path in tree.sys.glob("devices/**/vpd")}
    assert len(set(before.values())) > 1
    if not root:
        for path in tree.sys.glob("devices/**/vpd"):
            path.unlink()
            path.mkdir()  # read as root too, this fails
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    after = {path.split("/")[-2]: entry for path, entry in captured.files.items() if path.endswith("/vpd")}
    if not root:
        assert after == {}
        return
    assert after.keys() == before.keys()
    told = {where: vpd.parse(entry) for where, entry in after.items() if isinstance(entry, bytes)}
    for a, b in itertools.combinations(before, 2):
        one, other = vpd.parse(before[a]), vpd.parse(before[b])
        assert (told[a].unique == told[b].unique) is (one.unique == other.unique)
        assert (told[a].serial == told[b].serial) is (one.serial == other.serial)
    secrets = {value for data in before.values() for value in (vpd.parse(data).serial, vpd.parse(data).unique)}
    assert secrets.isdisjoint(value for each in told.values() for value in (each.serial, each.unique))


def test_what_the_cpus_are_is_read_to_the_end(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    lines = "".join(f"processor\t: {cpu}\nflags\t\t: {'fpu ' * 300}\nphysical id\t: 0\n\n" for cpu in range(512))
    (tree.proc / "cpuinfo").write_text(lines)
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    assert str(captured.files["proc/cpuinfo"]).count("processor") == 512


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    vendor = mockmachine.directory_of(tree, mockmachine.GPU0) / "vendor"
    vendor.unlink()
    vendor.mkdir()
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    assert f"{recording.Tree(captured.files).function(mockmachine.GPU0)}/vendor" not in captured.files


def test_nonsense_in_a_file_is_captured_as_it_is(tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path)
    here = mockmachine.directory_of(tree, mockmachine.GPU0)
    (here / "class").write_text("chairs\n")
    (here / "local_cpulist").write_bytes(b"\xff\xfe")
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)
    inside = recording.Tree(captured.files).function(mockmachine.GPU0)
    assert captured.files[f"{inside}/class"] == "chairs\n"
    assert captured.files[f"{inside}/local_cpulist"] == b"\xff\xfe"


def test_an_endless_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = mockmachine.rendered(tmp_path)
    monkeypatch.setattr(capture, "_MAX_CONTENT", 20_000)
    with pytest.raises(DocumentError, match="the recording would be larger than"):
        capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev)


def test_a_root_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.ProbeError, match="is no directory"):
        capture.capture(sys=tmp_path / "nothing", proc=tmp_path, dev=tmp_path)
