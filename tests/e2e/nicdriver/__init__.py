# SPDX-License-Identifier: Apache-2.0
"""A second DRA driver for the node of the scenarios: it offers the NICs of the machine that the agent replays, under the names
that dranet (sigs.k8s.io/dranet, driver `dra.net`) gives them, and stands in kubelet's folders as any other driver does.
"""
