# SPDX-License-Identifier: Apache-2.0
"""Judges that are not ours: what upstream's allocator makes of our slices, and what hwloc sees of the same machine."""
