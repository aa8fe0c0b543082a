# SPDX-License-Identifier: Apache-2.0
"""The errors that leave discovery. Every foreign exception is turned into one of these by the module that owns its source.

DiscoveryError
+-- ProbeError       the probe as a whole gave no Snapshot (child gone, deadline over, root not readable)
+-- WorkError        the hardware was not changed as asked (work.py)
+-- SourceError      one reading of one source failed; inside the probe it becomes a Finding
+-- DocumentError    a document a person or a file gave us (Machine, Recording, Snapshot, overlay) is not usable
"""

from __future__ import annotations

MALFORMED = "malformed"
"""The kind of a SourceError whose source answered, with something that it should not have said."""

DENIED = frozenset({"eacces", "eperm"})
"""The kinds of a SourceError about a file that this user may not read."""


class DiscoveryError(Exception):
    """Base of everything discovery raises."""


class ProbeError(DiscoveryError):
    """No Snapshot came of a probe. The last good one stays valid.

    `retryable` is False only where repeating cannot help (a root that is no directory).
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class WorkError(DiscoveryError):
    """The hardware was not changed as asked. `kind`: one of work.Kind. `retryable`: whether it may pass by itself, so that the
    same call can succeed a little later. `clean`: that of all that was to be made there is surely nothing, so that whatever is at
    those places is somebody else's.
    """

    def __init__(self, message: str, *, kind: str, retryable: bool, clean: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.clean = clean


class SourceError(DiscoveryError):
    """A single reading failed. `source` is `sysfs`, `nvml` or `host`; `kind` a short stable word such as `gpu-is-lost`; `path`
    the file that it is about, if it is about one.
    """

    def __init__(self, source: str, kind: str, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.kind = kind
        self.path = path


class DocumentError(DiscoveryError):
    """A document is not usable; the message names the document, the place in it and what to change."""
