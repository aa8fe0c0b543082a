# SPDX-License-Identifier: Apache-2.0
"""Whether a component serves. The calling thread has entered the cluster's network."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping

from hack.realnode import rest
from hack.realnode.layout import Layout

LOCAL_S = 15.0


def serves(layout: Layout, component: str) -> bool:
    """Whether it answers as one that can be used."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return _PROBES[component](layout)
    return False


def node_ready(layout: Layout, node_name: str) -> bool:
    """Whether a Node has the condition Ready."""
    body = found(layout, f"/api/v1/nodes/{node_name}")
    conditions = [] if body is None else json.loads(body)["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def found(layout: Layout, path: str) -> bytes | None:
    """What stands at a path of the API server, None where nothing does or it does not answer."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, body = rest.call(layout, "GET", path)
        if status == http.HTTPStatus.OK:
            return body
    return None


def healthy(host: str, port: int, path: str = "/healthz", *, tls: bool = False) -> bool:
    """Whether a GET is answered with 200. Raises OSError and http.client.HTTPException."""
    connection: http.client.HTTPConnection
    if tls:
        # The certificate is one that the component has just made for itself, and the network is the cluster's own.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=LOCAL_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=LOCAL_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK


def _containerd(layout: Layout) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LOCAL_S)
        connection.connect(str(layout.containerd_socket))
    return True


_PROBES: Mapping[str, Callable[[Layout], bool]] = {
    "etcd": lambda _: healthy("127.0.0.1", 2379, "/health"),
    "containerd": _containerd,
    "kube-apiserver": lambda layout: found(layout, "/readyz") is not None,
    "kube-controller-manager": lambda _: healthy("127.0.0.1", 10257, tls=True),
    "kube-scheduler": lambda _: healthy("127.0.0.1", 10259, tls=True),
    "kubelet": lambda layout: healthy("127.0.0.1", 10248) and node_ready(layout, layout.node_name),
}
