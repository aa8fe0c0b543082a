# SPDX-License-Identifier: Apache-2.0
"""What serves kubelet, as one value for those who tell the API server and people about it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from discovery import child
from driver import config, inventory
from driver.app import following, late, room
from driver.kube import events
from driver.kubelet import server
from driver.observe.metrics import Metrics

if TYPE_CHECKING:
    from driver.prepare import keeping


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All of it is up and serving."""

    settings: config.Settings
    following: following.Following
    """The configuration in effect."""
    prober: child.Prober
    readings: inventory.Inventory
    claims: room.PrepareRoom
    keeper: keeping.Keeper
    kubelet: server.KubeletServer
    metrics: Metrics
    recorder: events.EventRecorder
    listeners: Mapping[str, socket.socket]
    health: late.LateHealth
    stop: threading.Event
    fail: Callable[[Exception], None]
    """Ends the agent because of an error that a person must mend."""
