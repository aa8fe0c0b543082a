# SPDX-License-Identifier: Apache-2.0
"""Images made of files of this machine: docker archives that containerd imports."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from hack.realnode import components, mounts
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

BUSYBOX_IMAGE = "localhost/nearfield/busybox:e2e"
BUSYBOX = Path("/bin/busybox")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def load(layout: Layout, archive: Path, *, binaries: Path) -> None:
    """Imports a docker or OCI archive into the cluster. Raises ClusterError."""
    with archive.open("rb") as content:
        _import(layout, content.read(), binaries=binaries)


def load_own(layout: Layout, *, binaries: Path) -> None:
    """Imports the sandbox's image and busybox's."""
    pause = _archive(components.PAUSE_IMAGE, layer=_layer({"pause": binaries / "pause"}, {}), entrypoint=["/pause"])
    applets = subprocess.run([str(BUSYBOX), "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{name}": "/bin/busybox" for name in applets if name != "busybox"}
    busybox = _archive(
        BUSYBOX_IMAGE, layer=_layer({"bin/busybox": BUSYBOX}, links, folders=("tmp", "root", "etc")), entrypoint=[]
    )
    for archive in (pause, busybox):
        _import(layout, archive, binaries=binaries)


def _import(layout: Layout, archive: bytes, *, binaries: Path) -> None:
    mounts.run(layout, str(binaries / "ctr"), "--namespace=k8s.io", "images", "import", "-", stdin=archive)


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


def _archive(image: str, *, layer: bytes, entrypoint: list[str]) -> bytes:
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
