# SPDX-License-Identifier: Apache-2.0
"""One request to the API server of a cluster, as its administrator. The calling thread has entered the cluster's network."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from typing import Any

from hack.realnode import network
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

REQUEST_S = 30.0


def call(
    layout: Layout, method: str, path: str, body: object = None, *, content_type: str = "application/json"
) -> tuple[int, bytes]:
    """Status and body of the answer. Raises OSError and http.client.HTTPException."""
    token = json.loads(layout.kubeconfig.read_text())["users"][0]["user"]["token"]
    context = ssl.create_default_context(cafile=str(layout.certificates / "apiserver.crt"))
    connection = http.client.HTTPSConnection(network.SERVICE_ADDRESS, 443, timeout=REQUEST_S, context=context)
    with contextlib.closing(connection):
        connection.request(
            method,
            path,
            body=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {token}", "Content-Type": content_type},
        )
        response = connection.getresponse()
        return response.status, response.read()


def create(layout: Layout, path: str, body: object) -> dict[str, Any]:
    """The object that was made, or that was there before. Raises ClusterError with the server's reason, and OSError."""
    status, answer = call(layout, "POST", path, body)
    made: dict[str, Any] = json.loads(answer)
    if status == http.HTTPStatus.CONFLICT:
        status, answer = call(layout, "GET", f"{path}/{_name(body)}")
        made = json.loads(answer)
    if status not in {http.HTTPStatus.OK, http.HTTPStatus.CREATED}:
        raise ClusterError(f"POST {path}: {made.get('message', status)}")
    return made


def _name(body: object) -> str:
    assert isinstance(body, dict)
    return str(body["metadata"]["name"])
