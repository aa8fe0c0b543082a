# SPDX-License-Identifier: Apache-2.0
"""Capturing a machine and replaying it gives what the live machine gives, redacted the same way.

- on this very machine, whatever it is
- on every machine of the zoo, healthy and with faults
- a capture takes everything that the prober reads
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from discovery import codec, model, options, probe, sysfs
from discovery.address import parse
from discovery.mock import capture, fault, faults, library, recording, redact, render, zoo
from discovery.mock.fault import Fault, Kind
from tests.fakes import mockmachine


class Noting(sysfs.Sysfs):
    """Notes what was there and was read."""

    def __init__(self, *, sys: Path, proc: Path) -> None:
        super().__init__(sys=sys, proc=proc)
        self.seen: set[str] = set()

    def read(self, path: str, *, limit: int = sysfs.MAX_FILE_BYTES) -> bytes | None:
        content = super().read(path, limit=limit)
        self.seen |= set() if content is None else {path}
        return content

    def link(self, path: str) -> str | None:
        target = super().link(path)
        self.seen |= set() if target is None else {path}
        return target


def _look(files: sysfs.Sysfs, *, dev: Path, given: object | None) -> model.Snapshot:
    machine = probe.Machine(
        files=files,
        dev=dev,
        library=given,
        origin=model.Origin.RECORDING,
        options=options.ProbeOptions(),
        clock=lambda: 0.0,
    )
    try:
        return machine.probe()
    finally:
        machine.close()


def _look_at(tree: render.MockTree) -> model.Snapshot:
    return _look(sysfs.Sysfs(sys=tree.sys, proc=tree.proc), dev=tree.dev, given=library.Library(tree.directory))


def _assert_replay_is_alike(
    tmp_path: Path, *, sys: Path, proc: Path, dev: Path, given: object | None
) -> model.Snapshot:
    redaction = redact.Redaction()
    captured = capture.capture(sys=sys, proc=proc, dev=dev, library=given, redaction=redaction)
    live = _look(sysfs.Sysfs(sys=sys, proc=proc), dev=dev, given=given)
    file = tmp_path / "captured.json.gz"
    file.write_bytes(gzip.compress(recording.dump(captured)))
    tree = render.render(zoo.load(str(file)), tmp_path / "replayed")
    replayed = _look_at(tree)
    expected = codec.from_json(json.loads(redaction.text(json.dumps(codec.to_json(live)))))
    called = redaction.interfaces
    assert replayed == dataclasses.replace(
        expected,
        nics=tuple(
            dataclasses.replace(nic, interfaces=tuple(_renamed(own, called) for own in nic.interfaces))
            for nic in expected.nics
        ),
    )
    return replayed


def _renamed(interface: model.NetworkInterface, called: Mapping[str, str]) -> model.NetworkInterface:
    return dataclasses.replace(
        interface,
        master=None if interface.master is None else called[interface.master],
        vlans=tuple(sorted(called[vlan] for vlan in interface.vlans)),
    )


def test_this_machine(tmp_path: Path) -> None:
    seen = _assert_replay_is_alike(tmp_path, sys=Path("/sys"), proc=Path("/proc"), dev=Path("/dev"), given=None)
    assert seen.host.online_cpus


@pytest.fixture(scope="module", params=zoo.names())
def zoo_tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> render.MockTree:
    """A machine of the zoo on disk; nobody changes it."""
    return render.render(zoo.load(request.param), tmp_path_factory.mktemp(request.param))


def test_a_machine_of_the_zoo(zoo_tree: render.MockTree, tmp_path: Path) -> None:
    tree = zoo_tree
    given = library.Library(tree.directory)
    seen = _assert_replay_is_alike(tmp_path, sys=tree.sys, proc=tree.proc, dev=tree.dev, given=given)
    assert any(gpu.state is model.GpuState.READY for gpu in seen.gpus)


@pytest.mark.parametrize(
    "broken",
    [
        Fault(kind=Kind.GPU_LOST, target=mockmachine.GPU0),
        Fault(kind=Kind.FALLEN_OFF, target=mockmachine.GPU1),
        Fault(kind=Kind.VFIO_BOUND, target=mockmachine.GPU0),
        Fault(kind=Kind.NO_DRIVER),
        Fault(kind=Kind.NO_DRIVER, target=mockmachine.GPU1),
        Fault(kind=Kind.NUMA_UNKNOWN),
        Fault(kind=Kind.LINK_DOWN, target=mockmachine.NIC),
        Fault(kind=Kind.LINK_DOWN, target=mockmachine.GPU0, link=0),
        Fault(kind=Kind.NARROW_LINK, target=mockmachine.GPU1, width=2),
        Fault(kind=Kind.NVML_ERROR, target=mockmachine.GPU0, function="nvmlDeviceGetNumGpuCores", error=999),
        Fault(kind=Kind.NVML_ERROR, target=mockmachine.GPU0, function="nvmlDeviceGetUUID", error=999),
        Fault(kind=Kind.NVML_ERROR, function="nvmlInitWithFlags", error=18),
    ],
    ids=lambda item: f"{item.kind}-{item.target}-{item.function}",
)
def test_a_machine_with_a_fault(broken: fault.Fault, tmp_path: Path) -> None:
    tree = mockmachine.rendered(tmp_path / "machine")
    faults.apply(tree.directory, [broken])
    given = library.Library(tree.directory)
    seen = _assert_replay_is_alike(tmp_path, sys=tree.sys, proc=tree.proc, dev=tree.dev, given=given)
    healthy = mockmachine.rendered(tmp_path / "healthy")
    assert seen != _look_at(healthy)


def test_a_machine_with_a_bond_keeps_what_stands_on_what(tmp_path: Path) -> None:
    nics = "{nic: connectx-7-200g-dual, functions: [{interface: eno1}, {interface: eno2}]}, {nic: connectx-7-400g-ib}"
    network = (
        "network: {bonds: [{name: secret, of: [eno1, eno2]}], vlans: [{name: secret.7, on: secret, id: 7}], "
        "bridges: [{name: acme-lan, of: [secret.7]}, {name: empty, of: []}], defaultRoute: acme-lan}"
    )
    changes = (("{nic: connectx-7-400g-ib}", nics), ("nvlink: ", f"{network}\nnvlink: "))
    tree = mockmachine.rendered(tmp_path / "machine", *changes)
    given = library.Library(tree.directory)
    seen = _assert_replay_is_alike(tmp_path, sys=tree.sys, proc=tree.proc, dev=tree.dev, given=given)
    assert [nic.management for nic in seen.nics] == [True, True, False]
    assert {own.master for nic in seen.nics for own in nic.interfaces} == {"made0", None}


def test_where_the_carrier_of_the_route_is_hidden_it_stays_so(tmp_path: Path) -> None:
    network = "network: {bridges: [{name: acme-lan, of: []}], defaultRoute: acme-lan}"
    tree = mockmachine.rendered(tmp_path / "machine", ("nvlink: ", f"{network}\nnvlink: "))
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.Library(tree.directory))
    seen = _look_at(render.render(captured, tmp_path / "replayed"))
    assert {nic.management for nic in seen.nics} == {None}
    (said,) = (finding.message for finding in seen.findings if finding.code == "default-route-unknown")
    assert "it leaves by made0" in said


def test_a_capture_takes_everything_that_the_prober_reads(zoo_tree: render.MockTree) -> None:
    tree = zoo_tree
    files = Noting(sys=tree.sys, proc=tree.proc)
    _look(files, dev=tree.dev, given=library.Library(tree.directory))
    taken = recording.Tree(capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev).files)
    followed = {path: taken.resolve(path.rpartition("/")[0]) for path in files.seen}
    missing = {
        path
        for path in files.seen - taken.files.keys()
        if f"{followed[path]}/{path.rpartition('/')[2]}" not in taken.files and not path.startswith("sys/class/net/lo")
    }
    assert missing == set()


def test_a_capture_is_no_description_of_this_machine_to_act_upon(tmp_path: Path) -> None:
    """Whoever captured a node can take its GPUs away in the replay, without touching the node."""
    tree = mockmachine.rendered(tmp_path / "machine")
    captured = capture.capture(sys=tree.sys, proc=tree.proc, dev=tree.dev, library=library.Library(tree.directory))
    replayed = render.render(captured, tmp_path / "replayed")
    faults.apply(replayed.directory, [Fault(kind=Kind.FALLEN_OFF, target=parse(str(mockmachine.GPU0)))])
    assert (tree.sys / "bus/pci/devices" / str(mockmachine.GPU0)).exists()
    assert not (replayed.sys / "bus/pci/devices" / str(mockmachine.GPU0)).exists()
