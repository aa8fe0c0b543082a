# SPDX-License-Identifier: Apache-2.0
"""Which machine an agent replays: the one that --mock names, or the one that a label of its Node names.

The label is read once, at the start; with the answer the agent goes on as if --mock had said it. Until the API server
answers, everything else is up already: what was prepared before is answered from the record, and a new Prepare waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from discovery.mock import shelf
from driver import condition, config
from driver.errors import ApiError, ConfigError

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
RETRY_S = 2.0


class NodeReader(Protocol):
    """Where Nodes are read."""

    def get_node(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        """The Node. Raises ApiError."""


def choose(
    settings: config.Settings,
    *,
    nodes: NodeReader,
    stop: threading.Event,
    waiting: Callable[[str | None], None],
    retry_s: float = RETRY_S,
) -> str | None:
    """The machine to replay, None for real hardware or when `stop` came first.

    Whatever keeps the Node from being read may pass (a server that is away, rights that are just being given, a Node that
    kubelet has not registered): it is asked again, and `waiting` is told why, and None at the end. Raises ConfigError where
    the label names no machine, or where there is no label and no --mock.
    """
    if settings.mock_node_label is None:
        return settings.mock
    trouble = condition.Condition(logger, recovered=f"Node {settings.node_name} can be read")
    while not stop.is_set():
        try:
            node = nodes.get_node(settings.node_name, timeout_s=TIMEOUT_S)
        except ApiError as error:
            why = f"Which machine to replay says label {settings.mock_node_label} of the Node, which cannot be read: {error}"
            trouble.failed(why)
            waiting(why)
            stop.wait(retry_s)
            continue
        trouble.passed()
        waiting(None)
        return _of_node(node, settings)
    return None


def _of_node(node: Mapping[str, Any], settings: config.Settings) -> str:
    """What the Node's label says, or --mock where there is none. Raises ConfigError."""
    key = settings.mock_node_label
    metadata = node.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    value = labels.get(key) if isinstance(labels, Mapping) else None
    there = ", ".join(shelf.names())
    if value is None:
        if settings.mock is None:
            raise ConfigError(
                f"Node {settings.node_name} has no label {key} (--mock-node-label), and --mock is not given: label the Node"
                f" with one of {there}, or give --mock"
            )
        logger.info("Node %s has no label %s: replaying %s", settings.node_name, key, settings.mock)
        return settings.mock
    # A name only: what a label says must not choose among the files of the agent's container.
    if value not in shelf.names():
        raise ConfigError(
            f"Label {key}={value} of Node {settings.node_name} (--mock-node-label) names no machine: there are {there}"
        )
    logger.info("Replaying %s, as label %s of Node %s says", value, key, settings.node_name)
    return str(value)
