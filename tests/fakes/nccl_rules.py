# SPDX-License-Identifier: Apache-2.0
"""What NCCL's reader of topology files demands, as its source says (src/graph/xml.cc, xml.h, topo.cc, topo.h of 2.2x to 2.3x):
a reader of characters with the same bounds, and what is asked of the elements when the topology is made from them. Much
stricter than XML; `read` raises AssertionError where NCCL would warn and give up, or take a default without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_STR_LEN = 255
MAX_ATTR_COUNT = 16
MAX_SUBS = 640
MAX_NODES = 256
"""NCCL_TOPO_XML_MAX_NODES."""

INSIDE = {
    "system": {"cpu"},
    "cpu": {"pci", "nic"},
    "pci": {"pci", "gpu", "nic", "pcilink"},
    "gpu": {"nvlink", "c2c"},
    "nic": {"net"},
    "net": set(),
    "nvlink": set(),
}
"""What NCCL loads from each element; anything else it skips."""

SPEEDS = {"2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s"} | {
    f"{speed} GT/s PCIe" for speed in ("2.5", "5.0", "8.0", "16.0", "32.0", "64.0")
}
"""kvDictPciGen; another text counts as 8 GT/s in silence."""


@dataclass
class Node:
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    inside: list[Node] = field(default_factory=list)

    def all(self) -> Iterator[Node]:
        yield self
        for node in self.inside:
            yield from node.all()


def read(text: str) -> Node:
    """The tree as NCCL loads it, with every rule checked."""
    assert text.isascii()
    assert not set(text) & set("\t\r&\0'")
    assert "<?" not in text
    assert "<!" not in text
    root, rest = _element(text)
    assert rest == "\n"
    nodes = list(root.all())
    assert len(nodes) <= MAX_NODES
    assert (root.name, root.attributes.get("version")) == ("system", "1")
    for node in nodes:
        assert len(node.attributes) <= MAX_ATTR_COUNT
        assert len(node.inside) <= MAX_SUBS
        assert all(0 < len(value) < MAX_STR_LEN for value in node.attributes.values())
        assert {child.name for child in node.inside} <= INSIDE[node.name]
        _check(node)
    addresses = [node.attributes["busid"] for node in nodes if node.name == "pci"]
    assert len(set(addresses)) == len(addresses)
    numa = [node.attributes["numaid"] for node in root.inside]
    assert len(set(numa)) == len(numa)
    nets = [node.attributes["name"] for node in nodes if node.name == "net"]
    assert len(set(nets)) == len(nets)
    return root


def _element(text: str) -> tuple[Node, str]:
    """One element from the beginning of a text, and what follows it. Between elements stand spaces and line ends only, before
    an attribute exactly one space, and values are quoted.
    """
    text = text.lstrip(" \n")
    assert text[0] == "<"
    head, _, rest = text[1:].partition(">")
    single = head.endswith("/")
    name, *told = _tokens(head.removesuffix("/"))
    node = Node(name)
    for attribute in told:
        key, equals, value = attribute.partition("=")
        assert equals
        assert value[0] == value[-1] == '"'
        assert key not in node.attributes
        node.attributes[key] = value[1:-1]
    if single:
        return node, rest
    while not rest.lstrip(" \n").startswith("</"):
        child, rest = _element(rest)
        node.inside.append(child)
    rest = rest.lstrip(" \n")
    assert rest.startswith(f"</{name}>")
    return node, rest[len(name) + 3 :]


def _tokens(head: str) -> list[str]:
    """Name and attributes of an element; a space inside quotes ends nothing."""
    tokens, quoted, at = [], False, 0
    for index, letter in enumerate(head):
        if letter == '"':
            quoted = not quoted
        elif letter == " " and not quoted:
            tokens.append(head[at:index])
            at = index + 1
    tokens.append(head[at:])
    assert all(tokens)
    return tokens


def _check(node: Node) -> None:
    told = node.attributes
    match node.name:
        case "cpu":
            assert -1 <= int(told["numaid"]) < 1024
            assert "affinity" not in told or all(len(word) == 8 for word in told["affinity"].split(","))
            assert "arch" not in told or told["arch"] in ("x86_64", "arm64", "ppc64")
        case "pci":
            domain, bus, slot = told["busid"].split(":")
            assert told["busid"] == told["busid"].lower()
            assert len(domain) >= 4
            assert (len(bus), len(slot), slot[2]) == (2, 4, ".")
            int(domain + bus + slot.replace(".", ""), 16)
            assert told["class"].startswith("0x")
            assert len(told["class"]) == 8
            bridge = told["class"].startswith("0x0604")
            assert bridge == any(child.name == "pci" for child in node.inside)
            assert told.get("link_speed", "8.0 GT/s PCIe") in SPEEDS
            assert 1 <= int(told.get("link_width", "16")) <= 32
            for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
                assert int(told.get(name, "0x0"), 16) <= 0xFFFF
            if any(child.name == "gpu" for child in node.inside):
                assert told["class"].startswith("0x03")
        case "gpu":
            assert {"dev", "rank", "gdr"}.isdisjoint(told)
            assert int(told.get("sm", "0")) < 1000
        case "nvlink":
            assert int(told["count"]) > 0
            assert told["tclass"].startswith(("0x03", "0x068000"))
            assert told["target"]
        case "net":
            assert told["name"]
            assert int(told.get("speed", "1")) > 0
            assert int(told["port"]) > 0
        case _:
            pass
