# SPDX-License-Identifier: Apache-2.0
"""The error of this package."""


class ImageError(Exception):
    """The image cannot be built here, or is not what it has to be; the message says what to do."""
