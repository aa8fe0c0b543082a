# SPDX-License-Identifier: Apache-2.0
"""The agent's image, built on this machine: with docker or podman where there is one, else from Debian packages with buildah.

Everything but `rootfs` and `trim`, which run inside the build, uses the standard library only and runs before there is a venv.
"""
