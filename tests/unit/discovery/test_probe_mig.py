# SPDX-License-Identifier: Apache-2.0
"""What a probe and a rescan see of MIG on machines of the zoo: a whole probe against what the machine is made of, changes by an
admin within one look, instances that nobody can use, and users who may not ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from discovery import check, child, mig, model, options
from discovery.mock import faults, live, render, state, zoo
from discovery.mock import mig as admin
from discovery.mock.fault import Fault, Kind
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

NO_PERMISSION, FUNCTION_NOT_FOUND = 4, 13


class Look:
    """Probes and rescans one rendered machine again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        source = options.Source.rendered(directory)
        self._prober = child.InProcessProber(source=source, options=options.ProbeOptions())

    def probe(self) -> model.Snapshot:
        return self._prober.probe(timeout_s=30.0)

    def gpu(self) -> model.Gpu:
        return self.probe().gpus[0]

    def codes(self) -> list[tuple[str, str]]:
        """Code and subject of the Findings about MIG and NVML."""
        found = self.probe().findings
        return [(each.code, each.subject) for each in found if each.code.startswith(("mig-", "nvml-", "contra"))]

    def rescan(self) -> tuple[str | None, str]:
        """What is seen of the first GPU's MIG, and the fingerprint."""
        scan = self._prober.rescan(timeout_s=30.0)
        return scan.gpus[0].mig, scan.fingerprint

    def change(self, change: Callable[[state.Gpu], state.Gpu]) -> None:
        """Changes what the driver knows of the first GPU."""

        def changed(now: live.Live) -> live.Live:
            assert now.nvml is not None
            first, *rest = now.nvml.gpus
            return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=(change(first), *rest)))

        live.LiveFile(self.directory).update(changed)


@pytest.fixture
def look(tmp_path: Path) -> Look:
    mockmachine.rendered(tmp_path)
    return Look(tmp_path)


@pytest.mark.parametrize("name", [name for name in zoo.names() if "mig" in name])
def test_a_divided_machine_is_seen_as_it_is(name: str, tmp_path: Path) -> None:
    recording = zoo.load(name)
    render.render(recording, tmp_path)
    assert recording.nvml is not None
    snapshot = Look(tmp_path).probe()
    assert check.violations(snapshot) == ()
    for seen, made in zip(snapshot.gpus, recording.nvml.gpus, strict=True):
        assert made.mig is not None
        assert seen.mig_mode == model.MigMode(current=made.mig.current, pending=made.mig.pending)
        assert [(each.id, each.name, each.multiprocessors) for each in seen.mig_profiles] == sorted(
            (each.id, each.name, each.multiprocessors) for each in made.mig.profiles
        )
        for profile, told in zip(seen.mig_profiles, sorted(made.mig.profiles, key=lambda each: each.id), strict=True):
            whole = [each.number for each in told.compute if each.multiprocessors == told.multiprocessors]
            assert profile.compute_number in whole
            assert [(place.start, place.size) for place in profile.placements] == [
                (place.start, place.size) for place in told.placements
            ]
        if not made.mig.current:
            assert seen.mig_instances is None
            continue
        assert seen.mig_instances is not None
        assert [(each.gpu_instance, each.profile_id, each.placement.start) for each in seen.mig_instances] == [
            (each.id, each.profile_id, each.placement.start)
            for each in sorted(made.mig.instances, key=lambda each: each.placement)
        ]
        for instance in seen.mig_instances:
            (told_instance,) = [each for each in made.mig.instances if each.id == instance.gpu_instance]
            uuids = [each.uuid for each in told_instance.compute]
            assert not instance.whole or ([instance.uuid], len(instance.nodes)) == (uuids, 2)
            assert instance.whole or len(uuids) != 1
    unusable = {str(gpu.address) for gpu in snapshot.gpus if not all(each.whole for each in gpu.mig_instances or ())}
    assert {each.subject for each in snapshot.findings if each.code == "mig-instance-incomplete"} == unusable


def test_every_product_is_described_by_its_profiles(tmp_path: Path) -> None:
    for name in ("dgx-b200", "gb200-tray", "dgx-a100-40gb", "a30-4-pcie", "workstation-rtx"):
        recording = zoo.load(name)
        render.render(recording, tmp_path / name)
        assert recording.nvml is not None
        for seen, made in zip(Look(tmp_path / name).probe().gpus, recording.nvml.gpus, strict=True):
            names = [] if made.mig is None else [each.name for each in made.mig.profiles]
            assert sorted(each.name for each in seen.mig_profiles) == sorted(names)


def test_what_an_admin_does_is_noticed_at_the_next_look(look: Look) -> None:
    seen = [look.rescan()]
    steps: list[Callable[[], object]] = [
        lambda: admin.admin_mode(look.directory, GPU0, True),
        lambda: admin.admin_create(look.directory, GPU0, "1g.20gb", 0),
        lambda: admin.admin_create(look.directory, GPU0, "1g.10gb", 4),
        lambda: admin.admin_destroy(look.directory, GPU0, "1g.20gb", 0),
        lambda: admin.admin_create(look.directory, GPU0, "2g.20gb", 0),
        lambda: admin.admin_destroy(look.directory, GPU0, "1g.10gb", 4),
        lambda: admin.admin_create(look.directory, GPU0, "1g.10gb+me", 4),
    ]
    for step in steps:
        step()
        seen.append(look.rescan())
    assert [text for text, _ in seen] == [
        "00", "11", "11 3:15@0+2:0", "11 3:15@0+2:0 11:19@4+1:0", "11 11:19@4+1:0", "11 3:14@0+2:0 11:19@4+1:0",
        "11 3:14@0+2:0", "11 3:14@0+2:0 11:20@4+1:0",
    ]  # fmt: skip
    assert len({fingerprint for _, fingerprint in seen}) == len(seen)
    assert look.rescan() == seen[-1]


def test_the_same_number_is_not_the_same_instance(look: Look) -> None:
    """One instance removed and another made between two looks, with the same numbers and so with the same UUID."""
    admin.admin_mode(look.directory, GPU0, True)
    first = admin.admin_create(look.directory, GPU0, "1g.20gb", 0)
    before = look.rescan()
    admin.admin_destroy(look.directory, GPU0, "1g.20gb", 0)
    second = admin.admin_create(look.directory, GPU0, "2g.20gb", 0)
    assert (first.id, first.compute[0].uuid) == (second.id, second.compute[0].uuid)
    assert look.rescan() != before


def test_compute_instances_that_come_and_go_are_noticed(look: Look) -> None:
    admin.admin_mode(look.directory, GPU0, True)
    admin.admin_create(look.directory, GPU0, "3g.40gb", 0)
    before = look.rescan()
    folder = look.directory / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0"
    (folder / "access").unlink()
    folder.rmdir()
    assert look.rescan()[0] == "11 1:9@0+4:"
    assert look.rescan() != before


def test_what_nobody_can_use_is_listed_and_said(look: Look) -> None:
    admin.admin_mode(look.directory, GPU0, True)
    admin.admin_create(look.directory, GPU0, "3g.40gb", 0)

    def bare(gpu: state.Gpu) -> state.Gpu:
        assert gpu.mig is not None
        instances = tuple(dataclasses.replace(each, compute=()) for each in gpu.mig.instances)
        return dataclasses.replace(gpu, mig=dataclasses.replace(gpu.mig, instances=instances))

    look.change(bare)
    assert look.gpu().mig_instances == (
        mig.MigInstance(gpu_instance=1, profile_id=9, placement=mig.MigPlacement(start=0, size=4)),
    )
    assert look.codes() == [("mig-instance-incomplete", str(GPU0))]


def test_an_instance_whose_devices_cannot_be_told(look: Look) -> None:
    admin.admin_mode(look.directory, GPU0, True)
    admin.admin_create(look.directory, GPU0, "3g.40gb", 0)
    (look.directory / "proc/devices").unlink()
    (instance,) = look.gpu().mig_instances or ()
    assert (instance.whole, instance.nodes) == (True, ())
    assert look.codes() == [("mig-capability-missing", str(GPU0))]


@pytest.mark.parametrize("function", ["nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetComputeInstances"])
def test_a_user_who_may_not_list_instances(look: Look, function: str) -> None:
    """Profiles are for all to see, instances for the administrator: they are unknown, which is not none."""
    admin.admin_mode(look.directory, GPU0, True)
    admin.admin_create(look.directory, GPU0, "3g.40gb", 0)
    faults.apply(look.directory, [Fault(kind=Kind.NVML_ERROR, function=function, error=NO_PERMISSION)])
    gpu = look.gpu()
    assert (len(gpu.mig_profiles), gpu.mig_mode, gpu.mig_instances) == (
        7,
        model.MigMode(current=True, pending=True),
        None,
    )
    assert look.codes() == [("nvml-no-permission", str(GPU0))]


def test_a_user_who_may_not_ask_for_an_instance_still_notices_that_there_is_one(look: Look) -> None:
    admin.admin_mode(look.directory, GPU0, True)
    faults.apply(
        look.directory, [Fault(kind=Kind.NVML_ERROR, function="nvmlDeviceGetGpuInstanceById", error=NO_PERMISSION)]
    )
    before = look.rescan()
    admin.admin_create(look.directory, GPU0, "3g.40gb", 0)
    assert look.rescan()[0] == "11 1::0"
    assert look.rescan() != before


def test_a_mode_that_cannot_be_read(look: Look) -> None:
    faults.apply(look.directory, [Fault(kind=Kind.NVML_ERROR, target=GPU0, function="nvmlDeviceGetMigMode", error=999)])
    snapshot = look.probe()
    first, second = snapshot.gpus
    assert (first.state, first.mig_mode, first.mig_profiles, first.mig_instances) == (
        model.GpuState.READY,
        None,
        (),
        None,
    )
    assert (second.address, len(second.mig_profiles)) == (GPU1, 7)
    assert look.rescan()[0] is None


def test_a_change_that_waits_for_a_reset_is_noticed(tmp_path: Path) -> None:
    mockmachine.rendered(tmp_path)
    look = Look(tmp_path)

    def pending(gpu: state.Gpu) -> state.Gpu:
        assert gpu.mig is not None
        return dataclasses.replace(gpu, mig=dataclasses.replace(gpu.mig, pending=True))

    look.change(pending)
    assert look.rescan()[0] == "01"
    assert ("mig-mode-pending", str(GPU0)) in look.codes()
