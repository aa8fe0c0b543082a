# SPDX-License-Identifier: Apache-2.0
"""Configurations of claims, and whether they are as documented: for the reader, its JSON Schema and the admission policy alike."""

from __future__ import annotations

from typing import Any

HEADER = {"apiVersion": "gpu.nearfield.dev/v1alpha1", "kind": "ClaimConfig"}

GOOD: dict[str, dict[str, Any]] = {
    "nothing": HEADER,
    "empty parts": {**HEADER, "memory": {}, "compute": {}, "require": {}, "mps": {}},
    "everything": {
        **HEADER,
        "memory": {"limit": "16Gi", "softLimit": "8Gi"},
        "compute": {"limit": 20},
        "require": {"memory": "mps", "compute": "timeslice"},
        "mps": {"priority": "belowNormal"},
    },
    "least": {**HEADER, "memory": {"limit": "1Mi", "softLimit": "0"}, "compute": {"limit": 1}},
    "most": {**HEADER, "memory": {"limit": "1Ei", "softLimit": "1024Pi"}, "compute": {"limit": 100}},
    "fractions of a unit": {**HEADER, "memory": {"limit": "1.5G", "softLimit": "0.5Gi"}},
    "bytes": {**HEADER, "memory": {"limit": "17179869184"}},
    "strongest": {**HEADER, "require": {"memory": "whole", "compute": "whole"}},
    "weakest": {**HEADER, "require": {"memory": "none", "compute": "none"}, "mps": {"priority": "normal"}},
}

MALFORMED: dict[str, tuple[Any, str]] = {
    "no header": ({}, "has apiVersion"),
    "another kind": ({**HEADER, "kind": "GpuConfig"}, "has apiVersion"),
    "of another driver": ({**HEADER, "apiVersion": "resource.nvidia.com/v1beta1"}, "has apiVersion"),
    "a number for a kind": ({**HEADER, "kind": 1}, "has apiVersion"),
    "an unknown field": ({**HEADER, "sharing": {}}, "may have memory"),
    "metadata": ({**HEADER, "metadata": {"name": "x"}}, "may have memory"),
    "a field of another case": ({**HEADER, "memory": {"Limit": "1Gi"}}, "may have memory"),
    "memory is null": ({**HEADER, "memory": None}, "may have memory"),
    "memory is text": ({**HEADER, "memory": "16Gi"}, "may have memory"),
    "compute is a number": ({**HEADER, "compute": 20}, "may have memory"),
    "require is a list": ({**HEADER, "require": ["memory"]}, "may have memory"),
    "a field of mps": ({**HEADER, "mps": {"limit": 1}}, "may have memory"),
    "memory in a number": ({**HEADER, "memory": {"limit": 17179869184}}, "quantities of whole bytes"),
    "memory in a fraction": ({**HEADER, "memory": {"softLimit": 0.5}}, "quantities of whole bytes"),
    "no memory": ({**HEADER, "memory": {"limit": None}}, "quantities of whole bytes"),
    "memory in a list": ({**HEADER, "memory": {"limit": ["1Gi"]}}, "quantities of whole bytes"),
    "less than none": ({**HEADER, "memory": {"softLimit": "-1Gi"}}, "quantities of whole bytes"),
    "an exponent": ({**HEADER, "memory": {"limit": "1e10"}}, "quantities of whole bytes"),
    "thousandths": ({**HEADER, "memory": {"limit": "15000000000m"}}, "quantities of whole bytes"),
    "a unit of its own": ({**HEADER, "memory": {"limit": "16GB"}}, "quantities of whole bytes"),
    "a space": ({**HEADER, "memory": {"limit": "16 Gi"}}, "quantities of whole bytes"),
    "a line": ({**HEADER, "memory": {"limit": "16Gi\n"}}, "quantities of whole bytes"),
    "foreign digits": ({**HEADER, "memory": {"limit": "\u0661Gi"}}, "quantities of whole bytes"),
    "very many digits": ({**HEADER, "memory": {"limit": "9" * 4000}}, "quantities of whole bytes"),
    "an unknown level": ({**HEADER, "require": {"memory": "best"}}, "require.memory"),
    "memory by turns": ({**HEADER, "require": {"memory": "timeslice"}}, "require.memory"),
    "compute by cgroup": ({**HEADER, "require": {"compute": "cgroup"}}, "require.compute"),
    "levels": ({**HEADER, "require": {"compute": ["mps"]}}, "require.compute"),
    "no percentage": ({**HEADER, "compute": {"limit": 0}}, "compute.limit"),
    "too much compute": ({**HEADER, "compute": {"limit": 101}}, "compute.limit"),
    "half a percent": ({**HEADER, "compute": {"limit": 2.5}}, "compute.limit"),
    "percent in text": ({**HEADER, "compute": {"limit": "20"}}, "compute.limit"),
    "true": ({**HEADER, "compute": {"limit": True}}, "compute.limit"),
    "a high priority": ({**HEADER, "mps": {"priority": "high"}}, "mps.priority"),
}
"""Refused by all three. The words are in the policy's message."""

WRONG: dict[str, tuple[Any, str]] = {
    "too little": ({**HEADER, "memory": {"limit": "1048575"}}, "at least 1Mi"),
    "nothing at all": ({**HEADER, "memory": {"limit": "0"}}, "at least 1Mi"),
    "too much": ({**HEADER, "memory": {"limit": "1025Pi"}}, "quantities of whole bytes"),
    "far too much": ({**HEADER, "memory": {"limit": "9999999999999999999Ei"}}, "quantities of whole bytes"),
    "half a byte": ({**HEADER, "memory": {"limit": "1048.5765k"}}, "quantities of whole bytes"),
    "a billionth of a unit": ({**HEADER, "memory": {"softLimit": "0.000000001Gi"}}, "quantities of whole bytes"),
    "soft above hard": ({**HEADER, "memory": {"limit": "2Gi", "softLimit": "2049Mi"}}, "not more than memory.limit"),
}
"""Refused as well, but for more than a JSON Schema can say."""
