# SPDX-License-Identifier: Apache-2.0
"""Which page answers where: /metrics, /healthz and /readyz for the cluster, /topology and /snapshot for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from discovery import codec, model
from driver.observe import http, page
from driver.observe.metrics import Metrics


def agent_pages(metrics: Metrics, *, healthz: http.Check, readyz: http.Check) -> Mapping[str, http.Page]:
    """The pages of --http."""

    def scrape(request: http.Request) -> http.Response:
        body, content_type = metrics.exposition(request.accept)
        return http.Response(body=body, content_type=content_type)

    return {"/metrics": scrape, "/healthz": http.answer_check(healthz), "/readyz": http.answer_check(readyz)}


def inspect_pages(
    *, view: Callable[[], page.View], snapshot: Callable[[], model.Snapshot | None]
) -> Mapping[str, http.Page]:
    """The pages of --inspect. They show names of claims."""

    def show_topology(_request: http.Request) -> http.Response:
        return http.Response(
            body=page.render(view()).encode(errors="replace"),
            content_type="text/html; charset=utf-8",
            headers={"Content-Security-Policy": page.POLICY, "Referrer-Policy": "no-referrer"},
        )

    def show_snapshot(_request: http.Request) -> http.Response:
        known = snapshot()
        if known is None:
            return http.Response(
                body=b"The hardware has not been read yet\n",
                content_type="text/plain; charset=utf-8",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        body = json.dumps(codec.to_document(known), indent=2) + "\n"
        return http.Response(body=body.encode(), content_type="application/json")

    return {"/topology": show_topology, "/snapshot": show_snapshot}
