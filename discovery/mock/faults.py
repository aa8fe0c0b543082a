# SPDX-License-Identifier: Apache-2.0
"""Faults on a rendered machine: putting them in place while an agent runs, and their effect on the files of the tree.

Their effect on NVML needs no writing: the library reads which faults are on. Files are written by whoever comes first:
`apply`, or the `Timeline` that the loaded library follows.
"""

from __future__ import annotations

import dataclasses
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from discovery.address import PciAddress
from discovery.errors import DocumentError
from discovery.mock import (
    configspace,
    cpulists,
    fault,
    hotplug,
    live,
    migfiles,
    migrules,
    procnet,
    recording,
    treefiles,
    ueventsocket,
)
from discovery.mock import view as viewing
from discovery.mock.fault import Fault, Kind, Placed
from discovery.mock.recording import Entry, Link

RECORDING_FILE = "recording.json"
"""The Recording a directory was rendered from: what is restored when a fault heals."""

_ONLINE_CPUS = "sys/devices/system/cpu/online"
_NODES = "sys/devices/system/node"
_TREE_KINDS = (
    Kind.FALLEN_OFF,
    Kind.LINK_DOWN,
    Kind.NARROW_LINK,
    Kind.NUMA_UNKNOWN,
    Kind.NUMA_WRONG,
    Kind.VFIO_BOUND,
    Kind.NO_DRIVER,
    Kind.NETDEV_MOVED,
    Kind.RDMA_MOVED,
)
_UNBINDING = (Kind.FALLEN_OFF, Kind.VFIO_BOUND, Kind.NO_DRIVER)
_OF_A_DRIVER = ("net", "infiniband", "infiniband_mad", "infiniband_verbs", "nvme", "drm")
"""Directories of a PCI function that its driver makes and that go with it."""


def current(directory: Path) -> tuple[Placed, ...]:
    """The faults in place, whether on now or not."""
    return live.LiveFile(directory).read().faults


def apply(directory: Path, faults: Iterable[Fault], *, clock: Callable[[], float] = time.time) -> None:
    """Puts exactly these faults in place of those that are there; times count from now. None of them heals all.

    DocumentError for a fault that cannot be, a target that is not there, or a directory that `render` did not write.
    """
    wanted = tuple(faults)
    tree = recording.Tree(_base(directory).files)
    for item in wanted:
        for _place, problem in fault.problems(item):
            raise DocumentError(f"fault {item.kind} on {item.target}: {problem}")
        if item.target is not None and tree.function(item.target) is None:
            raise DocumentError(f"fault {item.kind}: there is no PCI function {item.target} on this machine")
        if item.node is not None and f"{_NODES}/node{item.node}/cpulist" not in tree.files:
            raise DocumentError(f"fault {item.kind}: there is no NUMA node {item.node} on this machine")
    since = clock()
    placed = place(tree, wanted, since=since)
    live.LiveFile(directory).update(lambda now: dataclasses.replace(now, faults=placed))
    Timeline(directory).advance(since)


def place(tree: recording.Tree, faults: Iterable[Fault], *, since: float) -> tuple[Placed, ...]:
    """Faults, in place from a time on. With a bridge everything behind it falls off: each function by a fault of its own."""
    every = tuple(
        part
        for item in faults
        for part in (
            (dataclasses.replace(item, target=pci) for pci in _behind(tree, item.target))
            if item.kind is Kind.FALLEN_OFF
            else (item,)
        )
    )
    return tuple(Placed(fault=item, since=since) for item in every)


def _behind(tree: recording.Tree, pci: PciAddress | None) -> Sequence[PciAddress | None]:
    """A function and those that hang on it if it is a bridge, what is behind another in front of it."""
    directory = tree.function(pci)
    if directory is None:
        return (pci,)
    functions = hotplug.functions(tree.links_into(directory))
    return sorted(functions, key=lambda where: tree.function(where) or "", reverse=True)


class Timeline:
    """The faults of a rendered machine in their order of time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = live.LiveFile(directory)

    def advance(self, now: float, *, rendered: bool = False) -> float | None:
        """Gives the tree what the faults that are on at a time make of it. When the next change is due, None if never. `rendered`:
        just now, so that what is on has been so from the beginning.

        DocumentError when the directory is no rendered machine (any more).
        """
        state = self._file.read()
        if _on(state, now) != state.applied:
            state = self._show(now, rendered=rendered)
        moments = (moment for placed in state.faults for moment in (placed.begins, placed.ends) if moment is not None)
        return min((moment for moment in moments if moment > now), default=None)

    def _show(self, now: float, *, rendered: bool) -> live.Live:
        with self._file.locked():
            state = self._file.read()
            active = _on(state, now)
            base = _base(self._directory).files
            before, after = effects(base, state.applied), effects(base, active)
            told = hotplug.events(_under(base, before), _under(base, after))
            _write(self._directory, base, before, after)
            if not rendered:
                state = _without_instances(state, set(active) - set(state.applied))
            migfiles.repair(self._directory, viewing.view(state, now=now))
            state = dataclasses.replace(state, applied=active, seqnum=state.seqnum + len(told))
            self._file.write(state)
            first = state.seqnum - len(told) + 1
            messages = [event.message(number) for number, event in enumerate(told, first)]
            ueventsocket.send(self._directory, messages)
            return state


def _without_instances(state: live.Live, begun: Iterable[Fault]) -> live.Live:
    """A GPU that its driver leaves loses its MIG instances, and programs the GPU; the mode stays
    (https://github.com/NVIDIA/k8s-device-plugin/issues/225).
    """
    left = {item.target for item in begun if item.kind in _UNBINDING}
    if state.nvml is None or not left:
        return state
    gpus = tuple(migrules.unbound(gpu) if None in left or gpu.pci in left else gpu for gpu in state.nvml.gpus)
    return dataclasses.replace(state, nvml=dataclasses.replace(state.nvml, gpus=gpus))


def effects(files: Mapping[str, Entry], active: Iterable[Fault]) -> dict[str, Entry | None]:
    """The files that faults change: path -> what is there, or None where nothing is. Later faults see earlier ones' work."""
    changed: dict[str, Entry | None] = {}
    for item in active:
        tree = recording.Tree(_under(files, changed))
        directory = None if item.target is None else tree.function(item.target)
        if directory is not None or item.target is None:
            changed.update(_EFFECTS[item.kind](tree, item, directory))
    return changed


def _under(files: Mapping[str, Entry], changed: Mapping[str, Entry | None]) -> Mapping[str, Entry]:
    if not changed:
        return files
    merged = {**files, **changed}
    return {path: entry for path, entry in merged.items() if entry is not None}


def _on(state: live.Live, now: float) -> tuple[Fault, ...]:
    return tuple(placed.fault for placed in state.faults if placed.fault.kind in _TREE_KINDS and placed.on(now))


def _base(directory: Path) -> recording.Recording:
    return recording.read(directory / RECORDING_FILE)


def _write(
    root: Path, base: Mapping[str, Entry], before: Mapping[str, Entry | None], after: Mapping[str, Entry | None]
) -> None:
    """From one set of effects to another. Links go first and come last: a reader finds a device through its link."""
    paths = [
        path
        for path in before.keys() | after.keys()
        if before.get(path, base.get(path)) != after.get(path, base.get(path))
    ]
    wanted = {path: after.get(path, base.get(path)) for path in paths}
    for path in sorted(paths, key=lambda path: (not isinstance(base.get(path), Link), path)):
        if wanted[path] is None:
            treefiles.remove(root, path)
    for path in sorted(paths, key=lambda path: (isinstance(wanted[path], Link), path)):
        entry = wanted[path]
        if entry is not None:
            treefiles.replace(root, path, entry)


def _fallen_off(tree: recording.Tree, item: Fault, directory: str | None) -> dict[str, Entry | None]:
    assert directory is not None
    gone = (*tree.below(directory), *tree.links_into(directory), *_nvidia_files(tree, item.target))
    return {**dict.fromkeys(gone), **procnet.without_interfaces_of(tree, directory)}


def _link_down(tree: recording.Tree, _item: Fault, directory: str | None) -> dict[str, Entry | None]:
    assert directory is not None
    changed: dict[str, Entry | None] = {}
    for path in tree.below(directory):
        name = posixpath.basename(path)
        if "/infiniband/" in path and "/ports/" in path and name in ("state", "phys_state"):
            changed[path] = "1: DOWN\n" if name == "state" else "2: Polling\n"
        elif "/net/" in path and name == "operstate":
            changed[path] = "down\n"
        elif "/net/" in path and name == "carrier":
            changed[path] = "0\n"
        elif "/net/" in path and name == "speed":
            changed[path] = None  # the kernel answers EINVAL
    return changed


def _narrow_link(tree: recording.Tree, item: Fault, directory: str | None) -> dict[str, Entry | None]:
    """Both ends of the link tell the same, in their attribute and in their configuration space."""
    assert directory is not None
    assert item.width is not None
    changed: dict[str, Entry | None] = {}
    for end in (directory, posixpath.dirname(directory)):
        if f"{end}/current_link_width" in tree.files:
            changed[f"{end}/current_link_width"] = f"{item.width}\n"
            config = tree.files.get(f"{end}/config")
            if isinstance(config, bytes):
                changed[f"{end}/config"] = configspace.with_link_width(config, item.width)
    return changed


def _numa_unknown(tree: recording.Tree, _item: Fault, directory: str | None) -> dict[str, Entry | None]:
    """With node -1 the kernel lists all CPUs as local (drivers/pci/pci-sysfs.c)."""
    return _told_node(tree, directory, "-1", tree.text(_ONLINE_CPUS) or "")


def _numa_wrong(tree: recording.Tree, item: Fault, directory: str | None) -> dict[str, Entry | None]:
    return _told_node(tree, directory, str(item.node), tree.text(f"{_NODES}/node{item.node}/cpulist") or "")


def _told_node(tree: recording.Tree, directory: str | None, node: str, local: str) -> dict[str, Entry | None]:
    """What functions show of a NUMA node and its CPUs: one function, or all and the root buses with them."""
    directories = [directory] if directory else [tree.resolve(path) for path in tree.below("sys/bus/pci/devices")]
    buses = [] if directory else [tree.resolve(path) for path in tree.below("sys/class/pci_bus")]
    possible = max(cpulists.parse(tree.text(_ONLINE_CPUS) or ""), default=0) + 1
    mask = cpulists.mask(cpulists.parse(local), possible=possible)
    values = {"numa_node": f"{node}\n", "local_cpulist": f"{local}\n", "local_cpus": f"{mask}\n"}
    changed: dict[str, Entry | None] = {f"{at}/{name}": value for at in directories for name, value in values.items()}
    changed |= {f"{bus}/cpulistaffinity": f"{local}\n" for bus in buses}
    changed |= {f"{bus}/cpuaffinity": f"{mask}\n" for bus in buses}
    return {path: entry for path, entry in changed.items() if path in tree.files}


def _moved(class_name: str) -> Callable[[recording.Tree, Fault, str | None], dict[str, Entry | None]]:
    """The devices of one class that hang on a function are in another network namespace, which sysfs does not show here."""

    def effect(tree: recording.Tree, _item: Fault, directory: str | None) -> dict[str, Entry | None]:
        assert directory is not None
        top = f"{directory}/{class_name}"
        told = procnet.without_interfaces_of(tree, directory) if class_name == "net" else {}
        return {**dict.fromkeys((*tree.below(top), *tree.links_into(top))), **told}

    return effect


def _unbound(tree: recording.Tree, pci: PciAddress | None, directory: str) -> dict[str, Entry | None]:
    """A function without its driver: the link, and all that the driver had made."""
    driver = tree.resolve(f"{directory}/driver")
    gone = [f"{directory}/driver", f"{driver}/{pci}", *_nvidia_files(tree, pci)]
    for name in _OF_A_DRIVER:
        gone += (*tree.below(f"{directory}/{name}"), *tree.links_into(f"{directory}/{name}"))
    return {**{path: None for path in gone if path in tree.files}, **procnet.without_interfaces_of(tree, directory)}


def _vfio_bound(tree: recording.Tree, item: Fault, directory: str | None) -> dict[str, Entry | None]:
    assert directory is not None
    changed = _unbound(tree, item.target, directory)
    up = "../" * directory.count("/")
    changed[f"{directory}/driver"] = Link(f"{up}bus/pci/drivers/vfio-pci")
    changed[f"sys/bus/pci/drivers/vfio-pci/{item.target}"] = Link(f"../../../../{directory.removeprefix('sys/')}")
    group = tree.resolve(f"{directory}/iommu_group")
    if group is not None:
        changed[f"dev/vfio/{posixpath.basename(group)}"] = ""
        changed["dev/vfio/vfio"] = ""
    return changed


def _no_driver(tree: recording.Tree, item: Fault, directory: str | None) -> dict[str, Entry | None]:
    if directory is not None:
        return _unbound(tree, item.target, directory)
    changed: dict[str, Entry | None] = {}
    for link in tree.below("sys/bus/pci/devices"):
        function = tree.resolve(link)
        driver = tree.resolve(f"{function}/driver")
        if function is not None and driver is not None and posixpath.basename(driver).startswith("nvidia"):
            changed.update(dict.fromkeys((f"{function}/driver", f"{driver}/{posixpath.basename(link)}")))
    for path in tree.files:
        if path.startswith(("sys/module/nvidia", "proc/driver/nvidia", "dev/nvidia")):
            changed[path] = None
    majors = tree.files.get("proc/devices")
    if isinstance(majors, str):
        changed["proc/devices"] = "".join(line for line in majors.splitlines(keepends=True) if "nvidia" not in line)
    return {path: entry for path, entry in changed.items() if path in tree.files}


def _nvidia_files(tree: recording.Tree, pci: PciAddress | None) -> Sequence[str]:
    """What the NVIDIA driver shows of one GPU outside of sysfs."""
    information = tree.text(f"proc/driver/nvidia/gpus/{pci}/information") or ""
    minor = next(
        (line.split(":", 1)[1].strip() for line in information.splitlines() if line.startswith("Device Minor")), ""
    )
    node = f"dev/nvidia{minor}"
    return (*tree.below(f"proc/driver/nvidia/gpus/{pci}"), *([node] if minor and node in tree.files else ()))


_EFFECTS: Mapping[Kind, Callable[[recording.Tree, Fault, str | None], dict[str, Entry | None]]] = {
    Kind.FALLEN_OFF: _fallen_off,
    Kind.LINK_DOWN: _link_down,
    Kind.NARROW_LINK: _narrow_link,
    Kind.NUMA_UNKNOWN: _numa_unknown,
    Kind.NUMA_WRONG: _numa_wrong,
    Kind.VFIO_BOUND: _vfio_bound,
    Kind.NO_DRIVER: _no_driver,
    Kind.NETDEV_MOVED: _moved("net"),
    Kind.RDMA_MOVED: _moved("infiniband"),
}
