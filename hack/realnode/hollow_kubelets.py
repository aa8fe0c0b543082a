# SPDX-License-Identifier: Apache-2.0
"""The process that stands in for kubelet on all hollow nodes of a cluster: `python -m hack.realnode.hollow_kubelets CLUSTER`.

For each node it registers the plugin, keeps the node's Lease fresh (else the node lifecycle controller taints it after 40 s), and
lets go of pods that are being deleted, which kubelet does once their containers have ended. It is in the cluster's network.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import logging
import signal
import sys
from http import HTTPStatus
from typing import Final

from driver import bell
from driver.standin import kubelet
from hack.realnode import hollow, rest
from hack.realnode.layout import Layout

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
LEASE_EVERY: Final = 10
"""Polls between two renewals."""

LEASE_S: Final = 40
LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def main() -> None:
    """Until SIGTERM."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    layout = Layout(sys.argv[1])
    ended = bell.Bell()
    signal.signal(signal.SIGTERM, lambda *_: ended.ring())
    ended.wake_by_signals()
    with contextlib.ExitStack() as stack:
        running: set[str] = set()
        polls = 0
        while not ended.wait(0):
            names = {layout.hollow_name(node.number): node for node in hollow.nodes(layout)}
            for name in names.keys() - running:
                folder = layout.hollow_dir(names[name].number) / "kubelet"
                stack.enter_context(kubelet.StandInKubelet(folder))
            try:
                for name in names:
                    if name not in running or polls % LEASE_EVERY == 0:
                        _renew(layout, name)
                _let_go(layout, set(names))
            except (OSError, http.client.HTTPException, ValueError) as error:  # one that comes up answers in plain text
                logger.info("The API server does not answer: %s", error)
            running |= names.keys()
            polls += 1
            ended.wait(POLL_S)


def _renew(layout: Layout, name: str) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    status, answer = rest.call(layout, "PATCH", f"{LEASES}/{name}", lease, content_type="application/merge-patch+json")
    if status == HTTPStatus.NOT_FOUND:
        status, answer = rest.call(layout, "POST", LEASES, lease)
    if status not in {HTTPStatus.OK, HTTPStatus.CREATED}:
        logger.info("Lease %s: %s", name, answer.decode(errors="replace"))


def _let_go(layout: Layout, names: set[str]) -> None:
    _, answer = rest.call(layout, "GET", "/api/v1/pods")
    for pod in json.loads(answer).get("items", []):
        metadata = pod["metadata"]
        if pod["spec"].get("nodeName") in names and "deletionTimestamp" in metadata:
            rest.call(
                layout,
                "DELETE",
                f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}",
                {
                    "apiVersion": "v1",
                    "kind": "DeleteOptions",
                    "gracePeriodSeconds": 0,
                    "preconditions": {"uid": metadata["uid"]},
                },
            )


if __name__ == "__main__":
    main()
