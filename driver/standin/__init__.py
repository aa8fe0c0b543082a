# SPDX-License-Identifier: Apache-2.0
"""An API server and a kubelet that behave as the real ones do, for the demo and the tests."""
