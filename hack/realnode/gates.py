# SPDX-License-Identifier: Apache-2.0
"""API groups that a feature gate is of no use without."""

from __future__ import annotations

from collections.abc import Mapping

NEWEST = "1.37"
"""The release of the components."""

SERVED_WITH: Mapping[str, tuple[str, str]] = {
    "GenericWorkload": ("scheduling.k8s.io/v1beta1", "1.37"),
    "CompositePodGroup": ("scheduling.k8s.io/v1alpha3", "1.37"),
}
"""Gate: the group and version in which its kinds are served, off by default, and the release that brought it
(k8s.io/kubernetes/pkg/controlplane and pkg/registry/scheduling/rest). An older release has the kinds in a version that these
components do not know."""


def runtime_config(gates: Mapping[str, bool], *, emulate: str | None, given: Mapping[str, bool]) -> dict[str, bool]:
    """What is served beside the default groups: what somebody asked for, and what the gates need."""
    release = emulate or NEWEST
    needed = {
        group: True
        for gate, (group, since) in SERVED_WITH.items()
        if gates.get(gate) and _numbers(since) <= _numbers(release)
    }
    return {**needed, **given}


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
