# SPDX-License-Identifier: Apache-2.0
"""What hardware is on this node and how it is wired. Knows nothing of Kubernetes.

Sources, one module each: `sysfs` (sysfs and procfs), `nvml` (the GPU itself), `host` (psutil). `probe` runs them in
phases: identity, locality, links, annotate, check. A later phase annotates what an earlier one found and never adds
to it. The result is one `model.Snapshot`, whole and frozen; whatever was odd on the way is a `model.Finding` in it.

Law: unknown is `None`; one sick device hides no other; nothing here decides what anybody may use.
"""
