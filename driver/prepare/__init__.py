# SPDX-License-Identifier: Apache-2.0
"""From a claim to devices in a container: claim, plan, CDI file, durable record, answer; and back.

`claims`, `plan`, `ledger` (over `typed`) and `cdi` are pure: what a claim allocates, who may have it, what is kept of it, what a
container gets. `store` (over `recordfile`, `schema`, `database`) is the record, `cdidir` the CDI files, `nodespec` (over `installation`,
`rootfs`, `elf`) what all containers share. `executor` serves kubelet; `attempt` prepares one claim once, with what `index` knows of
devices and `hands` does to GPUs; `releasing` puts back, `partitions` tells which MIG instances are the agent's. `collector` keeps things
in step while nobody asks, `epoch` and `locks` keep two instances of the agent apart. `crashpoints` names the moments between which a
crash is tested.

Law: the record is the truth about who has a device; kubelet is told what is durable, and the same again when it asks again;
a claim's file and row are touched under the claim's lock only.
"""
