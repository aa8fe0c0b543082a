# SPDX-License-Identifier: Apache-2.0
"""Programs that the commands of this folder need and a machine may lack. They are looked for, and installed where they are missing.

Law: what comes from the network is compared with a checksum that is committed here, or comes through the machine's own package
manager, which does the same. Standard library alone: hack/cluster runs before there is a virtual environment.
"""
