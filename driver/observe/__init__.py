# SPDX-License-Identifier: Apache-2.0
"""Metrics and HTTP. The only importer of `prometheus_client`."""
