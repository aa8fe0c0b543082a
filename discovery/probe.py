# SPDX-License-Identifier: Apache-2.0
"""One look at the machine: the phases identity, locality, links, annotate, check, from which a Snapshot comes.

A later phase annotates what an earlier one found and never adds to it: sysfs says which GPUs there are, NVML says what
they are. Whatever fails on the way costs that fact and is a Finding; only a root that is no directory ends a probe.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from discovery import (
    aligned,
    cgroups,
    check,
    datadirect,
    endpoints,
    errors,
    findings,
    gpus,
    host,
    links,
    locality,
    model,
    network,
    nics,
    nvlink,
    nvml,
    overlaid,
    pci,
    peering,
    sysfs,
    system,
    topology,
    upward,
)
from discovery.address import PciAddress
from discovery.options import ProbeOptions


class Machine:
    """One machine that is looked at again and again. For one thread at a time.

    `keep_session`: leave NVML's session open between looks where closing it would put GPUs to sleep.
    """

    def __init__(
        self,
        *,
        files: sysfs.Sysfs,
        dev: Path,
        library: object | None,
        origin: model.Origin,
        options: ProbeOptions,
        clock: Callable[[], float],
        driver_root: Path = Path("/"),
        keep_session: bool = False,
    ) -> None:
        self._files = files
        self._dev = dev
        self._origin = origin
        self._options = options
        self._clock = clock
        self._nvml = nvml.Nvml(library, driver_root=driver_root)
        self._keep_session = keep_session
        self._bound: tuple[PciAddress, ...] | None = None
        self.outlived = False
        """Whether the NVIDIA driver was replaced under the library that this process loaded: only a new process helps."""

    def close(self) -> None:
        """End the session with NVML, if one was kept."""
        self._nvml.close()

    def probe(self) -> model.Snapshot:
        """A full look. Raises ProbeError when a root is not readable at all."""
        self._files.check_roots()
        began = self._clock()
        self._nvml.close()  # a new session sees GPUs that came back
        found = findings.Findings()
        rdma = endpoints.class_devices(self._files, endpoints.RDMA, found)
        functions = pci.functions(self._files, rdma, found)
        machine = self._host(found)
        located, bridges = self._locate(functions, machine, found)
        if not located[pci.Kind.GPU]:
            found.info("no-gpu", "node", "there is no NVIDIA GPU on this node")
        driver, gpu_list = self._read_gpus(located[pci.Kind.GPU], located[pci.Kind.NVSWITCH], found)
        vpds = datadirect.read(self._files, functions, located[pci.Kind.NIC], found)
        nic_list, nvme_list = self._read_endpoints(located, rdma, found)
        system.note_gpu_direct(machine.gpu_direct, located[pci.Kind.GPU], nic_list, found)
        if vpds is not None:
            nic_list = datadirect.paired(located[pci.Kind.DATA_DIRECT], nic_list, vpds, found)
        snapshot = model.Snapshot(
            origin=self._origin,
            taken_at=began,
            host=machine,
            nvidia_driver=driver,
            numa_nodes=system.numa_nodes(self._files, found),
            bridges=bridges,
            gpus=gpu_list,
            nvswitches=located[pci.Kind.NVSWITCH],
            nics=nic_list,
            nvmes=nvme_list,
        )
        snapshot = annotate(snapshot, self._options, found)
        for violation in check.violations(snapshot):
            found.error("contradiction", "node", violation)
        return replace(snapshot, findings=found.result())

    def rescan(self) -> model.Rescan:
        """A cheap look at identity and state. Raises ProbeError as `probe` does."""
        self._files.check_roots()
        found = findings.Findings()
        rdma = endpoints.class_devices(self._files, endpoints.RDMA, found)
        functions = pci.functions(self._files, rdma, found)
        drivers = {function.address: self._driver(function, found) for function in functions}
        self._bound = _bound((at.address, drivers[at.address]) for at in functions if at.kind is pci.Kind.GPU)
        with self._session(found) as reader:
            readings = tuple(
                reader.reading(function.address, drivers[function.address])
                for function in functions
                if function.kind is pci.Kind.GPU
            )
        lines = [f"{at.address} {at.kind.value} {at.path} {drivers[at.address]}" for at in functions]
        lines += [
            f"{reading.address} {reading.state} {reading.uuid} {reading.fabric} {reading.mig}" for reading in readings
        ]
        lines.append(f"driver {system.nvidia_module_version(self._files, found)}")
        text = "\n".join(lines).encode()
        net = endpoints.class_devices(self._files, "net", found)
        return model.Rescan(
            gpus=readings,
            fingerprint=f"{len(text):x}-{zlib.crc32(text):08x}",
            nics=tuple(
                model.NicReading(
                    address=function.address,
                    rdma=next((device.name for device in rdma.get(function.address, ())), None),
                    interface=next((device.name for device in net.get(function.address, ())), None),
                )
                for function in functions
                if function.kind is pci.Kind.NIC
            ),
        )

    def sample(self) -> tuple[model.GpuSample, ...]:
        """How busy the GPUs are that answer, in the order of their addresses."""
        if self._bound is None:
            self.rescan()
        samples = []
        with self._session(findings.Findings()) as reader:
            for where in self._bound or ():
                with contextlib.suppress(errors.SourceError):  # whether a GPU answers is what `rescan` is for
                    samples.append(reader.sample(where))
        return tuple(samples)

    def _host(self, found: findings.Findings) -> model.Host:
        return replace(
            system.host(self._files, self._memory(found), found),
            cgroup=cgroups.version(self._files, found),
            memory_accounting=cgroups.accounting(self._files, system.nvidia_module_version(self._files, found), found),
        )

    def _locate(
        self, functions: Sequence[pci.Function], machine: model.Host, found: findings.Findings
    ) -> tuple[Mapping[pci.Kind, tuple[model.PciFunction, ...]], tuple[model.Bridge, ...]]:
        """The functions with their place in the machine, by kind, and all bridges above them."""
        locator = pci.Locator(self._files, found)
        described = [(function.kind, locator.describe(function)) for function in functions]
        bridges = locator.bridges()
        ways = upward.Ways(bridges)
        sockets: dict[tuple[int, ...] | None, int | None] = {}
        located: dict[pci.Kind, list[model.PciFunction]] = {kind: [] for kind in pci.Kind}
        for kind, function in described:
            if function is None:
                continue
            if function.cpus not in sockets:
                sockets[function.cpus] = topology.socket_of(function.cpus, machine.sockets)
            located[kind].append(
                replace(
                    ways.placed(function),
                    cpu_socket=sockets[function.cpus],
                    narrowest=ways.narrowest(function),
                )
            )
        return {kind: tuple(members) for kind, members in located.items()}, bridges

    def _read_gpus(
        self,
        functions: Sequence[model.PciFunction],
        nvswitches: Sequence[model.PciFunction],
        found: findings.Findings,
    ) -> tuple[model.NvidiaDriver | None, tuple[model.Gpu, ...]]:
        module = system.nvidia_module_version(self._files, found)
        self._bound = _bound((function.address, function.driver) for function in functions)
        ends = {switch.address: model.RemoteKind.SWITCH for switch in nvswitches}
        ends |= {function.address: model.RemoteKind.GPU for function in functions}
        with self._session(found, ends) as reader:
            driver = reader.driver(module)
            gpu_list = tuple(reader.read(function) for function in functions)
            reader.look_for_strangers({function.address for function in functions})
        return driver, gpu_list

    def _read_endpoints(
        self,
        located: Mapping[pci.Kind, tuple[model.PciFunction, ...]],
        rdma: endpoints.ClassDevices,
        found: findings.Findings,
    ) -> tuple[tuple[model.Nic, ...], tuple[model.Nvme, ...]]:
        net = endpoints.class_devices(self._files, "net", found)
        nvme = endpoints.class_devices(self._files, "nvme", found)
        stack = network.Stack(self._files, found)
        nic_list = tuple(
            model.Nic(
                pci=function,
                interfaces=tuple(endpoints.interface(each, stack) for each in net.get(function.address, ())),
                rdma_devices=tuple(map(endpoints.rdma_device, rdma.get(function.address, ()))),
            )
            for function in located[pci.Kind.NIC]
        )
        return (
            network.with_management(nic_list, stack, self._files, found),
            tuple(
                model.Nvme(pci=function, controllers=tuple(device.name for device in nvme.get(function.address, ())))
                for function in located[pci.Kind.NVME]
            ),
        )

    @contextlib.contextmanager
    def _session(
        self, found: findings.Findings, functions: nvml.Functions = MappingProxyType({})
    ) -> Iterator[gpus.GpuReader]:
        """A reader of GPUs over a session with NVML, if any GPU is bound to NVIDIA's driver. No session is a Finding."""
        refused = None
        if self._bound:
            try:
                self._nvml.open()
            except errors.SourceError as err:
                refused = err
                found.failed("nvml", err)
        reader = gpus.GpuReader(self._files, self._nvml, refused, dev=self._dev, found=found, functions=functions)
        try:
            yield reader
        finally:
            self.outlived = self.outlived or reader.outlived
            if not (self._keep_session and reader.keeps_gpus_awake()):
                self._nvml.close()

    def _driver(self, function: pci.Function, found: findings.Findings) -> str | None:
        return sysfs.Directory(self._files, function.path, subject=function.address, found=found).link_name("driver")

    def _memory(self, found: findings.Findings) -> int | None:
        try:
            return host.memory_bytes(self._files.proc)
        except errors.SourceError as err:
            found.failed("host", err)
            return None


def annotate(snapshot: model.Snapshot, options: ProbeOptions, found: findings.Findings) -> model.Snapshot:
    """A Snapshot with everything that follows from what was read and from the overlay: groups, NIC pairing, rails. Pure."""
    applied = overlaid.apply(snapshot, options.overlay, found)
    snapshot = applied.snapshot
    locality.note_unknown(snapshot, found)
    locality.note_alike(snapshot, found)
    ports = topology.port_types(snapshot.bridges)
    wiring = nvlink.wiring(snapshot.gpus, found)
    groups = aligned.groups(snapshot.gpus, wiring, found)
    pairings = nics.pair(snapshot.gpus, snapshot.nics, ports, {**applied.rails, **options.rails}, found)
    ways = upward.Ways(snapshot.bridges)
    paired = peering.with_direct(pairings.gpus, snapshot, ways.bridges)
    gpu_list = tuple(replace(gpu, groups=groups[gpu.address], nic=paired.get(gpu.address)) for gpu in snapshot.gpus)
    links.note_degraded(check.functions(snapshot), ways, found)
    links.note_nvlinks_down(snapshot.gpus, found)
    peering.note_redirected(gpu_list, snapshot.nics, ways.bridges, found)
    return replace(snapshot, gpus=gpu_list, nics=nics.with_rails(snapshot.nics, pairings))


def probe(
    *,
    sysfs: sysfs.Sysfs,
    dev: Path,
    library: object | None,
    origin: model.Origin,
    options: ProbeOptions,
    clock: Callable[[], float],
) -> model.Snapshot:
    """One full look; see `Machine.probe`."""
    return Machine(files=sysfs, dev=dev, library=library, origin=origin, options=options, clock=clock).probe()


def _bound(drivers: Iterable[tuple[PciAddress, str | None]]) -> tuple[PciAddress, ...]:
    """The GPUs that NVIDIA's driver has."""
    return tuple(where for where, driver in drivers if driver == gpus.NVIDIA_DRIVER)
