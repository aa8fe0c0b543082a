# SPDX-License-Identifier: Apache-2.0
"""The uevents that a kernel would send between two states of a machine's files. Pure.

Order and content are those of drivers/base/core.c, drivers/base/dd.c and drivers/pci/pci-driver.c: what hangs on a driver
goes before the driver does, the driver before the function; `unbind` names no driver any more and no MODALIAS. A link
that goes up or down sends none.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from discovery import address
from discovery.address import PciAddress
from discovery.mock.recording import Entry, Tree

_DEVICES = "sys/bus/pci/devices/"
_CLASSES = ("sys/class/net/", "sys/class/infiniband/", "sys/class/nvme/")
_MODULES = "sys/module/nvidia"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message, without its sequence number."""

    action: str
    devpath: str
    subsystem: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def message(self, seqnum: int) -> bytes:
        """Its bytes (kobject_uevent_env in lib/kobject_uevent.c)."""
        told = {"ACTION": self.action, "DEVPATH": self.devpath, "SUBSYSTEM": self.subsystem, **self.variables}
        lines = [
            f"{self.action}@{self.devpath}",
            *(f"{key}={value}" for key, value in told.items()),
            f"SEQNUM={seqnum}",
        ]
        return "".join(f"{line}\0" for line in lines).encode()


def functions(paths: Iterable[str]) -> dict[PciAddress, str]:
    """The links of the PCI bus among some paths. A recording may hold names that are no addresses."""
    found = {}
    for path in paths:
        if path.startswith(_DEVICES):
            with contextlib.suppress(ValueError):
                found[address.parse(posixpath.basename(path))] = path
    return found


def events(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> tuple[Event, ...]:
    """All of them, what goes in front of what comes."""
    old, new = _State(before), _State(after)
    return (*_going(old, new), *_coming(old, new))


def _going(old: _State, new: _State) -> Iterator[Event]:
    for name, (class_name, devpath) in sorted(old.classes.items(), reverse=True):
        if name not in new.classes:
            yield Event(action="remove", devpath=devpath, subsystem=class_name)
    for pci in sorted(old.functions, reverse=True):
        if old.driver(pci) is not None and new.driver(pci) != old.driver(pci):
            yield old.event("unbind", pci)
    for pci in sorted(old.functions.keys() - new.functions.keys(), reverse=True):
        yield old.event("remove", pci)
    for module in sorted(old.modules - new.modules, reverse=True):
        yield Event(action="remove", devpath=f"/module/{module}", subsystem="module")


def _coming(old: _State, new: _State) -> Iterator[Event]:
    for module in sorted(new.modules - old.modules):
        yield Event(action="add", devpath=f"/module/{module}", subsystem="module")
    for pci in sorted(new.functions.keys() - old.functions.keys()):
        yield new.event("add", pci)
    for pci in sorted(new.functions):
        if new.driver(pci) is not None and new.driver(pci) != old.driver(pci):
            yield new.event("bind", pci)
    for name, (class_name, devpath) in sorted(new.classes.items()):
        if name not in old.classes:
            yield Event(action="add", devpath=devpath, subsystem=class_name)


class _State:
    """What of the files can be the subject of an event."""

    def __init__(self, files: Mapping[str, Entry]) -> None:
        self._tree = Tree(files)
        self.functions: dict[PciAddress, str] = {}
        self.classes: dict[str, tuple[str, str]] = {}
        self.modules: set[str] = set()
        for path in files:
            if path.startswith(_MODULES):
                self.modules.add(path.split("/")[2])
            elif path.startswith(_CLASSES) and (directory := self._tree.resolve(path)) is not None:
                self.classes[path] = (path.split("/")[2], _devpath(directory))
        for pci, link in functions(files).items():
            if (directory := self._tree.resolve(link)) is not None:
                self.functions[pci] = directory

    def driver(self, pci: PciAddress) -> str | None:
        """The driver of a function; None where there is none, or no function."""
        driver = self._tree.resolve(f"{self.functions.get(pci)}/driver")
        return None if driver is None else posixpath.basename(driver)

    def event(self, action: str, pci: PciAddress) -> Event:
        """An event of a PCI function, with the variables of pci_uevent()."""
        directory = self.functions[pci]
        values = {
            name: int(self._tree.text(f"{directory}/{name}") or "0", 16)
            for name in ("class", "vendor", "device", "subsystem_vendor", "subsystem_device")
        }
        ids = f"v{values['vendor']:08X}d{values['device']:08X}"
        subsystem = f"sv{values['subsystem_vendor']:08X}sd{values['subsystem_device']:08X}"
        kind = f"bc{values['class'] >> 16:02X}sc{values['class'] >> 8 & 0xFF:02X}i{values['class'] & 0xFF:02X}"
        variables = {
            "PCI_CLASS": f"{values['class']:04X}",
            "PCI_ID": f"{values['vendor']:04X}:{values['device']:04X}",
            "PCI_SUBSYS_ID": f"{values['subsystem_vendor']:04X}:{values['subsystem_device']:04X}",
            "PCI_SLOT_NAME": str(pci),
            "MODALIAS": f"pci:{ids}{subsystem}{kind}",
        }
        if action == "unbind":
            del variables["MODALIAS"]
        driver = self.driver(pci)
        bound = {"DRIVER": driver} if action == "bind" and driver is not None else {}
        return Event(action=action, devpath=_devpath(directory), subsystem="pci", variables={**bound, **variables})


def _devpath(directory: str) -> str:
    return "/" + directory.removeprefix("sys/")
