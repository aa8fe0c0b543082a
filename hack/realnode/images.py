# SPDX-License-Identifier: Apache-2.0
"""Images made of files of this machine: docker archives that containerd imports."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hack.realnode import components, locks, mounts
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

BUSYBOX_IMAGE = "localhost/nearfield/busybox:e2e"
BUSYBOX = Path("/bin/busybox")
ENGINES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "docker": (("image", "inspect", "{image}"), ("save", "--output={archive}", "{image}")),
    "podman": (("image", "exists", "{image}"), ("save", "--format=docker-archive", "--output={archive}", "{image}")),
    "buildah": (("inspect", "--type=image", "{image}"), ("push", "{image}", "docker-archive:{archive}:{image}")),
}
"""Container engine: how it is asked whether it has an image, and how it writes one into an archive."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def load(layout: Layout, image: Path | str, *, binaries: Path) -> None:
    """Imports a docker or OCI archive, or an image that a container engine of this machine has under that name. Raises ClusterError."""
    path = Path(image)
    if path.is_file():
        _import(layout, path, binaries=binaries)
        return
    if path.is_dir() or path.suffix in {".tar", ".gz", ".tgz"}:
        raise ClusterError(f"{image} is no archive of an image: a docker or OCI archive (.tar) is needed")
    with tempfile.TemporaryDirectory(prefix="image-", dir=layout.root) as folder:
        _import(layout, exported(str(image), Path(folder) / "image.tar"), binaries=binaries)


def load_own(layout: Layout, *, binaries: Path) -> None:
    """Imports the sandbox's image and busybox's."""
    pause = archive(components.PAUSE_IMAGE, _layer({"pause": binaries / "pause"}, {}), entrypoint=["/pause"])
    busybox = archive(BUSYBOX_IMAGE, busybox_layer(), entrypoint=[])
    with tempfile.TemporaryDirectory(prefix="image-", dir=layout.root) as folder:
        for name, content in (("pause.tar", pause), ("busybox.tar", busybox)):
            file = Path(folder) / name
            file.write_bytes(content)
            _import(layout, file, binaries=binaries)


def exported(image: str, path: Path) -> Path:
    """Has an engine write the image into an archive. The first engine that has it does. Raises ClusterError where none has it."""
    tried = []
    for engine, (has, export) in ENGINES.items():
        program = shutil.which(engine)
        if program is None:
            continue
        tried.append(engine)
        if locks.run([program, *(part.format(image=image) for part in has)]).returncode != 0:
            continue
        locks.output([program, *(part.format(image=image, archive=path) for part in export)])
        return path
    asked = f"{', '.join(tried)} has no image of that name" if tried else f"there is none of {', '.join(ENGINES)} here"
    raise ClusterError(f"{image} is no file, and {asked}")


def _import(layout: Layout, path: Path, *, binaries: Path) -> None:
    with path.open("rb") as content:
        mounts.run(layout, str(binaries / "ctr"), "--namespace=k8s.io", "images", "import", "-", stdin=content)


def busybox_layer() -> bytes:
    """busybox, and a link for each of its programs."""
    applets = locks.output([str(BUSYBOX), "--list"]).split()
    links = {f"bin/{name}": "/bin/busybox" for name in applets if name != "busybox"}
    return _layer({"bin/busybox": BUSYBOX}, links, folders=("tmp", "root", "etc"))


def _layer(files: dict[str, Path], links: dict[str, str], *, folders: Sequence[str] = ()) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder in sorted({*folders, *(str(Path(name).parent) for name in (*files, *links))} - {"."}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, source in files.items():
            content = source.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return data.getvalue()


def archive(image: str, layer: bytes, *, entrypoint: list[str]) -> bytes:
    """A docker archive of an image of one layer."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ClusterError(f"No image is made for {machine}; only for {', '.join(_ARCHITECTURES)}")
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES[machine],
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]).encode()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in (("config.json", config), ("layer.tar", layer), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()
