# SPDX-License-Identifier: Apache-2.0
"""How each GPU of the node is shared: `rules` is what an admin wrote, `policy` what follows from it for the GPUs there are."""
