# SPDX-License-Identifier: Apache-2.0
"""The API server. The only importer of `kubernetes`; bodies go in and out as plain JSON."""
