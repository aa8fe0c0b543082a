# SPDX-License-Identifier: Apache-2.0
"""From a Snapshot to the ResourceSlices of this node on the API server.

    Snapshot -> devices (ordering, partitions, attributes) -> wanted
             -> absent -> slices (wire) -> limits -> writer -> API server
                 ^ held    ^ mirror <- list and watch

Pure: `attributes`, `devices`, `ordering`, `partitions` with `bestfit` and `counters`, `wanted`, `absent`, `coexistence`,
`slices`, `wire`, `limits` and what stands below it, `health`. With the API server: `mirror` knows what stands there; `node`,
`rivals` and `held` ask what is needed; `reconciler` compares and decides, `writer` writes, `publisher` is the thread.

Law: nothing unknown is published, nothing invalid is sent, nothing is written when nothing changed, and a device that
somebody holds never leaves.
"""
