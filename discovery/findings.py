# SPDX-License-Identifier: Apache-2.0
"""Collects the Findings of one probe: without repeats, in a stable order, and never more than a person could read."""

from __future__ import annotations

from collections.abc import Sequence

from discovery import errors, model

CODES = frozenset(
    (
        "contradiction",
        "data-direct-unpaired",
        "default-route-unknown",
        "device-node-missing",
        "driver-version-differs",
        "fabric-failed",
        "gpu-direct-missing",
        "gpu-not-ready",
        "gpu-virtual-functions",
        "gpu-without-function",
        "link-width-differs",
        "mig-capability-missing",
        "mig-instance-incomplete",
        "mig-mode-pending",
        "minor-differs",
        "no-gpu",
        "not-permitted",
        "numa-alike",
        "numa-from-overlay",
        "numa-node-unreadable",
        "numa-unknown",
        "nvlink-down",
        "nvlink-inferred",
        "nvlink-unknown",
        "overlay-affinity-differs",
        "overlay-not-for-this-machine",
        "overlay-refused",
        "overlay-unknown-device",
        "pci-config-restricted",
        "pci-config-unreadable",
        "pci-identity",
        "pci-path-unknown",
        "pcie-link-narrow",
        "pcie-link-slow",
        "peer-to-peer-redirected",
        "pool-too-large",
        "rail-without-nic",
        "switch-from-overlay",
        "uuid-differs",
        "vpd-malformed",
        "vpd-restricted",
    )
)
"""Every code that is not `<source>-<kind>` of a SourceError; docs/findings.md says what each means and what to do."""

MAX_FINDINGS = 500
"""A tree of ten thousand broken files is one problem, and the Snapshot has to stay small enough to be passed on."""


class Findings:
    """The Findings of one probe. Not for use by several threads."""

    def __init__(self) -> None:
        self._seen: set[model.Finding] = set()
        self._dropped = 0
        self._denied: dict[str, list[errors.SourceError]] = {}

    def info(self, code: str, subject: object, message: str) -> None:
        """Something that explains."""
        assert code in CODES
        self._add(code, model.Severity.INFO, subject, message)

    def warning(self, code: str, subject: object, message: str) -> None:
        """Something that costs a fact or a path."""
        assert code in CODES
        self._add(code, model.Severity.WARNING, subject, message)

    def error(self, code: str, subject: object, message: str) -> None:
        """Something that takes a device out of use, or should not be possible."""
        assert code in CODES
        self._add(code, model.Severity.ERROR, subject, message)

    def failed(self, subject: object, error: errors.SourceError) -> None:
        """One reading of one source failed, and the fact it would have given stays unknown. Files that may not be read are one
        Finding for all of a name: without the rights of root, it is the same one of every device.
        """
        if error.kind in errors.DENIED and error.path is not None:
            self._denied.setdefault(error.path.rpartition("/")[2], []).append(error)
            return
        self._add(f"{error.source}-{error.kind}", model.Severity.WARNING, subject, str(error))

    def result(self) -> tuple[model.Finding, ...]:
        """All of them, ordered by code and subject."""
        found = sorted([*self._seen, *map(_denial, self._denied.items())])
        if self._dropped:
            found.append(
                model.Finding(
                    code="too-many-findings",
                    severity=model.Severity.ERROR,
                    subject="probe",
                    message=f"more than {MAX_FINDINGS} findings: the rest is left out; mend the first ones and look again",
                )
            )
        return tuple(found)

    def _add(self, code: str, severity: model.Severity, subject: object, message: str) -> None:
        finding = model.Finding(code=code, severity=severity, subject=str(subject), message=message)
        if finding in self._seen:
            return
        if len(self._seen) >= MAX_FINDINGS:
            self._dropped += 1
            return
        self._seen.add(finding)


def _denial(item: tuple[str, Sequence[errors.SourceError]]) -> model.Finding:
    name, denied = item
    paths = sorted({str(error.path) for error in denied})
    others = f" and {len(paths) - 1} more of this name" if len(paths) > 1 else ""
    return model.Finding(
        code="not-permitted",
        severity=model.Severity.WARNING,
        subject=name,
        message=f"/{paths[0]}{others} may not be read, and what it says stays unknown; give the agent the rights of root",
    )
