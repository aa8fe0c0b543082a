# SPDX-License-Identifier: Apache-2.0
"""What was set on a GPU before shares changed it, so that whoever is last puts that back.

One small file a GPU in the state folder, written before the change: nothing depends on which claim is the last, or on how far a
killed agent had come. Nothing is synced, as what a machine forgets that loses power is gone with the settings of its GPUs: a file
of another boot is none. The caller holds the lock of the GPU.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from discovery import address
from discovery.address import PciAddress
from discovery.limits import ComputeMode
from driver.prepare import files
from driver.sharing.shares import TimeSlice

logger = logging.getLogger(__name__)

_DIRECTORY = "settings"
_SUFFIX = ".json"
_MODE = 0o600
_MAX_BYTES = 4096

_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was set before, None where nothing was changed. `time_slice_set`: what it was changed to, once it was."""

    compute_mode: ComputeMode | None = None
    time_slice: TimeSlice | None = None
    time_slice_set: TimeSlice | None = None


NOTHING = Found()


class GpuSettings:
    """The files of this boot, in a state folder. Every method may raise OSError."""

    def __init__(self, state: Path, *, boot_id: str) -> None:
        self._directory = state / _DIRECTORY
        self._boot_id = boot_id

    def get(self, gpu: PciAddress) -> Found:
        """What was set before; NOTHING where nothing was changed."""
        path = self._path(gpu)
        try:
            document = json.loads(files.read_limited(path, limit=_MAX_BYTES))
        except FileNotFoundError:
            return NOTHING
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            logger.warning("%s cannot be read, and is taken for none", path)
            return NOTHING
        if document.get("bootID") != self._boot_id:
            return NOTHING
        return Found(
            compute_mode=_word(ComputeMode, document.get("computeMode")),
            time_slice=_word(TimeSlice, document.get("timeSlice")),
            time_slice_set=_word(TimeSlice, document.get("timeSliceSet")),
        )

    def put(self, gpu: PciAddress, found: Found) -> None:
        """Keep what was set before; NOTHING forgets it."""
        path = self._path(gpu)
        if found == NOTHING:
            files.remove(path)
            return
        words = {
            "computeMode": found.compute_mode,
            "timeSlice": found.time_slice,
            "timeSliceSet": found.time_slice_set,
        }
        document = {"bootID": self._boot_id} | {key: word for key, word in words.items() if word is not None}
        files.make_private_directory(self._directory)
        files.write_atomic(str(self._directory), path.name, json.dumps(document).encode(), mode=_MODE)

    def gpus(self) -> tuple[PciAddress, ...]:
        """The GPUs of which something is kept, those of another boot included."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return ()
        found = []
        for name in names:
            try:
                found.append(address.parse(name.removesuffix(_SUFFIX)))
            except ValueError:
                continue
        return tuple(sorted(found))

    def _path(self, gpu: PciAddress) -> Path:
        return self._directory / f"{gpu}{_SUFFIX}"


def _word(kind: type[_Word], value: object) -> _Word | None:
    try:
        return kind(str(value)) if value is not None else None
    except ValueError:
        return None
