# SPDX-License-Identifier: Apache-2.0
"""Message and service definitions of the kubelet, with the code generated from them. See README.md."""
