# SPDX-License-Identifier: Apache-2.0
"""From a Snapshot to the ResourceSlices of this node on the API server."""
