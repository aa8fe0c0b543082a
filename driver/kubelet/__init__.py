# SPDX-License-Identifier: Apache-2.0
"""The gRPC services that kubelet calls, on their unix sockets. With `standin` the only importer of `grpc` and `proto`."""
