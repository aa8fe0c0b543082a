# SPDX-License-Identifier: Apache-2.0
"""Keeps the control daemons of NVIDIA's Multi-Process Service, one a device, in a process of its own; and reaches that process."""
