# SPDX-License-Identifier: Apache-2.0
"""Multi-Instance GPU as NVML tells it, where it tells it oddly: names, counts and places that cannot be, drivers from before
names and before profiles, instances that vanish in between, and reads that one user may make and another may not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from discovery import errors, mig, nvmlmig, nvmlnumbers, nvmlprofiles
from discovery.mock import abi, zoo
from tests.fakes import mignvml
from tests.fakes.mignvml import FakePynvml, Instance, info

GIB = 1 << 30


class Noted:
    """Takes errors as a probe does."""

    def __init__(self) -> None:
        self.errors: list[errors.SourceError] = []

    def __call__(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except errors.SourceError as err:
            self.errors.append(err)
            return None


def profiles(fake: FakePynvml, memory: int | None = 80 * GIB) -> tuple[nvmlprofiles.Profiles, list[str]]:
    noted = Noted()
    return nvmlprofiles.Description(fake, mignvml.GPU).profiles(memory, noted), [str(err) for err in noted.errors]


def instances(fake: FakePynvml) -> tuple[mig.MigInstance, ...]:
    told, _ = profiles(fake)
    return tuple(held.value() for held in nvmlmig.MigGpu(fake, mignvml.GPU).instances(told))


def test_profiles_in_order_of_id() -> None:
    told, odd = profiles(FakePynvml())
    assert [(each.id, each.name, each.number, each.compute_number) for each in told.named] == [
        (9, "3g.30gb", 2, 2), (19, "1g.10gb", 0, 0),
    ]  # fmt: skip
    assert told.named[1].memory_bytes == 9984 << 20
    assert told.named[0].placements == (mig.MigPlacement(start=0, size=4), mig.MigPlacement(start=4, size=4))
    assert (told.complete, odd) == (True, [])


@pytest.mark.parametrize("name", ["MIG 1g.10gb+me", "1g.10gb+me.all", "MIG 1g.10gb-me", "MIG 12g.1024gb+gfx"])
def test_names_of_the_driver(name: str) -> None:
    told, odd = profiles(FakePynvml(profiles={0: info(19, 1, 16, name=name)}))
    assert ([each.name for each in told.named], odd) == ([name.removeprefix("MIG ")], [])


@pytest.mark.parametrize(
    "name",
    ["MIG", "1g.10gb; rm -rf /", "1c.3g.40gb", "../../1g.10gb", "1g.10gb" + "+me" * 40, "1g.10gb\n", "ein Zehntel"],
)
def test_a_name_that_is_none_is_left_out(name: str) -> None:
    fake = FakePynvml(
        profiles={0: info(19, 1, 16, name=name), 2: info(9, 3, 48)},
        instances=[Instance(id=7, profile=19, start=0, size=1)],
    )
    told, odd = profiles(fake)
    if name.strip() == "1g.10gb":
        assert told.named[1].name == "1g.10gb"
        return
    assert [each.id for each in told.named] == [9]
    assert "profile 19" in odd[0]
    assert [each.gpu_instance for each in instances(fake)] == [7], "its instances take memory all the same"


def test_a_name_that_is_no_text() -> None:
    class Undecodable(SimpleNamespace):
        @property
        def name(self) -> str:
            return b"\xff".decode()

    odd_one = Undecodable(id=19, sliceCount=1, instanceCount=7, multiprocessorCount=16)
    told, odd = profiles(FakePynvml(profiles={0: odd_one, 2: info(9, 3, 48)}))
    assert [each.id for each in told.named] == [9]
    assert "is no text" in odd[0]


def test_old_drivers_leave_names_to_others() -> None:
    fake = FakePynvml(
        old=True,
        profiles={number: info(id_, slices, 16 * slices, name="") for number, id_, slices in ((0, 19, 1), (7, 20, 1))},
        places={19: ((0, 1),), 20: ((0, 1),)},
    )
    assert [each.name for each in profiles(fake)[0].named] == ["1g.10gb", "1g.10gb+me"]
    told, odd = profiles(fake, None)
    assert told.named == ()
    assert "has no name" in odd[0]


_PRODUCTS = zoo.catalogue().gpus


@pytest.mark.parametrize("product", [name for name, gpu in _PRODUCTS.items() if gpu.mig is not None])
def test_composed_names_are_those_that_drivers_give(product: str) -> None:
    gpu = _PRODUCTS[product]
    assert gpu.mig is not None
    for each in gpu.mig.profiles:
        number = abi.GPU_INSTANCE_PROFILES[each.kind]
        name = nvmlnumbers.profile_name(number, each.slices, part_bytes=each.memory, whole_bytes=gpu.memory)
        assert name == each.name


def test_one_slice_of_more_multiprocessors_is_taken_by_a_revision() -> None:
    fake = FakePynvml(
        profiles={0: info(19, 1, 16), 9: info(15, 1, 26, name="MIG 1g.20gb")}, places={19: ((0, 1),), 15: ((0, 2),)}
    )
    assert {each.id: each.compute_number for each in profiles(fake)[0].named} == {19: 0, 15: 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"sliceCount": 0},
        {"sliceCount": 5},
        {"instanceCount": 0},
        {"instanceCount": 4_000_000_000},
        {"multiprocessorCount": 0},
    ],
)
def test_profiles_that_cannot_be(changes: dict[str, int]) -> None:
    told, odd = profiles(FakePynvml(profiles={0: info(19, 1, 16, **changes), 2: info(9, 3, 48)}))
    assert ([each.id for each in told.named], len(odd)) == ([9], 1)


@pytest.mark.parametrize("places", [(), ((0, 0),), ((0xFFFFFFFF, 1),), ((60, 8),)])
def test_placements_that_cannot_be(places: tuple[tuple[int, int], ...]) -> None:
    told, odd = profiles(FakePynvml(places={19: places, 9: ((0, 4),)}))
    assert ([each.id for each in told.named], len(odd)) == ([9], 1)


@pytest.mark.parametrize("count", [65, 0xFFFFFFFF])
def test_counts_that_cannot_be_are_not_made_room_for(count: int) -> None:
    told, odd = profiles(FakePynvml(counts={"placements": count}))
    assert (told.named, len(odd)) == ((), 2)
    for what in ("instances", "computes"):
        with pytest.raises(errors.SourceError, match=str(count)):
            instances(FakePynvml(counts={what: count}, instances=[Instance(id=1, profile=9, start=0, size=4)]))


def test_a_library_from_before_profiles() -> None:
    fake = FakePynvml(errors={"nvmlDeviceGetGpuInstanceProfileInfo": mignvml.FUNCTION_NOT_FOUND})
    told, odd = profiles(fake)
    assert (told.named, told.complete, odd) == ((), False, [])
    with pytest.raises(errors.SourceError, match="may have instances"):
        instances(fake)


def test_a_profile_that_cannot_be_read_hides_no_other_and_no_instance() -> None:
    fake = FakePynvml(
        errors={"nvmlDeviceGetGpuInstanceProfileInfo": lambda _gpu, number, _version: mignvml.UNKNOWN * (number == 0)}
    )
    told, odd = profiles(fake)
    assert [each.id for each in told.named] == [9]
    assert (told.complete, len(odd)) == (False, 1)
    with pytest.raises(errors.SourceError, match="may have instances"):
        instances(fake)


def test_instances_in_order_of_place() -> None:
    fake = FakePynvml(
        instances=[
            Instance(id=2, profile=9, start=4, size=4, computes=(2,), uuid="MIG-2"),
            Instance(id=7, profile=19, start=0, size=1, computes=(0,), uuid="MIG-7"),
        ]
    )
    assert instances(fake) == (
        mig.MigInstance(
            gpu_instance=7, profile_id=19, placement=mig.MigPlacement(start=0, size=1), compute_instance=0, uuid="MIG-7"
        ),
        mig.MigInstance(
            gpu_instance=2, profile_id=9, placement=mig.MigPlacement(start=4, size=4), compute_instance=0, uuid="MIG-2"
        ),
    )


@pytest.mark.parametrize("computes", [(), (0,), (0, 0, 0), (2, 0)])
def test_only_one_compute_instance_that_takes_all_makes_it_whole(computes: tuple[int, ...]) -> None:
    (told,) = instances(FakePynvml(instances=[Instance(id=1, profile=9, start=0, size=4, computes=computes)]))
    assert (told.whole, told.compute_instance, told.uuid) == (False, None, None)


@pytest.mark.parametrize("uuid", ["GPU-1", "MIG-" + "x" * 200, "MIG-1\n; rm", ""])
def test_a_uuid_that_is_none(uuid: str) -> None:
    with pytest.raises(errors.SourceError, match="UUID"):
        instances(FakePynvml(instances=[Instance(id=1, profile=9, start=0, size=4, computes=(2,), uuid=uuid)]))


def test_an_instance_that_vanishes_in_between_is_gone() -> None:
    fake = FakePynvml(
        instances=[Instance(id=1, profile=9, start=0, size=4), Instance(id=11, profile=19, start=4, size=1)],
        errors={"nvmlGpuInstanceGetInfo": lambda handle: mignvml.NOT_FOUND * (handle == 1)},
    )
    assert [each.gpu_instance for each in instances(fake)] == [11]


@pytest.mark.parametrize(("start", "size"), [(0, 0), (63, 2), (0xFFFFFFFF, 1)])
def test_an_instance_at_no_place(start: int, size: int) -> None:
    with pytest.raises(errors.SourceError, match="GPU instance 1"):
        instances(FakePynvml(instances=[Instance(id=1, profile=9, start=start, size=size)]))


def test_what_is_known_of_profiles_is_asked_once() -> None:
    fake, reader, noted = FakePynvml(), nvmlmig.Reader(), Noted()
    gpu = nvmlmig.MigGpu(fake, mignvml.GPU)
    on = gpu.mode()
    first = reader.read(gpu, on, "GPU-1", 80 * GIB, noted)
    asked = fake.calls.count("nvmlDeviceGetGpuInstanceProfileInfo")
    assert reader.read(gpu, on, "GPU-1", 80 * GIB, noted) == first
    assert fake.calls.count("nvmlDeviceGetGpuInstanceProfileInfo") == asked
    reader.read(gpu, on, "GPU-2", 80 * GIB, noted)
    assert fake.calls.count("nvmlDeviceGetGpuInstanceProfileInfo") == 2 * asked


def test_profiles_of_which_not_all_is_known_are_asked_again() -> None:
    fake, reader = FakePynvml(places={19: (), 9: ((0, 4),)}), nvmlmig.Reader()
    for _ in range(2):
        noted = Noted()
        gpu = nvmlmig.MigGpu(fake, mignvml.GPU)
        reader.read(gpu, gpu.mode(), "GPU-1", 80 * GIB, noted)
        assert len(noted.errors) == 1, "or its Finding would be gone at the next look"


def test_instances_that_may_not_be_listed_are_unknown() -> None:
    fake, noted = FakePynvml(errors={"nvmlDeviceGetGpuInstances": mignvml.NO_PERMISSION}), Noted()
    gpu = nvmlmig.MigGpu(fake, mignvml.GPU)
    named, told = nvmlmig.Reader().read(gpu, gpu.mode(), "GPU-1", 80 * GIB, noted)
    assert (len(named), told, [err.kind for err in noted.errors]) == (2, None, ["no-permission"])


def test_a_mode_that_is_taken_and_not_put_into_effect_is_set_back() -> None:
    fake = FakePynvml(counts={"activation": mignvml.IN_USE})
    with pytest.raises(errors.SourceError) as caught:
        nvmlmig.MigGpu(fake, mignvml.GPU).set_mode(True)
    assert caught.value.kind == "in-use"
    assert fake.calls == ["nvmlDeviceSetMigMode"] * 2


def test_processes_of_the_gpu_and_of_an_instance() -> None:
    gpu = nvmlmig.MigGpu(FakePynvml(), mignvml.GPU)
    assert (gpu.processes(), gpu.processes(1), gpu.processes(3)) == ((5, 7), (7,), ())
    silent = FakePynvml(errors={"nvmlDeviceGetComputeRunningProcesses": mignvml.NO_PERMISSION})
    assert nvmlmig.MigGpu(silent, mignvml.GPU).processes() == ()
