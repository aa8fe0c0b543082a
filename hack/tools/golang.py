# SPDX-License-Identifier: Apache-2.0
"""Go: the machine's own where it is new enough, else a release fetched from the Go module proxy.

Go's releases are modules: golang.org/toolchain, one version a release and platform (https://go.dev/doc/toolchain). Such a module lacks
the executable bits, and its go.mod files are called _go.mod, as a module has but one; the go command mends both when it has
fetched one (cmd/go/internal/toolchain/select.go), and so does `_unpack`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from hack.tools import cache
from hack.tools.errors import ToolError

RELEASE = "1.26.8"
MODULE = "golang.org/toolchain"
SUMS: Mapping[str, str] = {
    "linux-amd64": "h1:ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM=",
    "linux-arm64": "h1:sYL/O6MqS68ML0kjsQ36WoYIpJqkw60TxizWUYUKQMc=",
}
"""Of RELEASE, as the checksum database has them (sum.golang.org/lookup/golang.org/toolchain@v0.0.1-go1.26.8.linux-amd64)."""

MACHINES: Mapping[str, str] = {"x86_64": "linux-amd64", "aarch64": "linux-arm64"}
PLACES = "/usr/local/go/bin:/usr/lib/go/bin"
"""Where Go is looked for when it is not on the PATH."""

DEFAULT_PROXY = "https://proxy.golang.org,direct"
_TIMEOUT_S = 60.0
"""Of one read from a proxy."""


def command(*, module: Path) -> str:
    """The Go command that can build `module`, the folder of a go.mod. Raises ToolError where there is none and none can be had."""
    needed = wanted(module / "go.mod")
    found = shutil.which("go") or shutil.which("go", path=PLACES)
    if found is None:
        said = "there is no `go` on the PATH"
    else:
        try:
            own = version(found, module=module)
            if _numbers(own) >= _numbers(needed):
                return found
            said = f"{found} will not do: it is {own}"
        except ToolError as error:
            said = f"{found} will not do: {error}"
    if _numbers(RELEASE) < _numbers(needed):
        raise ToolError(f"Go {needed} or newer is needed, and {said}: install it (https://go.dev/dl)")
    try:
        return str(installed())
    except ToolError as error:
        raise ToolError(
            f"Go {needed} or newer is needed, and {said}: install it (https://go.dev/dl). Fetching it failed: {error}"
        ) from error


def version(go: str, *, module: Path) -> str:
    """The version of a Go command in a module: an older one answers as the newer one that it would switch to. Raises ToolError."""
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"], cwd=module, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ToolError(f"{go} does not run: {error.strerror}") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise ToolError(done.stderr.strip() or f"{go} env GOVERSION ends with status {done.returncode}")
    return done.stdout.strip()


def wanted(go_mod: Path) -> str:
    """The version that a go.mod asks for."""
    found = re.search(r"^go (\S+)$", go_mod.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found is not None
    return found[1]


def installed() -> Path:
    """The go command of RELEASE in the cache, fetched now if it is not there. Raises ToolError."""
    here = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if here is None:
        raise ToolError(f"there is no checksum here for {sys.platform} on {platform.machine()}")
    folder = cache.folder() / f"go{RELEASE}.{here}"
    if not folder.is_dir():
        print(f"Fetching Go {RELEASE} (70 MB)", file=sys.stderr, flush=True)
        with tempfile.TemporaryFile() as archive:
            _fetch(f"v0.0.1-go{RELEASE}.{here}", archive)
            try:
                with zipfile.ZipFile(archive) as opened, cache.made(folder) as making:
                    if (sum_ := checksum(opened)) != SUMS[here]:
                        raise ToolError(f"{MODULE} of {here}: checksum {sum_}, and {SUMS[here]} is committed")
                    _unpack(opened, making)
            except (zipfile.BadZipFile, OSError) as error:
                raise ToolError(f"{MODULE} cannot be unpacked into {folder}: {error}") from error
    return folder / "bin" / "go"


def checksum(archive: zipfile.ZipFile) -> str:
    """The hash of a module's zip as go.sum has it: SHA-256 over a list of the SHA-256 of all files, in order of name
    (golang.org/x/mod/sumdb/dirhash, Hash1).
    """
    listed = hashlib.sha256()
    for name in sorted(archive.namelist()):
        listed.update(f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n".encode())
    return "h1:" + base64.b64encode(listed.digest()).decode()


def proxies(text: str) -> Iterator[tuple[str, bool]]:
    """The proxies of a GOPROXY, and for each whether after any failure the next one is asked, or only where this one has not got
    the module (https://go.dev/ref/mod#environment-variables). Toolchains come from proxies alone, so `direct` is none.
    """
    for name, separator in re.findall(r"([^,|]+)([,|]?)", text):
        if name == "off":
            return
        if name != "direct":
            yield name.strip().rstrip("/"), separator == "|"


def _fetch(version: str, target: IO[bytes]) -> None:
    said = "GOPROXY names no proxy"
    for proxy, any_failure in proxies(os.environ.get("GOPROXY") or DEFAULT_PROXY):
        try:
            with urllib.request.urlopen(f"{proxy}/{MODULE}/@v/{version}.zip", timeout=_TIMEOUT_S) as answer:
                shutil.copyfileobj(answer, target)
                return
        except (OSError, ValueError) as error:  # urllib's are OSErrors; a URL that is none is a ValueError
            # A password in the URL is for nobody's terminal.
            said = f"{re.sub(r'//[^/@]*@', '//', proxy)}: {error}"
            missing = isinstance(error, urllib.error.HTTPError) and error.code in {404, 410}
            if not (missing or any_failure):
                break
            target.seek(0)
            target.truncate()
    raise ToolError(said)


def _unpack(archive: zipfile.ZipFile, folder: Path) -> None:
    for name in archive.namelist():
        # golang.org/toolchain@v0.0.1-go1.26.8.linux-amd64/bin/go
        _, _, inside = name.partition("@")
        path = folder / inside.partition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        if path.name == "_go.mod":
            path.rename(path.with_name("go.mod"))
    for program in (*(folder / "bin").iterdir(), *(folder / "pkg" / "tool").rglob("*")):
        if program.is_file():
            program.chmod(0o755)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.removeprefix("go"))[:3])
