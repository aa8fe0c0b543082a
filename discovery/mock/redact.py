# SPDX-License-Identifier: Apache-2.0
"""Taking out of a recording what tells whose machine it is: MAC addresses, GUIDs, UUIDs, serial numbers, the boot id.

Each is replaced by a pseudonym that follows from its place (a PCI address), not from its value, so that it cannot be
guessed back, is the same in every capture of a machine, and is the same wherever the value stands: in files, in names of
interfaces and devices, and in the state behind NVML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from discovery import codec
from discovery.mock import identity, state
from discovery.mock.recording import Entry, Link

_MACHINE = "redacted"
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_IPOIB = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){19}")
_GUID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){3}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UUID_LINE = re.compile(r"^gpu uuid:\s*gpu-(\S+)$", re.MULTILINE)
_NETDEV = re.compile(r"(.*)/net/[^/]+/address")
_RDMA = re.compile(r"(.*)/infiniband/[^/]+/(?:node_guid|sys_image_guid)")
_GPU = re.compile(r"proc/driver/nvidia/gpus/([^/]+)/information")
_SERIAL = re.compile(r"(.*)/nvme/[^/]+/serial")


class Redaction:
    """What is to be replaced, learned from a recording, and replacing it."""

    def __init__(self) -> None:
        self._spelt: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._places: dict[str, int] = {}
        self.interfaces: Mapping[str, str] = {}
        """Names that the host gave to what it built upon its NICs, and what they are called now (`capturenet`). They may be any
        word, so they are not looked for in other places.
        """

    def learn(self, files: Mapping[str, Entry], nvml: state.Nvml | None) -> None:
        """Finds every value that has to go."""
        for path in sorted(files):
            entry = files[path]
            if isinstance(entry, str):
                self._learn_file(path, entry.strip().lower())
        for gpu in nvml.gpus if nvml is not None else ():
            self._uuid((gpu.uuid or "").removeprefix("GPU-"), str(gpu.pci))
            for instance in gpu.mig.instances if gpu.mig is not None else ():
                for each in instance.compute:
                    self._uuid(each.uuid.removeprefix("MIG-"), f"{gpu.pci}/{instance.id}/{each.id}")
            if gpu.fabric is not None:
                self._uuid(gpu.fabric.cluster_uuid or "", self._ordinal("", "fabric"))

    def text(self, text: str) -> str:
        """A text without what was learned."""
        if not self._spelt:
            return text
        if self._pattern is None:
            longest_first = sorted(map(re.escape, self._spelt), key=len, reverse=True)
            self._pattern = re.compile(f"(?<![0-9a-f])(?:{'|'.join(longest_first)})(?![0-9a-f])", re.IGNORECASE)
        return self._pattern.sub(lambda match: self._spelt[match[0].lower()], text)

    def files(self, files: Mapping[str, Entry]) -> dict[str, Entry]:
        """Files without what was learned, in names, links and contents."""
        return {self.text(path): self._entry(path, entry) for path, entry in files.items()}

    def nvml(self, nvml: state.Nvml | None) -> state.Nvml | None:
        """The state without what was learned, and without serial numbers."""
        if nvml is None:
            return None
        obj = json.loads(self.text(json.dumps(codec.encode(nvml))))
        for gpu in obj["gpus"]:
            if "serial" in gpu:
                gpu["serial"] = identity.number_of(_MACHINE, gpu["pci"], digits=13)
        return codec.decode(state.Nvml, obj, place="redacted NVML state")

    def _entry(self, path: str, entry: Entry) -> Entry:
        serial = _SERIAL.fullmatch(path)
        match entry:
            case str() if serial:  # it may be too short to be looked for elsewhere: it is replaced where it stands
                return f"{identity.number_of(_MACHINE, _end(serial[1]), digits=14)}\n"
            case str():
                return self.text(entry)
            case bytes():
                return entry
            case Link():
                return Link(self.text(entry.target))

    def _learn_file(self, path: str, text: str) -> None:
        if match := _NETDEV.fullmatch(path):
            self._hardware_address(text, self._ordinal(match[1], "net"))
        elif match := _RDMA.fullmatch(path):
            self._guid(text, self._ordinal(match[1], "rdma"))
        elif path == "proc/sys/kernel/random/boot_id":
            self._uuid(text, "boot")
        elif (match := _GPU.fullmatch(path)) and (line := _UUID_LINE.search(text)):
            self._uuid(line[1], match[1])

    def _ordinal(self, directory: str, what: str) -> str:
        """A name for the next thing of a function."""
        key = f"{_end(directory)}/{what}"
        self._places[key] = self._places.get(key, -1) + 1
        return f"{key}/{self._places[key]}"

    def _hardware_address(self, text: str, place: str) -> None:
        if _MAC.fullmatch(text):
            self._add(text, identity.mac_of(_MACHINE, place))
        elif _IPOIB.fullmatch(text):
            guid = text[-23:].replace(":", "")
            self._guid(":".join(guid[start : start + 4] for start in (0, 4, 8, 12)), place)

    def _guid(self, text: str, place: str) -> None:
        if _GUID.fullmatch(text):
            self._add(text, identity.guid_of(_MACHINE, place))

    def _uuid(self, text: str, place: str) -> None:
        text = text.lower()
        if _UUID.fullmatch(text) and text.strip("0-"):
            self._replace(text, identity.uuid_of(_MACHINE, place))

    def _add(self, text: str, pseudonym: str) -> None:
        """A number in all the ways in which it is spelt: as it is, without colons, in pairs of digits."""
        digits = text.replace(":", "")
        if digits.strip("0") and digits.strip("f"):
            new = self._replace(text, pseudonym).replace(":", "")
            self._replace(digits, new)
            self._replace(_paired(digits), _paired(new))

    def _replace(self, text: str, pseudonym: str) -> str:
        """Remembers a pseudonym, or tells the one that a value has already."""
        self._pattern = None
        return self._spelt.setdefault(text, pseudonym)


def _paired(digits: str) -> str:
    return ":".join(digits[start : start + 2] for start in range(0, len(digits), 2))


def _end(directory: str) -> str:
    return directory.rpartition("/")[2]
