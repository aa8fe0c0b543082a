# SPDX-License-Identifier: Apache-2.0
"""What the current thread is working on, for the log: the RPC's method and request id, the claim.

The door that begins a piece of work binds it; every log line written below that door carries it. A new thread and a
pool's worker start without it: hand it over with `contextvars.copy_context().run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})
_fields: ContextVar[Mapping[str, str]] = ContextVar("nearfield_log_context", default=_NOTHING)


def fields() -> Mapping[str, str]:
    """What is bound here and now, in the order in which it was bound."""
    return _fields.get()


@contextlib.contextmanager
def bound(**values: str) -> Iterator[None]:
    """Add fields for the length of a block, over those of the blocks around it."""
    token = _fields.set(MappingProxyType({**_fields.get(), **values}))
    try:
        yield
    finally:
        _fields.reset(token)
