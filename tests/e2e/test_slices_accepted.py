# SPDX-License-Identifier: Apache-2.0
"""`nearfield slices -o yaml | kubectl create --dry-run=server -f -` works for every machine of the zoo, and for those made up here:
the server accepts what would be published, and keeps all of it. So do the servers of older releases (test_older_servers.py).
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import accepted, machines
from tests.e2e.kit.sites import Site


@pytest.mark.parametrize("machine", machines.names())
def test_the_server_accepts_and_keeps_the_slices(site: Site, machine: str) -> None:
    accepted.require(site, machine)
