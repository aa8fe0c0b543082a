# SPDX-License-Identifier: Apache-2.0
"""Taking a TCP address, apart from serving on it: the agent finds out at start that a port is taken, before kubelet knows it."""

from __future__ import annotations

import errno
import os
import socket

from driver import config
from driver.errors import ConfigError

BACKLOG = 64


def bind(address: config.Listen, *, option: str) -> socket.socket:
    """A listening socket. Without a host it takes IPv4 and IPv6 alike, as far as the machine has them.

    Raises ConfigError that names the option and what to change.
    """
    try:
        if not address.host and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", address.port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as err:
        raise ConfigError(f"{option} {address}: {_reason(err)}") from err


def _reason(err: OSError) -> str:
    match err.errno:
        case errno.EADDRINUSE:
            return "another process listens there; stop it, or give another port"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address"
        case errno.EACCES:
            return "not allowed; give a port above 1023"
        case None:
            return f"cannot listen there: {err}"
        case number:
            # A name that does not resolve has a number of its own, which is no errno.
            return f"cannot listen there: {err.strerror or os.strerror(number)}"
