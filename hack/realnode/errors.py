# SPDX-License-Identifier: Apache-2.0
"""The error of this package."""


class ClusterError(Exception):
    """A cluster cannot be brought up, used or taken down; the message says what to do."""
