# SPDX-License-Identifier: Apache-2.0
"""What faces the API server and people: client, publisher, Events, pages. It comes up after kubelet is served, as its imports
and its credentials take longer than kubelet should wait.
"""

from __future__ import annotations

import logging
import threading

from driver import config
from driver.app import sharing, state
from driver.app.parts import Parts
from driver.errors import ConfigError, DriverError
from driver.kube import access, client
from driver.observe import http, pages
from driver.publish import aim, devices, publisher, wanted
from driver.version import VERSION

logger = logging.getLogger(__name__)

API_RETRY_S = 5.0
MEANS_S = 3.0
"""How long to wait for the first look at what keeps shares apart."""


class Outside:
    """`start` and `stop` once each, in that order; `notify` in between, from any thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._publishing = publisher.Publisher(
            driver_name=parts.settings.driver_name,
            node_name=parts.settings.node_name,
            wanted_now=self._wanted,
            may_write=parts.claims.leadership.leads,
            holders=parts.claims.record.held_devices,
            store=sharing.Remembered(parts.claims.record, saved=parts.claims.policies.published_anew),
            events=parts.recorder,
            observer=parts.metrics,
            listed=parts.kubelet.resend_health,
            waits=lambda: bool(parts.claims.policies.waiting),
            allow_coexistence=parts.settings.allow_coexistence,
        )
        self._state = state.AgentState(parts, self._publishing)
        self._servers: list[http.Server] = []
        self._connected = threading.Lock()
        self._loading = access.Loading()

    def start(self) -> None:
        """Serve pages, tell kubelet how the devices are, and connect. Raises ConfigError where a person has to act."""
        parts = self._parts
        parts.health.set(
            state.PublishedHealth(
                pool=parts.settings.node_name,
                hardware=parts.readings,
                publishing=self._publishing,
                observer=parts.metrics,
            )
        )
        parts.metrics.watch(self._state, sampled=parts.prober)
        self._serve_pages()
        threading.Thread(target=self._connect, name="api", daemon=True).start()

    def notify(self) -> None:
        """There are new hardware facts."""
        self._publishing.notify()

    def released(self) -> None:
        """A claim let go of its devices."""
        self._publishing.released()

    def stop(self) -> None:
        """End in reverse. What reads a kubeconfig has keys in files, and goes first."""
        self._loading.close()
        with self._connected:
            self._publishing.stop()
            self._parts.recorder.stop()
        for server in self._servers:
            server.stop()

    def _wanted(self, held: aim.Holders) -> wanted.Wanted:
        """What should be offered, from the newest Snapshot and the policies that hold now. Raises RecordError."""
        known = self._parts.readings.state()
        if known.snapshot is None:
            return wanted.from_snapshot(None, options=self._options(), why_not=known.error or "")
        self._parts.claims.means.wait(MEANS_S)
        shared = self._parts.claims.policies.look(known.snapshot, held=held)
        return wanted.from_snapshot(
            known.snapshot,
            options=self._options(),
            policies=shared.policies,
            ours=self._parts.claims.own.names(known.snapshot.taken_at),
            findings=shared.findings,
        )

    def _options(self) -> devices.PublishOptions:
        publish = self._parts.following.in_effect.publish
        return devices.PublishOptions(
            driver_name=self._parts.settings.driver_name,
            numa_list=publish.numa_node is config.NumaNodeForm.LIST,
            pcie_switches=publish.pcie_switches,
        )

    def _connect(self) -> None:
        """Get a client of the API server, however long that takes, and hand it to all who need one."""
        parts = self._parts
        while True:
            try:
                api = client.KubeClient.load(
                    parts.settings.kubeconfig, user_agent=f"nearfield/{VERSION}", loading=self._loading
                )
                break
            except ConfigError as error:
                parts.fail(error)
                return
            except DriverError as error:
                if parts.stop.is_set():
                    return
                self._state.api(f"The API server cannot be reached: {error}")
                logger.warning("The API server cannot be reached, trying again: %s", error)
            if parts.stop.wait(API_RETRY_S):
                return
        self._state.api(None)
        parts.claims.reader.set(api)
        with self._connected:
            if not parts.stop.is_set():
                parts.recorder.start(api)
                self._publishing.start(api)

    def _serve_pages(self) -> None:
        built = {
            "--http": (
                pages.agent_pages(self._parts.metrics, healthz=self._state.healthz, readyz=self._state.readyz),
                False,
            ),
            "--inspect": (pages.inspect_pages(view=self._state.view, snapshot=self._state.snapshot), True),
        }
        for option, listener in self._parts.listeners.items():
            content, loopback_only = built[option]
            server = http.Server(listener, content, name=option.strip("-"), loopback_only=loopback_only)
            server.start()
            self._servers.append(server)
            logger.info("Serving %s on port %d", option.strip("-"), server.port)
