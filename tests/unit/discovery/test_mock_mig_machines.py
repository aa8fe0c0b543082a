# SPDX-License-Identifier: Apache-2.0
"""MIG in documents of people: what a Machine and a Variant say of it, what comes of it, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from discovery import codec
from discovery.errors import DocumentError
from discovery.mock import abi, capture, library, nvmlcapture, recording, render, state, zoo
from tests.fakes import mockmachine

FIRST = "ports: [{gpu: nvidia-h100-sxm5-80gb}, "
TABLE = "nvlink: {pairs"


def mig_of(machine: recording.Recording, index: int = 0) -> state.Mig:
    assert machine.nvml is not None
    mig = machine.nvml.gpus[index].mig
    assert mig is not None
    return mig


def slot(text: str) -> tuple[str, str]:
    """The first GPU of the small machine, with more in its slot."""
    return FIRST, f"ports: [{{gpu: nvidia-h100-sxm5-80gb, {text}}}, "


def product(**changes: str) -> tuple[str, str]:
    """A product with one MIG profile, and some of its values."""
    line = {
        "id": "0",
        "kind": "4_SLICE",
        "name": "4g.8gb",
        "memory": "7GiB",
        "sm": "40",
        "most": "1",
        "at": '"0"',
        "size": "4",
        **changes,
    }
    profile = ", ".join(f"{key}: {value}" for key, value in line.items())
    made_up = f"""\
products:
  gpus:
    example:
      source: https://gpu.example
      name: Example
      pci: "10de:ffff"
      class: "030200"
      architecture: hopper
      computeCapability: "9.0"
      memory: 8GiB
      multiprocessors: 40
      cores: 5120
      powerLimitWatts: 100
      mig:
        source: https://mig.example
        devices: 4
        profiles:
          - {{id: 5, kind: 2_SLICE, name: 2g.4gb, memory: 3GiB, sm: 20, most: 2, at: "0,2", size: 2}}
          - {{{profile}}}
"""
    return TABLE, made_up + TABLE


def test_mig_is_off_where_nothing_is_said() -> None:
    mig = mig_of(mockmachine.parsed())
    assert (mig.current, mig.pending, mig.max_devices, mig.instances) == (False, False, 7, ())
    assert [profile.name for profile in mig.profiles][:3] == ["1g.10gb", "2g.20gb", "3g.40gb"]
    assert [profile.number for profile in mig.profiles] == sorted(profile.number for profile in mig.profiles)


def test_mig_can_be_on_without_an_instance() -> None:
    mig = mig_of(mockmachine.parsed(slot("migMode: true")))
    assert (mig.current, mig.pending, mig.instances) == (True, True, ())
    assert not mig_of(mockmachine.parsed(slot("migMode: true")), 1).current


def test_instances_get_the_ids_of_their_places_and_a_compute_instance() -> None:
    said = "migMode: true, migInstances: [{profile: 3g.40gb, start: 4}, {profile: 1g.20gb, start: 0}]"
    three, one = mig_of(mockmachine.parsed(slot(said))).instances
    assert (three.id, three.profile_id, three.placement) == (2, 9, state.MigPlacement(start=4, size=4))
    assert (one.id, one.profile_id, one.placement) == (3, 15, state.MigPlacement(start=0, size=2))
    (whole,) = three.compute
    assert (whole.id, whole.profile_id, whole.placement) == (0, 2, state.MigPlacement(start=0, size=3))
    assert [each.profile_id for each in one.compute] == [7]
    assert whole.uuid.startswith("MIG-")
    assert whole.uuid != one.compute[0].uuid


def test_compute_instances_can_be_none_or_several() -> None:
    said = (
        "migMode: true, migInstances: [{profile: 3g.40gb, start: 4, compute: [1c.3g.40gb, 1c.3g.40gb]}, "
        "{profile: 2g.20gb, start: 0, compute: []}]"
    )
    several, none = mig_of(mockmachine.parsed(slot(said))).instances
    assert [(each.id, each.profile_id, each.placement.start) for each in several.compute] == [(0, 0, 0), (1, 0, 1)]
    assert none.compute == ()


def test_times_are_those_of_the_driver() -> None:
    driver = '{version: 580.95.05, cuda: "13.0"'
    times = ", migTimes: {create: 0.5, destroy: 0.25, mode: 2}"
    machine = mockmachine.parsed((driver, driver + times))
    assert mig_of(machine).times == state.MigTimes(create_s=0.5, destroy_s=0.25, mode_s=2.0)
    assert mig_of(mockmachine.parsed()).times == state.MigTimes()


def test_a_new_product_needs_no_code() -> None:
    machine = mockmachine.parsed(
        product(),
        (FIRST, "ports: [{gpu: example, migMode: true}, "),
        ("nvlink: {pairs: [{between: [gpu0, gpu1], links: 4}]}", ""),
    )
    mig = mig_of(machine)
    assert [(profile.id, profile.name, profile.slices, profile.memory_mib) for profile in mig.profiles] == [
        (5, "2g.4gb", 2, 3072),
        (0, "4g.8gb", 4, 7168),
    ]
    assert [each.name for profile in mig.profiles for each in profile.compute] == ["2g.4gb", "4g.8gb"]


def test_the_state_of_mig_reads_back_from_a_recording(tmp_path: Path) -> None:
    machine = zoo.load("dgx-h100-mig")
    path = tmp_path / "machine.json"
    path.write_bytes(recording.dump(machine))
    assert zoo.load(str(path)) == machine
    assert machine.nvml is not None
    assert codec.decode(state.Nvml, codec.encode(machine.nvml), place="nvml") == machine.nvml


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("migMode: yes", r"small.yaml:17: pci.*migMode: must be true or false"),
        ("migInstances: [{profile: 1g.10gb, start: 0}]", "migInstances need migMode: true"),
        (
            "migMode: true, migInstances: [{profile: 1g.5gb, start: 0}]",
            r"migInstances\[0\].profile: .*no profile 1g.5gb; it has 1g.10gb, ",
        ),
        ("migMode: true, migInstances: [{profile: 3g.40gb, start: 2}]", r"3g.40gb cannot begin at 2; it can at 0, 4"),
        (
            "migMode: true, migInstances: [{profile: 3g.40gb, start: 0}, {profile: 1g.10gb, start: 3}]",
            r"migInstances\[1\]: 1g.10gb at 3 needs slice 3, which 3g.40gb at 0 has",
        ),
        (
            "migMode: true, migInstances: [{profile: 1g.10gb+me, start: 0}, {profile: 1g.10gb+me, start: 1}]",
            r"a GPU has at most 1 of 1g.10gb\+me",
        ),
        (
            "migMode: true, migInstances: [{profile: 3g.40gb, start: 0, compute: [2c.3g.40gb]}]",
            r"3g.40gb has no 2c.3g.40gb; it has 1c.3g.40gb, 3g.40gb",
        ),
        (
            "migMode: true, migInstances: [{profile: 3g.40gb, start: 0, compute: [1c.3g.40gb, 3g.40gb]}]",
            r"compute\[1\]: 3g.40gb has no room any more in 3g.40gb",
        ),
        ("migMode: true, migInstances: [{profile: 1g.10gb}]", r"migInstances\[0\].start"),
        ("migMode: true, migInstances: [{profile: 1g.10gb, start: -1}]", r"migInstances\[0\].start"),
    ],
)
def test_a_mistake_in_a_slot_names_its_place(said: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as refused:
        mockmachine.parsed(slot(said))
    assert str(refused.value).startswith("small.yaml:")


def test_only_gpus_that_have_mig_take_it() -> None:
    with pytest.raises(DocumentError, match=r"nic takes no migMode; only gpu does"):
        mockmachine.parsed(("{nic: connectx-7-400g-ib}", "{nic: connectx-7-400g-ib, migMode: true}"))
    with pytest.raises(DocumentError, match=r"gpu0 is a NVIDIA L40S, which has no MIG"):
        mockmachine.parsed(
            (FIRST, "ports: [{gpu: nvidia-l40s, migMode: true}, "), (mockmachine.TEXT.splitlines()[-1], "")
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "5_SLICE"}, r"profiles\[1\].kind"),
        ({"kind": "7_SLICE"}, "4g.8gb is no profile of 7 slices, which 7_SLICE says"),
        ({"name": "4g"}, r"profiles\[1\].name"),
        ({"memory": "1000B"}, "the memory of 4g.8gb is no whole number of MiB"),
        ({"most": "2"}, "2 instances of 4g.8gb have no room at 1 places that do not overlap"),
        ({"at": '"0,2"', "most": "2"}, "2 instances of 4g.8gb have no room at 1 places"),
        ({"at": '""'}, r"profiles\[1\]: 1 instances of 4g.8gb have no room at 0 places"),
        ({"id": "5"}, "two profiles have the same id"),
        ({"kind": "2_SLICE", "name": "2g.8gb"}, "two profiles have the same kind"),
        ({"size": "3"}, "2g.4gb is no half, quarter or eighth of 4 memory slices|4g.8gb is no half"),
        ({"sm": "0"}, r"profiles\[1\].sm"),
        ({"gpcs": "1"}, "unknown key"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        mockmachine.parsed(product(**changes))


def test_a_table_needs_its_source() -> None:
    before, text = product()
    with pytest.raises(DocumentError, match="profiles need their source"):
        mockmachine.parsed((before, text.replace("        source: https://mig.example\n", "")))


def write(folder: Path, name: str, base: str, more: str) -> str:
    path = folder / f"{name}.yaml"
    head = f"apiVersion: mock.nearfield.dev/v1alpha1\nkind: Variant\nname: {name}\nbase: {base}\n"
    path.write_text(head + more)
    return str(path)


def divided(machine: recording.Recording) -> list[list[int] | None]:
    assert machine.nvml is not None
    migs = [mig_of(machine, index) for index in range(len(machine.nvml.gpus))]
    return [[each.profile_id for each in mig.instances] if mig.current else None for mig in migs]


def test_a_variant_divides_gpus_of_its_base_by_name(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(mockmachine.TEXT)
    one = write(tmp_path, "one", "small.yaml", "mig: {gpu1: [{profile: 7g.80gb, start: 0}]}\n")
    two = write(tmp_path, "two", "one.yaml", "mig: {gpu0: []}\n")
    three = write(tmp_path, "three", "two.yaml", "mig: {gpu1: [{profile: 3g.40gb, start: 0}]}\n")
    assert divided(zoo.load(one)) == [None, [0]]
    assert divided(zoo.load(two)) == [[], [0]]
    assert divided(zoo.load(three)) == [[], [9]]


def test_what_a_variant_says_is_in_place_of_what_slots_say(tmp_path: Path) -> None:
    before, after = slot("migMode: true, migInstances: [{profile: 7g.80gb, start: 0}]")
    (tmp_path / "small.yaml").write_text(mockmachine.TEXT.replace(before, after))
    assert divided(zoo.load(write(tmp_path, "one", "small.yaml", ""))) == [[0], None]
    assert divided(zoo.load(write(tmp_path, "two", "small.yaml", "mig: {gpu0: []}\n"))) == [[], None]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("mig: {gpu7: []}", r"one.yaml:5: mig.gpu7: there is no GPU called gpu7"),
        ("mig: {nic0: []}", r"one.yaml:5: mig.nic0: there is no GPU called nic0"),
        ("mig: {gpu0: [{profile: 2g.20gb, start: 6}]}", r"one.yaml:5: mig.gpu0\[0\].start: 2g.20gb cannot begin at 6"),
        ("mig: {gpu0: {}}", r"one.yaml:5: mig.gpu0"),
        ("mig: [gpu0]", r"one.yaml:5: mig"),
    ],
)
def test_a_mistake_in_a_variant_names_its_line(tmp_path: Path, said: str, message: str) -> None:
    (tmp_path / "small.yaml").write_text(mockmachine.TEXT)
    with pytest.raises(DocumentError, match=message):
        zoo.load(write(tmp_path, "one", "small.yaml", said + "\n"))


def test_a_mistake_that_a_variant_has_of_its_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(mockmachine.TEXT + "mig: {gpu0: [{profile: 9g.90gb, start: 0}]}\n")
    with pytest.raises(DocumentError, match=r"small.yaml:22: mig.gpu0\[0\].profile: the GPU has no profile 9g.90gb"):
        zoo.load(write(tmp_path, "one", "small.yaml", "mig: {gpu1: []}\n"))


def test_profiles_and_instances_are_captured(tmp_path: Path) -> None:
    machine = zoo.load("dgx-h100-mig")
    assert machine.nvml is not None
    addresses = [gpu.pci for gpu in machine.nvml.gpus]
    render.render(machine, tmp_path)
    read = nvmlcapture.read(library.Library(tmp_path), addresses)
    assert read is not None
    assert [gpu.pci for gpu in read.gpus] == addresses
    assert [gpu.mig for gpu in read.gpus] == [gpu.mig for gpu in machine.nvml.gpus]
    assert [gpu.errors for gpu in read.gpus] == [{}] * len(addresses)


def test_a_driver_that_knows_only_the_second_version_of_profiles_is_captured(tmp_path: Path) -> None:
    complete = library.Library(mockmachine.rendered(tmp_path, slot("migMode: true")).directory)

    class Older:
        def __getattr__(self, name: str) -> object:
            function = getattr(complete, name)
            if not name.endswith("ProfileInfoV"):
                return function

            def only_the_second(*arguments: Any) -> int:
                info = arguments[-1]._obj
                version = info.version >> 24
                return abi.ARGUMENT_VERSION_MISMATCH if version > 2 else int(function(*arguments))

            return only_the_second

    read = nvmlcapture.read(Older(), (mockmachine.GPU0, mockmachine.GPU1))
    assert read is not None
    assert read.gpus[0].mig == mig_of(mockmachine.parsed(slot("migMode: true")))
    assert read.gpus[0].errors == {}


def test_who_may_not_look_at_instances_captures_the_rest(tmp_path: Path) -> None:
    said = "migMode: true, migInstances: [{profile: 7g.80gb, start: 0}]"
    complete = library.Library(mockmachine.rendered(tmp_path, slot(said)).directory)

    class Rootless:
        def __getattr__(self, name: str) -> object:
            if name == "nvmlDeviceGetGpuInstances":
                return lambda *_arguments: abi.NO_PERMISSION
            return getattr(complete, name)

    read = nvmlcapture.read(Rootless(), (mockmachine.GPU0, mockmachine.GPU1))
    assert read is not None
    mig = read.gpus[0].mig
    assert mig is not None
    assert (mig.current, mig.instances, len(mig.profiles)) == (True, (), 7)
    assert read.gpus[0].errors == {"nvmlDeviceGetGpuInstances": abi.NO_PERMISSION}


def test_uuids_of_mig_devices_are_redacted(tmp_path: Path) -> None:
    machine = zoo.load("a30-4-mig")
    tree = render.render(machine, tmp_path)
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.Library(tree.directory))
    uuids = [
        each.uuid for index in range(4) for instance in mig_of(machine, index).instances for each in instance.compute
    ]
    text = recording.dump(captured).decode()
    assert len(uuids) == 7
    assert [uuid for uuid in uuids if uuid in text or uuid.removeprefix("MIG-") in text] == []
    pseudonyms = [
        each.uuid for index in range(4) for instance in mig_of(captured, index).instances for each in instance.compute
    ]
    assert len(set(pseudonyms)) == 7
    assert all(uuid.startswith("MIG-") for uuid in pseudonyms)
