# SPDX-License-Identifier: Apache-2.0
"""Where the programs of the stand-in for MPS meet. Light, as each command is a process of its own that imports it."""

SOCKET = "control"
"""Of a daemon, of each of its servers and of each of their namespaces, in folders of their names."""

LINE_MAX = 1 << 16
"""Bytes of a request."""
