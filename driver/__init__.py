# SPDX-License-Identifier: Apache-2.0
"""What kubelet and the API server see of a node's GPUs.

Rooms, each a package: `publish` (Snapshot to ResourceSlices), `prepare` (claim to CDI file and record), `kubelet` (the
gRPC services on their sockets), `kube` (the API server), `observe` (metrics, HTTP), `standin` (an API server and a kubelet
for demo and tests), `cli`. `inventory` holds the newest Snapshot, `app` builds everything and knows the order of start
and stop: record, CDI files, sockets, registration, slices, and back.

Law: decisions are functions of values; kubelet is told only what is durable; discovery never imports driver.
"""
