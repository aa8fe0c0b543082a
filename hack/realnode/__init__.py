# SPDX-License-Identifier: Apache-2.0
"""A one-node Kubernetes cluster of upstream components on this machine, without images, engines or internet."""
