# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: builds the parts, starts them in order, waits for the end, stops them in reverse.

What needs a person (an unusable kubeconfig, machine or port) ends it with exit status 2; what may pass is waited for while
it serves what it can.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from discovery import child, sysfs
from discovery.errors import SourceError
from driver import bell, changes, config, inventory
from driver.app import following, hardware, late, machine, parts, reports, room
from driver.errors import ConfigError, DriverError
from driver.kube import events
from driver.kubelet import server
from driver.observe import listen
from driver.observe.metrics import Metrics
from driver.prepare import executor, files

if TYPE_CHECKING:
    from pathlib import Path

    from driver.app import outside
    from driver.prepare import keeping

logger = logging.getLogger(__name__)

_ANSWERED_S = 0.5
"""How long an answer may take to reach kubelet, which drops it if the sockets are gone before."""

_LOOK_S = 0.02


class Agent:
    """One agent. `run` once; `stop` from a signal handler or another thread."""

    def __init__(
        self,
        settings: config.Settings,
        agent_config: config.AgentConfig,
        prober: child.ProbeChild,
        *,
        load: Callable[[Path], config.AgentConfig],
        ending: Callable[[Exception | None], None] = lambda _: None,
    ) -> None:
        """`prober` looks at the machine of the settings; it is closed at the end. `load` reads a configuration file. `ending` is
        called when the end begins, with the error that is the reason.
        """
        self._settings = settings
        self._config = agent_config
        self._prober = prober
        self._ending = ending
        self.ended = bell.Bell()
        """Somebody wants the end; calls under way may finish first."""
        self._stop = threading.Event()
        """It ends now."""
        self._patience_s = 0.0
        self._answers: executor.Executor | None = None
        self._keeper: keeping.Keeper | None = None
        self._failure: Exception | None = None
        self._load = load
        self._following: following.Following | None = None
        self._expecting = False
        """Whether a worker was started for what the policies may ask of it."""
        self._outside: outside.Outside | None = None
        self._outside_lock = threading.Lock()

    def stop(self, *, patience_s: float = 0.0) -> float:
        """Begin to end, at once or, if a Prepare is under way, when it is answered or after `patience_s`: a Prepare that fails
        costs its pod over a minute. Gives the patience that was granted.
        """
        self._patience_s = patience_s if self._answers is not None and self._answers.preparing() else 0.0
        if not self._patience_s:
            self._end()
        self.ended.ring()
        return self._patience_s

    def reload(self) -> None:
        """Read the configuration file again, as SIGHUP asks."""
        if self._following is not None:
            self._following.again()

    def _end(self) -> None:
        self._stop.set()
        if self._answers is not None:
            self._answers.wake()

    def run(self) -> None:
        """Serve until stopped. Raises ConfigError or DriverError where it cannot begin; `ending` has what ended it later."""
        with contextlib.ExitStack() as stack:
            self._build(stack)
            self.ended.wait()
            if self._answers is not None and not self._stop.is_set():
                logger.info(
                    "Stopping, when the claims that wait are prepared, in %.0f s at the latest", self._patience_s
                )
                self._answers.finish(self._patience_s)
                self._pause(_ANSWERED_S)
            self._ending(self._failure)
            self._stop.set()
            logger.info("Stopping")

    def _pause(self, seconds: float) -> None:
        """Wait so long, or until it ends at once. Not by the event's own wait, as a signal handler sets it: see driver.bell."""
        end = time.monotonic() + seconds
        while not self._stop.is_set() and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def _build(self, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        boot_id = _boot_id(settings)
        self._make_state_directory()
        metrics = Metrics(pool=settings.node_name)
        recorder = events.EventRecorder(component=settings.driver_name, host=settings.node_name, observer=metrics)
        told = reports.Reports(metrics, recorder, released=self._released, changed=self._shares_changed)
        listeners = {
            option: listen.bind(address, option=option)
            for option, address in (("--http", settings.http), ("--inspect", settings.inspect))
            if address is not None
        }
        for listener in listeners.values():
            stack.callback(listener.close)

        stack.callback(self._prober.close)
        readings = inventory.Inventory(self._prober, interval_s=settings.probe_interval_s, observer=metrics)
        stack.callback(readings.stop)
        hints = changes.Changes(lambda: hardware.listen(settings), stir=readings.stir, observer=metrics)
        stack.callback(hints.stop)

        claims = room.build(
            settings,
            given=self._config.sharing,
            boot_id=boot_id,
            readings=readings,
            told=told,
            stop=self._stop,
            stack=stack,
        )
        configuration = following.Following(
            settings.config,
            running=self._config,
            load=self._load,
            changed=lambda: self._reconfigured(configuration.in_effect, readings, claims),
            refused=lambda message: recorder.node(reason="ConfigRefused", message=message),
        )
        self._following = configuration
        self._spawn("hardware", lambda: self._read_hardware(readings, hints, claims.reader))
        claims.open()
        health = late.LateHealth()
        kubelet = server.KubeletServer(
            driver_name=settings.driver_name,
            registry_dir=settings.registry_dir,
            plugin_dir=settings.plugin_dir,
            pod_uid=settings.pod_uid,
            preparer=claims.executor,
            health=health,
            observer=metrics,
        )
        if self._stop.is_set():
            return
        # Kubelet hears of the end first: what faces the API server may hang in it.
        stack.callback(self._stop_outside)
        kubelet.start()
        stack.callback(kubelet.stop)
        stack.callback(claims.executor.wake)
        kubelet.registration()
        self._answers = claims.executor
        configuration.start()
        stack.callback(configuration.stop)
        self._spawn("collector", claims.collector.run)
        self._spawn("releasing", lambda: claims.releaser.run(lambda: self._put_back(claims.executor)))
        keeper = self._keeper = claims.make_keeper()
        self._spawn("keeper", keeper.run)
        stack.callback(keeper.wake)
        self._spawn("watcher", lambda: self._wake(readings, claims))
        self._spawn("means", lambda: claims.means.run(self._stop, changed=lambda: self._able(readings, claims)))
        built = parts.Parts(
            settings=settings,
            following=configuration,
            prober=self._prober,
            readings=readings,
            claims=claims,
            keeper=keeper,
            kubelet=kubelet,
            metrics=metrics,
            recorder=recorder,
            listeners=listeners,
            health=health,
            stop=self._stop,
            fail=self._fail,
        )
        self._spawn("outside", lambda: self._start_outside(built))

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except DriverError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("Thread %s ended", name)
                self._fail(error)

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _fail(self, error: Exception) -> None:
        """End the agent because of an error that a person or a new start must mend, or of a defect; kubelet starts it again."""
        if self._failure is None:
            self._failure = error
        self._end()
        self.ended.ring()

    def _read_hardware(self, readings: inventory.Inventory, hints: changes.Changes, nodes: machine.NodeReader) -> None:
        """Begin to look at the hardware, and to listen to its changes; a mock machine is rendered before."""
        mock = machine.choose(self._settings, nodes=nodes, stop=self._stop, waiting=readings.hold_up)
        if mock is not None:
            hardware.render(self._settings, mock)
        if not self._stop.is_set():
            hints.start()
            readings.start()

    def _start_outside(self, built: parts.Parts) -> None:
        """What faces the API server and people: imported only now that kubelet is served."""
        from driver.app import outside  # noqa: PLC0415

        with self._outside_lock:
            if not self._stop.is_set():
                self._outside = outside.Outside(built)
                self._outside.start()

    def _stop_outside(self) -> None:
        with self._outside_lock:
            if self._outside is not None:
                self._outside.stop()

    def _wake(self, readings: inventory.Inventory, claims: room.PrepareRoom) -> None:
        """Tell those who wait for hardware facts whenever there are new ones."""
        seen = 0
        while not self._stop.is_set():
            now = readings.wait(seen, 3600)
            if now != seen:
                seen = now
                claims.executor.wake()
                self._notify()
                self._expect_work(readings, claims)

    def _notify(self) -> None:
        """What should be published may have changed with the hardware."""
        if self._outside is not None:
            self._outside.notify()

    def _reconfigured(self, now: config.AgentConfig, readings: inventory.Inventory, claims: room.PrepareRoom) -> None:
        """The configuration in effect is another."""
        claims.policies.set_rules(now.sharing)
        self._notify()
        self._expect_work(readings, claims)

    def _able(self, readings: inventory.Inventory, claims: room.PrepareRoom) -> None:
        """What keeps shares apart on this node has come or gone."""
        claims.policies.abilities_changed()
        self._notify()
        self._expect_work(readings, claims)

    def _expect_work(self, readings: inventory.Inventory, claims: room.PrepareRoom) -> None:
        self._expecting = self._expecting or claims.expect_work(readings.snapshot())

    def _released(self) -> None:
        """Perhaps nobody holds a device any more that is gone."""
        if self._outside is not None:
            self._outside.released()

    def _shares_changed(self) -> None:
        """Perhaps a share has come or gone."""
        if self._keeper is not None:
            self._keeper.wake()

    def _put_back(self, answers: executor.Executor) -> None:
        """A claim that kubelet was told is gone let go of its devices at last."""
        answers.wake()
        self._released()

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
