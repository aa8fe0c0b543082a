# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: builds the parts, starts them in order, waits for the end, stops them in reverse.

What needs a person (an unusable kubeconfig, machine or port) ends it with exit status 2; what may pass is waited for while
it serves what it can.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping

from discovery import sysfs
from discovery.child import Prober
from discovery.errors import SourceError
from driver import config, inventory
from driver.app import hardware, late, reports, state
from driver.errors import ConfigError, DriverError
from driver.kube import client, events
from driver.kubelet import server
from driver.observe import listen
from driver.observe.metrics import Metrics
from driver.prepare import (
    cdi,
    cdidir,
    collector,
    devnodes,
    epoch,
    executor,
    files,
    index,
    locks,
    nodespec,
    rootfs,
    store,
)
from driver.publish import devices, publisher, wanted
from driver.version import VERSION

logger = logging.getLogger(__name__)

API_RETRY_S = 5.0


class Agent:
    """One agent. `run` once; `stop` from a signal handler or another thread."""

    def __init__(self, settings: config.Settings, agent_config: config.AgentConfig) -> None:
        self._settings = settings
        self._config = agent_config
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []

    def stop(self) -> None:
        """Begin to end."""
        self._stop.set()

    def run(self) -> int:
        """Serve until stopped; the exit status. Raises ConfigError or DriverError where it cannot go on."""
        with contextlib.ExitStack() as stack:
            self._build(stack)
            self._stop.wait()
            logger.info("Stopping")
        if self._failure is not None:
            raise self._failure
        return 0

    def _build(self, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        boot_id = _boot_id(settings)
        self._make_state_directory()
        metrics = Metrics(pool=settings.node_name)
        recorder = events.EventRecorder(component=settings.driver_name, host=settings.node_name, observer=metrics)
        told = reports.Reports(metrics, recorder)
        listeners = {
            option: listen.bind(address, option=option)
            for option, address in (("--http", settings.http), ("--inspect", settings.inspect))
            if address is not None
        }
        for listener in listeners.values():
            stack.callback(listener.close)

        prober = hardware.prober(settings, rails=self._config.topology.rails)
        stack.callback(prober.close)
        readings = inventory.Inventory(prober, interval_s=settings.probe_interval_s, observer=metrics)
        stack.callback(readings.stop)
        self._spawn("hardware", lambda: self._read_hardware(readings))

        dialect = cdi.Dialect(driver=settings.driver_name, mock=settings.mock is not None)
        node = executor.Node(dialect=dialect, pool=settings.node_name, boot_id=boot_id)
        directory = cdidir.CdiDirectory(settings.cdi_dir, dialect=dialect)
        record = store.Store(
            settings.state_dir,
            boot_id=boot_id,
            salvage=lambda: directory.entries(boot_id=boot_id),
            reports=told,
        )
        stack.callback(record.close)
        leadership = epoch.Epoch(settings.state_dir)
        stack.callback(leadership.close)
        claim_locks = locks.Locks(settings.state_dir, stop=self._stop)
        nodes = devnodes.DeviceNodes(hardware.source(settings).dev, mock=settings.mock is not None)
        node_spec = nodespec.NodeSpec(
            directory,
            dialect=dialect,
            root=rootfs.DriverRoot(settings.driver_root, mount=settings.driver_root_mount),
            nodes=nodes,
            node_locks=claim_locks,
            driver_version=lambda: _driver_version(readings),
        )
        claim_reader = late.LateClaimReader()
        answers = executor.Executor(
            node,
            record=record,
            directory=directory,
            node_spec=node_spec,
            nodes=nodes,
            claim_locks=claim_locks,
            reader=claim_reader,
            index=index.InventoryIndex(readings.state),
            reports=told,
            stop=self._stop,
        )
        care = collector.Collector(
            node,
            record=record,
            directory=directory,
            node_spec=node_spec,
            claim_locks=claim_locks,
            reader=claim_reader,
            unpreparer=answers,
            leadership=leadership,
            reports=told,
            stop=self._stop,
            interval_s=settings.collect_interval_s,
        )
        publishing = publisher.Publisher(
            driver_name=settings.driver_name,
            node_name=settings.node_name,
            wanted_now=lambda: self._wanted(readings),
            may_write=leadership.leads,
            holders=record.held_devices,
            store=record,
            events=recorder,
            observer=metrics,
            allow_coexistence=settings.allow_coexistence,
        )
        agent_state = state.AgentState(
            node_name=settings.node_name,
            hardware=readings,
            record=record,
            node_spec=node_spec,
            publishing=publishing,
        )

        record.open()
        leadership.take(record)
        care.reconcile()
        kubelet = server.KubeletServer(
            driver_name=settings.driver_name,
            registry_dir=settings.registry_dir,
            plugin_dir=settings.plugin_dir,
            pod_uid=settings.pod_uid,
            preparer=answers,
            health=state.PublishedHealth(
                pool=settings.node_name, hardware=readings, publishing=publishing, observer=metrics
            ),
            observer=metrics,
        )
        kubelet.start()
        stack.callback(kubelet.stop)
        stack.callback(agent_state.stopping.set)
        agent_state.serve(kubelet)
        kubelet.registration()
        stack.callback(publishing.stop)
        stack.callback(recorder.stop)
        self._spawn("collector", care.run)
        self._spawn("api", lambda: self._connect(agent_state, recorder, claim_reader, publishing))
        self._spawn("watcher", lambda: self._wake(readings, answers, publishing))
        stack.callback(self._serve_http(listeners, metrics, agent_state, prober))

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except ConfigError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("Thread %s ended", name)
                self._fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, error: Exception) -> None:
        """End the agent because of an error that a person must mend, or of a defect; kubelet starts it again."""
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def _read_hardware(self, readings: inventory.Inventory) -> None:
        """Begin to look at the hardware; a mock machine is rendered before."""
        hardware.render(self._settings)
        if not self._stop.is_set():
            readings.start()

    def _wanted(self, readings: inventory.Inventory) -> wanted.Wanted:
        """What should be offered, from the newest Snapshot."""
        known = readings.state()
        options = devices.PublishOptions(
            driver_name=self._settings.driver_name,
            numa_list=self._config.publish.numa_node is config.NumaNodeForm.LIST,
            pcie_switches=self._config.publish.pcie_switches,
        )
        return wanted.from_snapshot(known.snapshot, options=options, why_not=known.error or "")

    def _connect(
        self,
        agent_state: state.AgentState,
        recorder: events.EventRecorder,
        claim_reader: late.LateClaimReader,
        publishing: publisher.Publisher,
    ) -> None:
        """Get a client of the API server, however long that takes, and hand it to all who need one."""
        while True:
            try:
                api = client.KubeClient.load(self._settings.kubeconfig, user_agent=f"nearfield/{VERSION}")
                break
            except DriverError as error:
                if isinstance(error, ConfigError):
                    raise
                agent_state.api(f"The API server cannot be reached: {error}")
                logger.warning("The API server cannot be reached, trying again: %s", error)
            if self._stop.wait(API_RETRY_S):
                return
        agent_state.api(None)
        claim_reader.set(api)
        recorder.start(api)
        publishing.start(api)

    def _wake(self, readings: inventory.Inventory, answers: executor.Executor, publishing: publisher.Publisher) -> None:
        """Tell those who wait for hardware facts whenever there are new ones."""
        seen = 0
        while not self._stop.is_set():
            changes = readings.wait(seen, 3600)
            if changes != seen:
                seen = changes
                answers.wake()
                publishing.notify()

    def _serve_http(
        self,
        listeners: Mapping[str, socket.socket],
        metrics: Metrics,
        agent_state: state.AgentState,
        prober: Prober,
    ) -> Callable[[], None]:
        """Serve pages on the listeners that were asked for; what stops that again."""
        from driver.observe import http, pages  # noqa: PLC0415 - heavy, and nobody looks before the sockets serve

        metrics.watch(agent_state, sampled=prober)
        built = {
            "--http": (pages.agent_pages(metrics, healthz=agent_state.healthz, readyz=agent_state.readyz), False),
            "--inspect": (pages.inspect_pages(view=agent_state.view, snapshot=agent_state.snapshot), True),
        }
        servers = [
            http.Server(listener, built[option][0], name=option.strip("-"), loopback_only=built[option][1])
            for option, listener in listeners.items()
        ]
        for option, serving in zip(listeners, servers, strict=True):
            serving.start()
            logger.info("Serving %s on port %d", option.strip("-"), serving.port)

        def stop() -> None:
            for serving in servers:
                serving.stop()

        return stop

    def _make_state_directory(self) -> None:
        try:
            files.make_private_directory(self._settings.state_dir)
        except OSError as error:
            raise ConfigError(f"--state-dir {self._settings.state_dir}: {error.strerror}") from error


def _boot_id(settings: config.Settings) -> str:
    """The kernel's boot id: what was prepared under another one has to be prepared again. Raises DriverError."""
    try:
        boot_id = sysfs.Sysfs(sys=settings.sysfs, proc=settings.procfs).boot_id()
    except SourceError as error:
        raise DriverError(f"The boot id cannot be read: {error}") from error
    if boot_id is None:
        raise DriverError(f"There is no boot id below {settings.procfs} (sys/kernel/random/boot_id): is it a procfs?")
    return boot_id


def _driver_version(readings: inventory.Inventory) -> str | None:
    """The version of the loaded NVIDIA driver as it was last read."""
    snapshot = readings.snapshot()
    return None if snapshot is None or snapshot.nvidia_driver is None else snapshot.nvidia_driver.version
