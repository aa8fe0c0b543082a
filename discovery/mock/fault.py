# SPDX-License-Identifier: Apache-2.0
"""The faults a mock machine can have: their kinds, what each needs, and when they are on.

A fault is data. Its times are seconds after it was put in place; a fault with `until_s` heals. `faults` gives them their
effect on files, `library` on NVML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from discovery.address import PciAddress


class Kind(StrEnum):
    """What goes wrong."""

    GPU_LOST = "gpu-lost"
    """Every NVML call on it answers NVML_ERROR_GPU_IS_LOST; its PCI function stays."""
    FALLEN_OFF = "fallen-off"
    """The PCI function leaves the bus, and NVML with it; with a bridge, all behind it. Hot-unplug, and hot-plug where it ends:
    a fault that is there from the beginning and has an end is a function that is plugged in later.
    """
    XID = "xid"
    """An Xid event for those who wait for one."""
    NVML_HANG = "nvml-hang"
    """Calls do not return while the fault is on."""
    NVML_CRASH = "nvml-crash"
    """The calling process dies by a signal."""
    NVML_ERROR = "nvml-error"
    """Calls answer an nvmlReturn_t."""
    LINK_DOWN = "link-down"
    """An NVLink of a GPU (all, without `link`), or the ports of a NIC."""
    NARROW_LINK = "narrow-link"
    """The PCIe link trained to fewer lanes."""
    NUMA_UNKNOWN = "numa-unknown"
    """numa_node reads -1, of one function or of all."""
    NUMA_WRONG = "numa-wrong"
    """The firmware tells this NUMA node, of one function or of all."""
    VFIO_BOUND = "vfio-bound"
    """The function is bound to vfio-pci."""
    NO_DRIVER = "no-driver"
    """Without a target the node has no NVIDIA driver (until it is loaded, with `until_s`); with one, the function is unbound."""
    NETDEV_MOVED = "netdev-moved"
    """The interfaces of a NIC are in a pod's network namespace: this one's /sys does not show them."""
    RDMA_MOVED = "rdma-moved"
    """Its RDMA devices are, as they can be where RDMA is told to keep to namespaces (rdma-system(8), netns exclusive)."""
    ECC = "ecc"
    """Uncorrectable memory errors, and a row remapping that waits for a reset."""
    THERMAL = "thermal"
    """Hot, and slowed down by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Which of the optional fields a kind takes is in `RULES`."""

    kind: Kind
    target: PciAddress | None = None
    at_s: float = 0.0
    until_s: float | None = None
    xid: int | None = None
    link: int | None = None
    width: int | None = None
    node: int | None = None
    count: int | None = None
    temperature_c: int | None = None
    function: str | None = None
    """C name of the NVML function; without it every one is hit, or every one that takes a handle of the target."""
    error: int | None = None
    """nvmlReturn_t."""
    after: bool | None = None
    """Whether the call does its work first: an instance is made, and nobody is told."""
    signal: int | None = None
    """Signal number; 6 (SIGABRT) without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The fields that a kind needs and those it may have. `target` stands in one of them where it makes sense."""

    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


def _rule(needs: str = "", takes: str = "") -> Rule:
    return Rule(needs=frozenset(needs.split()), takes=frozenset(takes.split()))


RULES = {
    Kind.GPU_LOST: _rule("target"),
    Kind.FALLEN_OFF: _rule("target"),
    Kind.XID: _rule("target xid"),
    Kind.NVML_HANG: _rule(takes="target function after"),
    Kind.NVML_CRASH: _rule(takes="target function after signal"),
    Kind.NVML_ERROR: _rule("error", takes="target function after"),
    Kind.LINK_DOWN: _rule("target", takes="link"),
    Kind.NARROW_LINK: _rule("target width"),
    Kind.NUMA_UNKNOWN: _rule(takes="target"),
    Kind.NUMA_WRONG: _rule("node", takes="target"),
    Kind.VFIO_BOUND: _rule("target"),
    Kind.NO_DRIVER: _rule(takes="target"),
    Kind.NETDEV_MOVED: _rule("target"),
    Kind.RDMA_MOVED: _rule("target"),
    Kind.ECC: _rule("target", takes="count"),
    Kind.THERMAL: _rule("target", takes="temperature_c"),
}

PARAMETERS = frozenset().union(*(rule.needs | rule.takes for rule in RULES.values()))
_LEAST = {"xid": 0, "link": 0, "width": 1, "node": 0, "count": 1, "temperature_c": -273, "error": 1, "signal": 1}
_MOST = {
    "xid": 1 << 32,
    "link": 63,
    "width": 32,
    "node": 1023,
    "count": 1 << 63,
    "temperature_c": 1000,
    "error": 999,
    "signal": 64,
}


def problems(fault: Fault) -> Iterator[tuple[str, str]]:
    """What is wrong with a fault: field -> sentence. Nothing for one that can be applied."""
    rule = RULES[fault.kind]
    for name in sorted(PARAMETERS):
        value = getattr(fault, name)
        if value is None:
            if name in rule.needs:
                yield name, f"{fault.kind} needs {name}"
        elif name not in rule.needs | rule.takes:
            known = ", ".join(sorted(rule.needs | rule.takes)) or "nothing"
            yield name, f"{fault.kind} takes no {name} (it takes: {known})"
        elif name in _LEAST and not _LEAST[name] <= value <= _MOST[name]:
            yield name, f"{name} {value} is not between {_LEAST[name]} and {_MOST[name]}"
    if fault.at_s < 0:
        yield "at_s", "a fault cannot begin before it is put in place"
    if fault.until_s is not None and fault.until_s <= fault.at_s:
        yield "until_s", "a fault must end after it begins"
    if fault.kind is Kind.XID and fault.until_s is not None:
        yield "until_s", "an Xid is an event and does not end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A fault in a rendered machine, with the time (seconds since the epoch) at which it was put in place."""

    fault: Fault
    since: float

    @property
    def begins(self) -> float:
        """When it begins, in seconds since the epoch."""
        return self.since + self.fault.at_s

    @property
    def ends(self) -> float | None:
        """When it heals, in seconds since the epoch."""
        return None if self.fault.until_s is None else self.since + self.fault.until_s

    def on(self, now: float) -> bool:
        """Whether it has its effect at a time."""
        return self.begins <= now and (self.ends is None or now < self.ends)
