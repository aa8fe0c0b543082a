# SPDX-License-Identifier: Apache-2.0
"""The API server. Bodies go in and out as plain JSON; whatever goes wrong leaves as ApiError.

`client` has the calls, `connections` and `watching` the sockets, `credentials` and `access` who we are, `events` what people
are told. `loader` is the only importer of `kubernetes`, in a process of its own.
"""
