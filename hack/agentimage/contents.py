# SPDX-License-Identifier: Apache-2.0
"""What is in a docker-archive: its configuration and its files, read without an engine."""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hack.agentimage.errors import ImageError

_BLOCK = 1 << 20
WHITEOUT = ".wh."
"""A layer's name for a file of a lower layer that it removes."""


@dataclass(frozen=True)
class Image:
    """An archive with one image in it."""

    archive: Path
    config: dict[str, Any]
    tags: tuple[str, ...]
    layers: tuple[str, ...]

    @classmethod
    def open(cls, archive: Path) -> Image:
        """Raises ImageError when it is no docker-archive with one image."""
        try:
            with tarfile.open(archive) as outer:
                (manifest,) = json.load(_member(outer, "manifest.json"))
                config = json.load(_member(outer, manifest["Config"]))
        except (tarfile.TarError, ValueError, KeyError) as error:
            raise ImageError(f"{archive} is no docker-archive with one image: {error}") from error
        return cls(archive, config, tuple(manifest["RepoTags"] or ()), tuple(manifest["Layers"]))

    def files(self) -> dict[PurePosixPath, tarfile.TarInfo]:
        """The entries of the root file system by their absolute paths, upper layers over lower ones."""
        found: dict[PurePosixPath, tarfile.TarInfo] = {}
        for layer in self._opened():
            for entry in layer:
                path = PurePosixPath("/", entry.name)
                if path.name.startswith(WHITEOUT):
                    gone = path.with_name(path.name.removeprefix(WHITEOUT))
                    found = {kept: value for kept, value in found.items() if gone not in (kept, *kept.parents)}
                else:
                    found[path] = entry
        return found

    def contents(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        """Every regular file of every layer with its content, hidden ones too: they are in what is pulled."""
        for layer in self._opened():
            for entry in layer:
                if entry.isfile():
                    content = layer.extractfile(entry)
                    assert content is not None
                    yield PurePosixPath("/", entry.name), content.read()

    def unpack(self, folder: Path) -> None:
        """The root file system, with owners and modes where we are root. The image is our own: its names are trusted."""
        for layer in self._opened():
            layer.extractall(folder, filter="fully_trusted")

    def packed_bytes(self) -> int:
        """What a registry stores and a node pulls: the layers, compressed with gzip as most tools do."""
        total = 0
        with tarfile.open(self.archive) as outer:
            for name in self.layers:
                packer = zlib.compressobj(6, wbits=31)
                stream = _member(outer, name)
                while block := stream.read(_BLOCK):
                    total += len(packer.compress(block))
                total += len(packer.flush())
        return total

    def _opened(self) -> Iterator[tarfile.TarFile]:
        with tarfile.open(self.archive) as outer:
            for name in self.layers:
                with tarfile.open(fileobj=_member(outer, name)) as layer:
                    yield layer


def _member(outer: tarfile.TarFile, name: str) -> Any:
    entry = outer.getmember(name)
    while entry.issym() or entry.islnk():  # podman and buildah name a layer twice, once by a link
        entry = outer.getmember(str(PurePosixPath(entry.linkname)).removeprefix("../"))
    found = outer.extractfile(entry)
    if found is None:
        raise KeyError(name)
    return found
