# SPDX-License-Identifier: Apache-2.0
"""The admin's hand on the MIG of a rendered machine: what `nvidia-smi mig` would do on a node, while an agent runs or not.

    python -m discovery.mock.mig DIRECTORY list
    python -m discovery.mock.mig DIRECTORY mode    GPU on|off
    python -m discovery.mock.mig DIRECTORY create  GPU PROFILE [START]
    python -m discovery.mock.mig DIRECTORY destroy GPU PROFILE START
    python -m discovery.mock.mig DIRECTORY use     GPU [PID ...]

GPU is a PCI address, a UUID or an index as NVML counts; PROFILE a name as nvidia-smi prints it, such as 1g.10gb. An instance is made
with the compute instance that takes all of it, and removed with all that are in it. `use` says which processes are on a GPU as a
whole; without any it is idle again. On Ampere `mode` resets the GPU too, as nvidia-smi does.

It obeys the driver: what cannot be is refused with the driver's words. Faults of NVML calls do not hit it. The real driver sends no
uevents for any of this, so none are sent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from discovery import address
from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import live, mighardware, migrules, state
from discovery.mock.status import StatusError

_USAGE = (
    "usage: python -m discovery.mock.mig DIRECTORY"
    " list | mode GPU on|off | create GPU PROFILE [START] | destroy GPU PROFILE START | use GPU [PID ...]"
)

T = TypeVar("T")


def admin_mode(directory: Path, gpu: PciAddress, on: bool) -> None:  # noqa: FBT001 - on or off is what it is about
    """Enables or disables MIG. DocumentError where the GPU has none, is in use, or still has instances."""

    def changed(now: state.Gpu) -> tuple[state.Gpu, int]:
        after, status = migrules.set_mode(now, on=on)
        if migrules.waits_for_reset(now) and not now.processes:
            return migrules.reset(after), 0
        return after, status

    with _explained(directory, gpu, f"cannot turn MIG {'on' if on else 'off'}"):
        status = _change(directory, gpu, changed, seconds=lambda times: times.mode_s)
        if status:
            raise StatusError(status)


def admin_create(directory: Path, gpu: PciAddress, profile_name: str, start: int | None = None) -> state.MigInstance:
    """Makes a GPU instance with one compute instance that takes all of it. DocumentError where it cannot be."""

    def made(now: state.Gpu) -> tuple[state.Gpu, state.MigInstance]:
        profile, placement = _named(now, profile_name, start)
        after, instance = migrules.create(now, profile.id, placement)
        whole = next(each for each in profile.compute if each.multiprocessors == profile.multiprocessors)
        after, _ = migrules.create_compute(after, instance, whole.id, None)
        assert after.mig is not None
        return after, next(each for each in after.mig.instances if each.serial == instance.serial)

    where = "" if start is None else f" at {start}"
    with _explained(directory, gpu, f"cannot make {profile_name}{where}"):
        return _change(directory, gpu, made, seconds=lambda times: times.create_s)


def admin_destroy(directory: Path, gpu: PciAddress, profile_name: str, start: int) -> None:
    """Removes the GPU instance of a profile at a place, and its compute instances. DocumentError where there is none, or it is in
    use.
    """

    def removed(now: state.Gpu) -> tuple[state.Gpu, None]:
        profile, placement = _named(now, profile_name, start)
        for instance in migrules.enabled(now).instances:
            if (instance.profile_id, instance.placement) == (profile.id, placement):
                for compute in instance.compute:
                    now = migrules.destroy_compute(now, instance, compute)
                return migrules.destroy(now, instance), None
        raise DocumentError(f"GPU {gpu}: there is no {profile_name} at {start}")

    with _explained(directory, gpu, f"cannot remove {profile_name} at {start}"):
        _change(directory, gpu, removed, seconds=lambda times: times.destroy_s)


def admin_use(directory: Path, gpu: PciAddress, processes: Sequence[state.Process]) -> None:
    """Says which processes use a GPU, in place of those that did."""
    with _explained(directory, gpu, "cannot be used"):
        file = live.LiveFile(directory)
        mighardware.Hand(directory, file).occupy(gpu, tuple(processes))


def instances(directory: Path) -> dict[PciAddress, tuple[state.MigInstance, ...] | None]:
    """What there is: None for a GPU that is not in MIG mode."""
    return {gpu.pci: gpu.mig.instances if gpu.mig is not None and gpu.mig.current else None for gpu in _gpus(directory)}


def _change(
    directory: Path,
    gpu: PciAddress,
    rule: Callable[[state.Gpu], tuple[state.Gpu, T]],
    *,
    seconds: Callable[[state.MigTimes], float],
) -> T:
    return mighardware.Hand(directory, live.LiveFile(directory)).change(gpu, rule, seconds=seconds)


def _named(gpu: state.Gpu, profile_name: str, start: int | None) -> tuple[state.MigProfile, state.MigPlacement | None]:
    profiles = gpu.mig.profiles if gpu.mig is not None else ()
    profile = next((each for each in profiles if each.name == profile_name), None)
    if profile is None:
        known = ", ".join(each.name for each in profiles) or "none"
        raise DocumentError(f"GPU {gpu.pci}: it has no profile {profile_name}; it has {known}")
    placement = next((each for each in profile.placements if each.start == start), None)
    if placement is None and start is not None:
        starts = ", ".join(str(each.start) for each in profile.placements)
        raise DocumentError(f"GPU {gpu.pci}: {profile_name} cannot begin at {start}; it can at {starts}")
    return profile, placement


@contextlib.contextmanager
def _explained(directory: Path, gpu: PciAddress, what: str) -> Iterator[None]:
    try:
        yield
    except StatusError as err:
        there = [_told(found, each) for found in _gpus(directory) if found.pci == gpu for each in _all(found)]
        beside = f"; it has {', '.join(there)}" if there else ""
        raise DocumentError(f"GPU {gpu}: {what}: {err}{beside}") from err


def _gpus(directory: Path) -> tuple[state.Gpu, ...]:
    nvml = live.LiveFile(directory).read().nvml
    return () if nvml is None else nvml.gpus


def _all(gpu: state.Gpu) -> tuple[state.MigInstance, ...]:
    return gpu.mig.instances if gpu.mig is not None else ()


def _told(gpu: state.Gpu, instance: state.MigInstance) -> str:
    names = {each.id: each.name for each in gpu.mig.profiles} if gpu.mig is not None else {}
    name = names.get(instance.profile_id, f"profile {instance.profile_id}")
    return f"{name} at {instance.placement.start} (GPU instance {instance.id})"


def _listed(directory: Path) -> Iterator[str]:
    for index, gpu in enumerate(_gpus(directory)):
        mig = gpu.mig
        mode = "no MIG" if mig is None else "MIG on" if mig.current else "MIG off"
        if mig is not None and mig.pending != mig.current:
            mode += f", {'on' if mig.pending else 'off'} after a reset"
        used = f", in use by {', '.join(str(each.pid) for each in gpu.processes)}" if gpu.processes else ""
        yield f"{index}  {gpu.pci}  {mode}{used}"
        for instance in _all(gpu):
            uuids = " ".join(each.uuid for each in instance.compute) or "no compute instance"
            yield f"   {_told(gpu, instance)}  {uuids}"


def _found(directory: Path, said: str) -> PciAddress:
    gpus = _gpus(directory)
    if said.isdecimal() and int(said) < len(gpus):
        return gpus[int(said)].pci
    for gpu in gpus:
        with contextlib.suppress(ValueError):
            if said == gpu.uuid or address.parse(said) == gpu.pci:
                return gpu.pci
    raise DocumentError(f"{directory}: there is no GPU {said}; `list` tells which there are")


def main(arguments: Sequence[str]) -> int:
    """Does what is said; the exit status: 0, 1 where the driver refuses, 2 for what is no command."""
    try:
        match list(arguments):
            case [directory, "list"]:
                sys.stdout.writelines(f"{line}\n" for line in _listed(Path(directory)))
            case [directory, "mode", gpu, ("on" | "off") as mode]:
                admin_mode(Path(directory), _found(Path(directory), gpu), mode == "on")
            case [directory, "create", gpu, profile]:
                admin_create(Path(directory), _found(Path(directory), gpu), profile)
            case [directory, "create", gpu, profile, start] if start.isdecimal():
                admin_create(Path(directory), _found(Path(directory), gpu), profile, int(start))
            case [directory, "destroy", gpu, profile, start] if start.isdecimal():
                admin_destroy(Path(directory), _found(Path(directory), gpu), profile, int(start))
            case [directory, "use", gpu, *pids] if all(pid.isdecimal() for pid in pids):
                processes = [state.Process(pid=int(pid)) for pid in pids]
                admin_use(Path(directory), _found(Path(directory), gpu), processes)
            case _:
                sys.stderr.write(f"{_USAGE}\n")
                return 2
    except (DocumentError, OSError) as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
