# SPDX-License-Identifier: Apache-2.0
"""The contract of work.Work over a machine whose MIG behaves as hardware does, in this process.

- what is asked for is made, in its order, and is what a probe then sees; all or nothing, whatever fails on the way
- after a crash only what stands at exactly the wanted places is taken for one's own; anything else in the way is named
- the mode: enabled at need, never on Ampere, never under programs, and never left to change at the next reset
- what is to be removed and is not there is done; what is not named stays
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from discovery import child, dividing, errors, mig, model, nvml, nvmlmig, options, sysfs, workers
from discovery.address import PciAddress, parse
from discovery.mock import faults, library, live, state
from discovery.mock import mig as admin
from discovery.mock.fault import Fault, Kind
from discovery.work import Kind as Why
from tests.fakes import mockmachine
from tests.fakes.mockmachine import GPU0, GPU1

A100 = ("{gpu: nvidia-h100-sxm5-80gb}, {gpu: nvidia-h100-sxm5-80gb}", "{gpu: nvidia-a100-sxm4-40gb}")
ALONE = ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}", "")
ONE, THREE, FOUR, SEVEN, DOUBLE, MEDIA = 19, 9, 5, 0, 15, 20
"""Profile ids of an H100: 1g.10gb, 3g.40gb, 4g.40gb, 7g.80gb, 1g.20gb, 1g.10gb+me."""

UNKNOWN, NO_PERMISSION = 999, 4


class Machine:
    """A rendered machine, with work on it and a look at it."""

    def __init__(self, directory: Path, *changes: tuple[str, str], gpu: PciAddress = GPU0) -> None:
        mockmachine.rendered(directory, *changes)
        self.directory, self.gpu = directory, gpu
        self.source = options.Source.rendered(directory)
        self.commits = 0

    def partition(self, profile: int, start: int) -> mig.Partition:
        return mig.Partition(gpu=self.gpu, profile_id=profile, start=start)

    def create(
        self,
        *wanted: tuple[int, int],
        begun: bool = False,
        toggle: bool = True,
        commit: Callable[[], None] = lambda: None,
    ) -> tuple[mig.MigInstance, ...]:
        def counted() -> None:
            self.commits += 1
            commit()

        partitions = [self.partition(*each) for each in wanted]
        return self.work().create(self.gpu, partitions, begun=begun, toggle=toggle, commit=counted, timeout_s=30.0)

    def destroy(self, *places: tuple[int, int]) -> None:
        self.work().destroy(self.gpu, [self.partition(*each) for each in places], timeout_s=30.0)

    def whole(self, *, toggle: bool = True) -> None:
        self.work().whole(self.gpu, toggle=toggle, timeout_s=30.0)

    def work(self) -> workers.InProcessWork:
        return workers.InProcessWork(source=self.source)

    def seen(self) -> model.Gpu:
        prober = child.InProcessProber(source=self.source, options=options.ProbeOptions())
        gpu = prober.probe(timeout_s=30.0).gpu(self.gpu)
        assert gpu is not None
        return gpu

    def there(self) -> list[tuple[int, int]]:
        """The profiles and places of the instances that exist."""
        instances = admin.instances(self.directory)[self.gpu] or ()
        return sorted((each.profile_id, each.placement.start) for each in instances)

    def change(self, change: Callable[[state.Gpu], state.Gpu]) -> None:
        """Changes what the driver knows of the GPU."""

        def changed(now: live.Live) -> live.Live:
            assert now.nvml is not None
            gpus = tuple(change(gpu) if gpu.pci == self.gpu else gpu for gpu in now.nvml.gpus)
            return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, gpus=gpus))

        live.LiveFile(self.directory).update(changed)

    def miss(self, *functions: str) -> None:
        """Takes functions from the library."""

        def changed(now: live.Live) -> live.Live:
            assert now.nvml is not None
            system = dataclasses.replace(now.nvml.system, missing_functions=functions)
            return dataclasses.replace(now, nvml=dataclasses.replace(now.nvml, system=system))

        live.LiveFile(self.directory).update(changed)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refusal(call: Callable[[], object]) -> errors.WorkError:
    with pytest.raises(errors.WorkError) as caught:
        call()
    return caught.value


def without_compute(gpu: state.Gpu) -> state.Gpu:
    """As after a crash between the GPU instance and its compute instance."""
    assert gpu.mig is not None
    bare = tuple(dataclasses.replace(each, compute=()) for each in gpu.mig.instances)
    return dataclasses.replace(gpu, mig=dataclasses.replace(gpu.mig, instances=bare))


def test_instances_are_made_in_the_order_that_is_asked_for(machine: Machine) -> None:
    made = machine.create((DOUBLE, 6), (THREE, 0), (MEDIA, 4))
    assert [(each.profile_id, each.placement.start, each.placement.size) for each in made] == [
        (DOUBLE, 6, 2), (THREE, 0, 4), (MEDIA, 4, 1),
    ]  # fmt: skip
    assert all(each.whole and len(each.nodes) == 2 for each in made)
    seen = machine.seen()
    assert seen.mig_mode == model.MigMode(current=True, pending=True)
    assert seen.mig_instances == tuple(sorted(made, key=lambda each: each.placement))
    assert machine.commits == 1


def test_what_was_made_is_removed_and_the_gpu_is_whole_again(machine: Machine) -> None:
    machine.create((ONE, 0), (ONE, 1))
    machine.destroy((ONE, 0))
    assert machine.there() == [(ONE, 1)]
    machine.destroy((ONE, 0), (ONE, 1))
    machine.whole()
    assert machine.seen().mig_mode == model.MigMode(current=False, pending=False)


@pytest.mark.parametrize(
    "wanted", [[(SEVEN, 0)], [(ONE, start) for start in range(7)], [(FOUR, 0), (THREE, 4)], [(THREE, 0), (THREE, 4)]]
)
def test_a_gpu_is_filled_in_one_call(machine: Machine, wanted: Sequence[tuple[int, int]]) -> None:
    assert len(machine.create(*wanted)) == len(wanted)
    assert machine.there() == sorted(wanted)
    machine.destroy(*wanted)
    assert machine.there() == []


def test_nothing_is_changed_before_the_commit(machine: Machine) -> None:
    def look() -> None:
        assert admin.instances(machine.directory)[machine.gpu] is None

    machine.create((ONE, 0), commit=look)
    assert machine.there() == [(ONE, 0)]


def test_a_commit_that_fails_leaves_the_gpu_as_it_was(machine: Machine) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        machine.create((ONE, 0), commit=fail)
    assert machine.seen().mig_mode == model.MigMode(current=False, pending=False)
    assert machine.create((ONE, 0))


@pytest.mark.parametrize("wanted", [[], [(ONE, 0), (ONE, 0)]])
def test_what_no_call_can_be_about(machine: Machine, wanted: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="partitions"):
        machine.create(*wanted)
    with pytest.raises(ValueError, match="partitions"):
        machine.work().create(
            GPU1, [machine.partition(ONE, 0)], begun=False, toggle=True, commit=lambda: None, timeout_s=30.0
        )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([(99, 0)], "has no MIG profile 99; it has 0 (7g.80gb), 5 (4g.40gb)"),
        ([(THREE, 2)], "3g.40gb cannot begin at memory slice 2; it can at 0, 4"),
        ([(THREE, 0), (ONE, 3)], "overlap"),
    ],
)
def test_places_that_there_are_not(machine: Machine, wanted: list[tuple[int, int]], said: str) -> None:
    for toggled in (False, True):
        if toggled:
            admin.admin_mode(machine.directory, machine.gpu, True)
        refused = refusal(lambda: machine.create(*wanted))
        assert (refused.kind, refused.retryable) == (Why.NOT_SUPPORTED, False)
        assert said in str(refused)
    assert (machine.commits, machine.there()) == (0, [])


# Instances that are there


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("profile", "start"), [("2g.20gb", 2), ("1g.10gb+me", 3), ("7g.80gb", 0), ("4g.40gb", 0), ("1g.10gb", 0)]
)
def test_a_foreign_instance_in_the_way_is_named(machine: Machine, profile: str, start: int, begun: bool) -> None:
    admin.admin_mode(machine.directory, machine.gpu, True)
    foreign = admin.admin_create(machine.directory, machine.gpu, profile, start)
    refused = refusal(lambda: machine.create((THREE, 0), (ONE, 6) if start else (ONE, 4), begun=begun))
    assert (refused.kind, refused.retryable, machine.commits) == (Why.OCCUPIED, False, 0)
    for part in (
        f"GPU instance {foreign.id} ({profile}, profile {foreign.profile_id}, memory slice",
        foreign.compute[0].uuid,
    ):
        assert part in str(refused)
    assert machine.there() == [(foreign.profile_id, start)]


def test_a_foreign_instance_elsewhere_is_none_of_our_business(machine: Machine) -> None:
    admin.admin_mode(machine.directory, machine.gpu, True)
    admin.admin_create(machine.directory, machine.gpu, "3g.40gb", 4)
    machine.create((THREE, 0), toggle=False)
    machine.destroy((THREE, 0))
    assert machine.there() == [(THREE, 4)]


def test_what_a_crash_left_is_taken_for_ones_own(machine: Machine) -> None:
    (first,) = machine.create((THREE, 0))
    with_second = machine.create((ONE, 4), (THREE, 0), begun=True)
    assert with_second[1] == first
    assert machine.there() == [(THREE, 0), (ONE, 4)]
    assert machine.commits == 2


def test_without_begun_the_same_place_is_foreign(machine: Machine) -> None:
    machine.create((THREE, 0))
    assert refusal(lambda: machine.create((THREE, 0))).kind == Why.OCCUPIED


def test_half_an_instance_is_completed(machine: Machine) -> None:
    (before,) = machine.create((DOUBLE, 0))
    machine.change(without_compute)
    assert refusal(lambda: machine.create((DOUBLE, 0))).kind == Why.OCCUPIED
    assert machine.create((DOUBLE, 0), begun=True) == (before,)
    assert machine.seen().mig_instances == (before,)


def test_an_instance_that_somebody_divided_is_not_completed(machine: Machine) -> None:
    machine.create((THREE, 0))

    def divided(gpu: state.Gpu) -> state.Gpu:
        assert gpu.mig is not None
        profile = next(each for each in gpu.mig.profiles if each.id == THREE)
        part = next(each for each in profile.compute if each.slices == 1)
        (instance,) = gpu.mig.instances
        compute = dataclasses.replace(
            instance.compute[0], profile_id=part.id, placement=state.MigPlacement(start=0, size=1)
        )
        bare = dataclasses.replace(instance, compute=(compute,))
        return dataclasses.replace(gpu, mig=dataclasses.replace(gpu.mig, instances=(bare,)))

    machine.change(divided)
    assert refusal(lambda: machine.create((THREE, 0), begun=True)).kind == Why.OCCUPIED
    machine.destroy((THREE, 0))
    assert machine.there() == []


def test_the_same_place_on_another_gpu_is_another_place(machine: Machine) -> None:
    machine.create((THREE, 0))
    other = Machine.__new__(Machine)
    other.directory, other.gpu, other.source, other.commits = machine.directory, GPU1, machine.source, 0
    other.create((THREE, 0))
    machine.destroy((THREE, 0))
    assert (machine.there(), other.there()) == ([], [(THREE, 0)])


# Failures in the middle


@pytest.mark.parametrize("function", ["nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceGetInfo_v2"])
@pytest.mark.parametrize("after", [None, True])
def test_a_failure_takes_back_what_this_call_made(machine: Machine, function: str, after: bool | None) -> None:
    (before,) = machine.create((THREE, 0))
    faults.apply(
        machine.directory,
        [Fault(kind=Kind.NVML_ERROR, target=machine.gpu, function=function, error=UNKNOWN, after=after)],
    )
    refused = refusal(lambda: machine.create((ONE, 4), (ONE, 5)))
    assert (refused.kind, refused.retryable) == (Why.FAILED, True)
    faults.apply(machine.directory, [])
    assert set(machine.there()) in ({(THREE, 0)}, {(THREE, 0), (ONE, 4)})
    assert machine.create((ONE, 5), (ONE, 4), (THREE, 0), begun=True)[2] == before


def test_all_or_none(machine: Machine) -> None:
    """The third of three has no room, because somebody was faster."""

    def faster() -> None:
        admin.admin_create(machine.directory, machine.gpu, "1g.10gb", 6)

    admin.admin_mode(machine.directory, machine.gpu, True)
    refused = refusal(lambda: machine.create((ONE, 0), (ONE, 1), (DOUBLE, 6), commit=faster))
    assert (refused.kind, refused.retryable) == (Why.OCCUPIED, False)
    assert "1g.10gb, profile 19, memory slice 6" in str(refused)
    assert machine.there() == [(ONE, 6)]


def test_no_room_for_another_reason(machine: Machine) -> None:
    """Free slices, and no media engines left: only one +me at a time."""
    machine.create((MEDIA, 0))
    refused = refusal(lambda: machine.create((ONE, 2), (MEDIA, 1)))
    assert (refused.kind, refused.retryable) == (Why.INSUFFICIENT_RESOURCES, True)
    assert machine.there() == [(MEDIA, 0)]


def test_an_instance_whose_right_cannot_be_given_is_taken_back(machine: Machine) -> None:
    (machine.directory / "proc/devices").write_text("Character devices:\n195 nvidia\n")
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert refused.kind == Why.FAILED
    assert "proc/devices does not tell the device of GPU instance" in str(refused)
    assert machine.there() == []


def test_a_gpu_that_is_lost(machine: Machine) -> None:
    machine.create((ONE, 0))
    faults.apply(machine.directory, [Fault(kind=Kind.GPU_LOST, target=machine.gpu)])
    for call in (lambda: machine.create((ONE, 1)), lambda: machine.destroy((ONE, 0)), machine.whole):
        refused = refusal(call)
        assert (refused.kind, refused.retryable) == (Why.LOST, False)
        assert str(machine.gpu) in str(refused)


def test_a_gpu_that_there_is_not(machine: Machine) -> None:
    machine.gpu = parse("0000:ff:00.0")
    assert refusal(lambda: machine.create((ONE, 0))).kind == Why.LOST


# The mode


def test_mig_that_is_off_and_not_to_be_enabled(machine: Machine) -> None:
    refused = refusal(lambda: machine.create((ONE, 0), toggle=False))
    assert (refused.kind, refused.retryable, machine.commits) == (Why.NOT_SUPPORTED, False, 0)
    assert "nvidia-smi -mig 1" in str(refused)


def test_programs_keep_a_gpu_whole(machine: Machine) -> None:
    admin.admin_use(machine.directory, machine.gpu, [state.Process(pid=pid) for pid in range(100, 110)])
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert (refused.kind, refused.retryable, machine.commits) == (Why.IN_USE, True, 0)
    assert "processes 100, 101, 102, 103, 104, 105, 106, 107 and 2 more" in str(refused)
    admin.admin_use(machine.directory, machine.gpu, [])
    assert machine.create((ONE, 0))


def test_programs_that_come_between_look_and_change(machine: Machine) -> None:
    def come() -> None:
        admin.admin_use(machine.directory, machine.gpu, [state.Process(pid=42)])

    refused = refusal(lambda: machine.create((ONE, 0), commit=come))
    assert refused.kind == Why.IN_USE
    assert "processes 42" in str(refused)
    assert machine.seen().mig_mode == model.MigMode(current=False, pending=False)


def test_ampere_is_left_as_it_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path, A100, ALONE)
    for _ in range(2):
        assert refusal(lambda: machine.create((ONE, 0))).kind == Why.NOT_SUPPORTED
        assert machine.seen().mig_mode == model.MigMode(current=False, pending=False), "the next reset changes nothing"
    admin.admin_mode(machine.directory, machine.gpu, True)
    machine.create((ONE, 0), toggle=False)
    machine.destroy((ONE, 0))
    assert refusal(machine.whole).kind == Why.NOT_SUPPORTED
    assert machine.seen().mig_mode == model.MigMode(current=True, pending=True)


def test_a_gpu_without_mig(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (A100[0], "{gpu: nvidia-l40s}"), ALONE)
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert (refused.kind, str(refused)) == (Why.NOT_SUPPORTED, f"{machine.gpu} has no MIG")
    machine.destroy((ONE, 0))
    machine.whole()


def test_a_divided_gpu_is_not_whole(machine: Machine) -> None:
    (one,) = machine.create((ONE, 0))
    refused = refusal(machine.whole)
    assert (refused.kind, refused.retryable) == (Why.OCCUPIED, False)
    assert str(one.uuid) in str(refused)
    assert "remove it (nvidia-smi mig -dci and -dgi)" in str(refused)


def test_mig_that_is_on_and_not_to_be_disabled(machine: Machine) -> None:
    admin.admin_mode(machine.directory, machine.gpu, True)
    refused = refusal(lambda: machine.whole(toggle=False))
    assert (refused.kind, refused.retryable) == (Why.NOT_SUPPORTED, False)
    machine.whole()
    machine.whole(toggle=False)


class Stubborn(nvml.Nvml):
    """A driver that says of the MIG mode that it is done, and does nothing."""

    def mig_of(self, where: PciAddress) -> nvmlmig.MigGpu:
        gpu = super().mig_of(where)
        gpu.set_mode = lambda on: None  # type: ignore[method-assign]
        return gpu


@pytest.mark.parametrize("on", [True, False])
def test_a_mode_that_does_not_change_is_noticed(machine: Machine, on: bool) -> None:
    admin.admin_mode(machine.directory, machine.gpu, not on)
    divider = dividing.Divider(
        files=sysfs.Sysfs(sys=machine.source.sys, proc=machine.source.proc),
        session=Stubborn(library.load_library(machine.directory)),
    )
    places = [machine.partition(ONE, 0)]
    refused = refusal(
        (lambda: divider.create(machine.gpu, places, begun=False, toggle=True, commit=lambda: None))
        if on
        else (lambda: divider.whole(machine.gpu, toggle=True))
    )
    assert refused.kind == Why.FAILED
    assert "see the kernel log" in str(refused)


# Removing


def test_what_is_not_there_is_removed(machine: Machine) -> None:
    machine.destroy((ONE, 0))
    admin.admin_mode(machine.directory, machine.gpu, True)
    admin.admin_create(machine.directory, machine.gpu, "1g.10gb+me", 0)
    machine.destroy((ONE, 0), (99, 3))
    assert machine.there() == [(MEDIA, 0)], "another profile at the place is somebody else's"


def test_one_that_is_in_use_keeps_no_other(machine: Machine) -> None:
    made = machine.create((ONE, 0), (ONE, 1), (ONE, 2))
    admin.admin_use(machine.directory, machine.gpu, [state.Process(pid=77, gpu_instance=made[1].gpu_instance)])
    refused = refusal(lambda: machine.destroy((ONE, 0), (ONE, 1), (ONE, 2)))
    assert (refused.kind, refused.retryable) == (Why.IN_USE, True)
    assert f"GPU instance {made[1].gpu_instance}" in str(refused)
    assert "processes 77" in str(refused)
    assert machine.there() == [(ONE, 1)]
    admin.admin_use(machine.directory, machine.gpu, [])
    machine.destroy((ONE, 0), (ONE, 1), (ONE, 2))
    assert machine.there() == []


# Drivers


def test_without_a_driver(machine: Machine) -> None:
    machine.create((ONE, 0))
    faults.apply(machine.directory, [Fault(kind=Kind.NO_DRIVER)])
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert (refused.kind, refused.retryable) == (Why.NOT_SUPPORTED, False)
    machine.destroy((ONE, 0))


def test_without_a_library(machine: Machine, tmp_path: Path) -> None:
    """A driver whose library is nowhere, and whose kernel module may hold instances."""
    machine.source = dataclasses.replace(machine.source, mock=None, driver_root=tmp_path / "nowhere")
    for call in (lambda: machine.create((ONE, 0)), lambda: machine.destroy((ONE, 0))):
        refused = refusal(call)
        assert refused.kind == Why.NOT_SUPPORTED
        assert "libnvidia-ml.so.1" in str(refused)


@pytest.mark.parametrize(
    "missing",
    [
        ("nvmlDeviceSetMigMode",),
        ("nvmlDeviceGetMigMode",),
        ("nvmlDeviceCreateGpuInstanceWithPlacement",),
        ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetGpuInstanceProfileInfo"),
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2",),
    ],
)
def test_a_library_that_is_too_old(machine: Machine, missing: tuple[str, ...]) -> None:
    machine.miss(*missing)
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert (refused.kind, refused.retryable) == (Why.NOT_SUPPORTED, False)


def test_the_first_version_of_structures_is_enough(machine: Machine) -> None:
    machine.miss("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlGpuInstanceGetComputeInstanceProfileInfoV")
    made = machine.create((DOUBLE, 0), (MEDIA, 2))
    assert machine.seen().mig_instances == made
    assert [each.name for each in machine.seen().mig_profiles][-2:] == ["1g.10gb", "1g.10gb+me"]


def test_without_the_rights(machine: Machine) -> None:
    faults.apply(
        machine.directory,
        [Fault(kind=Kind.NVML_ERROR, function="nvmlDeviceSetMigMode", error=NO_PERMISSION)],
    )
    refused = refusal(lambda: machine.create((ONE, 0)))
    assert (refused.kind, refused.retryable) == (Why.NOT_SUPPORTED, False)


def test_after_the_end(machine: Machine) -> None:
    work = machine.work()
    work.close()
    assert refusal(lambda: work.whole(machine.gpu, toggle=True, timeout_s=30.0)).kind == Why.FAILED
