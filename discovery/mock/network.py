# SPDX-License-Identifier: Apache-2.0
"""The section `network` of a Machine: what the host has built upon the interfaces of its NICs, and where its traffic goes.

    network:
      bonds: [{name: bond0, of: [eno1, eno2]}]
      vlans: [{name: bond0.100, on: bond0, id: 100}]
      bridges: [{name: br0, of: [bond0.100]}]
      defaultRoute: br0

All names are those of interfaces, of NICs or of this section.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from discovery.mock.products import Model

Interface = Annotated[str, Field(pattern=r"^[^/:\s.][^/:\s]{0,14}$")]
"""What the kernel takes for a name (dev_valid_name)."""


class Upper(Model):
    """A bond or a bridge. A bridge may have nothing in it, as one of Open vSwitch shows itself."""

    name: Interface
    of: tuple[Interface, ...]


class Vlan(Model):
    """A VLAN on an interface."""

    name: Interface
    on: Interface
    id: int = Field(ge=1, le=4094)


class Network(Model):
    """The section. Without `defaultRoute` the routing table has none."""

    bonds: tuple[Upper, ...] = ()
    vlans: tuple[Vlan, ...] = ()
    bridges: tuple[Upper, ...] = ()
    default_route: Interface | None = None
