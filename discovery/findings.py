# SPDX-License-Identifier: Apache-2.0
"""Collects the Findings of one probe: without repeats, in a stable order, and never more than a person could read."""

from __future__ import annotations

from discovery import errors, model

CODES = frozenset(
    (
        "contradiction",
        "device-node-missing",
        "driver-version-differs",
        "fabric-failed",
        "gpu-not-ready",
        "gpu-virtual-functions",
        "gpu-without-function",
        "link-width-differs",
        "mig-mode-pending",
        "minor-differs",
        "no-gpu",
        "numa-node-unreadable",
        "numa-unknown",
        "nvlink-down",
        "nvlink-inferred",
        "nvlink-unknown",
        "pci-config-restricted",
        "pci-config-unreadable",
        "pci-identity",
        "pci-path-unknown",
        "pcie-link-narrow",
        "pool-too-large",
        "rail-without-nic",
        "uuid-differs",
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
        """One reading of one source failed, and the fact it would have given stays unknown."""
        self._add(f"{error.source}-{error.kind}", model.Severity.WARNING, subject, str(error))

    def result(self) -> tuple[model.Finding, ...]:
        """All of them, ordered by code and subject."""
        found = sorted(self._seen)
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
