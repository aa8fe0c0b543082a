# SPDX-License-Identifier: Apache-2.0
"""What hardware is on this node and how it is wired. Knows nothing of Kubernetes.

Sources, one module each: `sysfs` (sysfs and procfs), `nvml` (the GPU itself), `host` (psutil). `pci`, `endpoints`, `system`
and `gpus` make records of what they say; `probe` runs all in phases: identity, locality, links, annotate, check. A later
phase annotates what an earlier one found and never adds to it. What follows from the records is computed by pure modules:
`pcie`, `topology`, `nvlink`, `aligned`, `nics`, `links`, `check`. The result is one `model.Snapshot`, whole and frozen;
whatever was odd on the way is a `model.Finding` in it. Others look through `child`, which keeps all of it in a process of
its own (`worker`).

Law: unknown is `None`; one sick device hides no other; nothing here decides what anybody may use.
"""
