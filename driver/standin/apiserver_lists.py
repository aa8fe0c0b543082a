# SPDX-License-Identifier: Apache-2.0
"""Lists of the stand-in API server, whole or in pages; the pages of one list show one moment."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver.standin import apiserver_resources as resources
from driver.standin import apiserver_status as status
from driver.standin import apiserver_store as store

_PAGES_KEPT = 100


def revision_of(query: Mapping[str, str]) -> int:
    """The resource version that was asked for. 0 stands for "any" and for "not given": both get the newest here."""
    text = query.get("resourceVersion", "")
    if text and not text.isdecimal():
        raise status.bad_request(f"Invalid resource version: {text}")
    return int(text or 0)


def encode_list(resource: resources.Resource, metadata: Mapping[str, Any], items: Sequence[store.Stored]) -> bytes:
    """A list object, put together from the bytes of its items."""
    head = store.encode(
        {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": dict(metadata)}
    )
    return head[:-1] + b',"items":[' + b",".join(stored.encoded for stored in items) + b"]}"


class Lists:
    """Lists of one store and the pages of them that are still to be fetched."""

    def __init__(self, objects: store.Store) -> None:
        self._store = objects
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[int, Sequence[store.Stored]]] = {}

    def page(
        self,
        resource: resources.Resource,
        matches: Callable[[str, Mapping[str, Any]], bool],
        query: Mapping[str, str],
    ) -> bytes:
        """The first page, or the one that a continue token stands for."""
        if token := query.get("continue"):
            with self._lock:
                page = self._pages.pop(token, None)
            if page is None:
                raise status.expired("The provided continue parameter is too old to display a consistent list result.")
            revision, items = page
        else:
            asked = revision_of(query)
            revision, every = self._store.items(resource.plural)
            if asked > revision:
                raise status.too_large_version(asked, revision)
            items = [stored for key, stored in every if matches(key, stored.body)]
        limit = int(text) if (text := query.get("limit", "")).isdecimal() else 0
        metadata: dict[str, Any] = {"resourceVersion": str(revision)}
        if limit and len(items) > limit:
            metadata["continue"] = self._keep(revision, items[limit:])
            metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
        return encode_list(resource, metadata, items)

    def _keep(self, revision: int, rest: Sequence[store.Stored]) -> str:
        token = secrets.token_urlsafe(16)
        with self._lock:
            self._pages[token] = (revision, rest)
            for old in list(itertools.islice(self._pages, max(0, len(self._pages) - _PAGES_KEPT))):
                del self._pages[old]
        return token
