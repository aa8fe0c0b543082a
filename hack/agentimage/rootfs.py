# SPDX-License-Identifier: Apache-2.0
"""Runs in the image's build, under the base's interpreter: copies what a Python program needs to run into an empty root.

`python3 rootfs.py --for VENV ROOT`. That is the interpreter with its standard library, byte-compiled, the shared libraries of
it and of VENV, the certificates of public authorities, and the few files of /etc that the C library reads. There is no shell and no
other program. Of Debian's package database it keeps the packages that own a copied file, with their licences, so that a scanner
finds what is there.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

LEFT_OUT = (
    *("__pycache__", "*-packages"),  # compiled anew; packages of the base's own, its pip among them
    *("ensurepip", "distutils", "lib2to3", "venv", "config-*", "*.a", "*.exe"),  # to build and install with
    *("idlelib", "pydoc_data", "turtle.py", "turtledemo", "tkinter", "_tkinter.*"),  # for people at a screen
    *("test", "tests", "_test*", "_ctypes_test*", "_xxtest*", "xxlimited*"),
    *("_dbm.*", "_gdbm.*", "nis.*", "ossaudiodev.*"),  # each loads libraries of its own, and nobody imports them
)
"""Of the standard library, folders and files that a service has no use for, as patterns."""

FOUND_BY_NAME = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2")
"""What the C library opens by itself when a thread ends or a name is looked up; ldd cannot know."""

SYSTEM_FILES = (
    "/etc/debian_version",
    "/etc/group",
    "/etc/host.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/usr/lib/ssl",
)
"""Copied where the base has them."""

FOLDERS = {"dev": 0o755, "proc": 0o755, "root": 0o700, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
"""Made empty; a runtime mounts over some."""

HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
"""For runtimes that bring no /etc/hosts; kubelet does."""

DPKG = Path("/var/lib/dpkg")


class Root:
    """The new root. Each path keeps its place, and each link on the way to it stays a link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.real: set[Path] = set()  # of the base, what was copied

    def add(self, path: Path) -> None:
        """Copies a file, or a folder with everything in it."""
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_symlink() or not file.is_dir():
                self._add(file)

    def _add(self, path: Path) -> None:
        place = self._through_links(path.parent) / path.name
        target = self._folder / place.relative_to("/")
        if target.exists() or target.is_symlink():
            return
        self._make(target.parent)
        if place.is_symlink():
            target.symlink_to(place.readlink())
            followed = place.parent / place.readlink()
            if followed.is_dir():
                self.add(followed.resolve())
            elif followed.exists():
                self._add(Path(os.path.abspath(followed)))  # noqa: PTH100 - resolve() would skip the next link
            return
        shutil.copy2(place, target)
        self.real.add(place)

    def _through_links(self, folder: Path) -> Path:
        """The folder itself, whatever links lead to it; the links are made in the new root too."""
        reached = Path("/")
        for part in folder.parts[1:]:
            here = reached / part
            if here.is_symlink():
                target = self._folder / here.relative_to("/")
                self._make(target.parent)
                if not target.is_symlink():
                    target.symlink_to(here.readlink())
                here = here.resolve()
            reached = here
        return reached

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: PurePath, content: str) -> None:
        """A file that the base does not have so."""
        target = self._folder / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")

    def make(self, folders: dict[str, int]) -> None:
        """Empty folders with their modes."""
        for name, mode in folders.items():
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)


def standard_library() -> Iterator[Path]:
    """Its files, less what is left out."""
    top = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        yield from (Path(folder, name) for name in sorted(files) if not _left_out(name))


def _left_out(name: str) -> bool:
    return any(PurePath(name).match(pattern) for pattern in LEFT_OUT)


def libraries(files: Sequence[Path]) -> set[Path]:
    """What the dynamic linker would load for these, itself included. Raises RuntimeError when something is not found."""
    listing = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    absent = re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)
    if absent:
        raise RuntimeError(f"libraries that the base lacks: {', '.join(sorted(set(absent)))}")
    found = {Path(path) for path in re.findall(r"(/\S+) \(0x[0-9a-f]+\)", listing)}
    beside = {library.parent for library in found}
    return found | {folder / name for folder in beside for name in FOUND_BY_NAME if (folder / name).exists()}


def packages_of(files: set[Path]) -> set[str]:
    """The Debian packages that own these files."""
    owners: set[str] = set()
    for listing in (DPKG / "info").glob("*.list"):
        owned = {Path(line) for line in listing.read_text(encoding="utf-8").splitlines()}
        if any(path in files or (path.parent.resolve() / path.name) in files for path in owned):
            owners.add(listing.stem)
    return owners


def keep_packages(root: Root) -> None:
    """The database and the licences of the packages of which something was copied."""
    owners = packages_of(root.real)
    stanzas = (DPKG / "status").read_text(encoding="utf-8").split("\n\n")
    kept = [stanza.strip("\n") for stanza in stanzas if _names(stanza) & owners]
    root.write(DPKG / "status", "".join(f"{stanza}\n\n" for stanza in kept))
    for owner in owners:
        licence = Path("/usr/share/doc", owner.split(":")[0], "copyright")
        if licence.exists():
            root.add(licence)


def _names(stanza: str) -> set[str]:
    """A package's name as its listing's name has it: with the architecture where several may be installed."""
    fields = dict(re.findall(r"^(Package|Architecture): (\S+)$", stanza, re.MULTILINE))
    name = fields.get("Package", "")
    return {name, f"{name}:{fields.get('Architecture', '')}"}


def main(arguments: Sequence[str]) -> int:
    """Raises when the base lacks something."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--for", dest="venv", type=Path, required=True)
    parser.add_argument("root", type=Path)
    options = parser.parse_args(arguments)
    root = Root(options.root)

    interpreter = Path(shutil.which("python3") or sys.executable)
    root.add(interpreter)
    library = sorted(standard_library())
    for file in library:
        root.add(file)
    loaded = [interpreter.resolve(), *(file for file in (*library, *options.venv.rglob("*")) if ".so" in file.suffixes)]
    for file in sorted(libraries(loaded)):
        if not file.is_relative_to(options.venv):
            root.add(file)
    for name in SYSTEM_FILES:
        if os.path.lexists(name):
            root.add(Path(name))
    if DPKG.is_dir():
        keep_packages(root)
    root.write(Path("/etc/hosts"), HOSTS)
    root.make(FOLDERS)

    compiled = compileall.compile_dir(
        options.root,
        quiet=1,
        stripdir=str(options.root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return 0 if compiled else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
