# SPDX-License-Identifier: Apache-2.0
"""Go, found or fetched.

- the machine's own, where it is new enough; asked inside the module
- none, or an old one: the release from a module proxy, once, checked and made to run
- a wrong checksum, no proxy, a proxy that has not got it: nothing stays in the cache, and the message says what to do
- GOPROXY is read as the go command reads it
"""

from __future__ import annotations

import base64
import hashlib
import platform
import subprocess
import zipfile
from pathlib import Path

import pytest

from hack.tools import cache, golang
from hack.tools.errors import ToolError
from tests.fakes.programs import Programs

PREFIX = "golang.org/toolchain@v0.0.1-go1.26.8.linux-amd64/"
FILES = {
    "bin/go": "#!/bin/sh\necho go1.26.8\n",
    "pkg/tool/linux_amd64/compile": "#!/bin/sh\n",
    "src/_go.mod": "module std\n",
    "src/fmt/print.go": "package fmt\n",
}


@pytest.fixture
def module(tmp_path: Path) -> Path:
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "go.mod").write_text("module x\n\ngo 1.26.0\n\ntoolchain go1.99.9\n")
    return folder


@pytest.fixture
def bare(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A machine without Go and with an empty cache."""
    monkeypatch.setattr(golang, "PLACES", str(programs.folder))
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GOPROXY", "off")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return programs


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module proxy in a folder that has the release, with the checksum that the project expects."""
    versions = tmp_path / "proxy" / "golang.org" / "toolchain" / "@v"
    versions.mkdir(parents=True)
    with zipfile.ZipFile(versions / "v0.0.1-go1.26.8.linux-amd64.zip", "w") as archive:
        for name, content in FILES.items():
            archive.writestr(PREFIX + name, content)
    lines = "".join(
        f"{hashlib.sha256(content.encode()).hexdigest()}  {PREFIX}{name}\n" for name, content in sorted(FILES.items())
    )
    h1 = "h1:" + base64.b64encode(hashlib.sha256(lines.encode()).digest()).decode()
    monkeypatch.setattr(golang, "SUMS", {"linux-amd64": h1})
    return tmp_path / "proxy"


@pytest.mark.parametrize("version", ["go1.26.0", "go1.30rc1", "go1.26.8"])
def test_the_machines_own(bare: Programs, module: Path, version: str) -> None:
    own = bare.write("go", f'[ "$PWD" = "{module}" ] && echo {version}')
    assert golang.command(module=module) == str(own)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no `go` on the PATH"),
        ("echo go1.19.2", "it is go1.19.2"),
        ("echo toolchain not available >&2; exit 1", "toolchain not available"),
    ],
)
def test_no_go_that_will_do_and_none_to_be_had(bare: Programs, module: Path, script: str | None, said: str) -> None:
    if script is not None:
        bare.write("go", script)
    with pytest.raises(ToolError, match=r"Go 1\.26\.0 or newer is needed.*GOPROXY names no proxy") as error:
        golang.command(module=module)
    assert said in str(error.value)


@pytest.mark.usefixtures("bare")
def test_a_module_that_needs_a_newer_go_than_the_release(module: Path, proxy: Path) -> None:
    (module / "go.mod").write_text("module x\n\ngo 1.99.1\n")
    with pytest.raises(ToolError, match=r"Go 1\.99\.1 or newer is needed"):
        golang.command(module=module)
    assert proxy.is_dir()


@pytest.mark.usefixtures("bare")
def test_fetched_once_and_made_to_run(module: Path, proxy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPROXY", f"{proxy.as_uri()},direct")
    command = golang.command(module=module)
    assert subprocess.run([command], capture_output=True, text=True, check=True).stdout == "go1.26.8\n"
    root = Path(command).parent.parent
    assert (root / "pkg/tool/linux_amd64/compile").stat().st_mode & 0o111
    assert not (root / "src/fmt/print.go").stat().st_mode & 0o111
    assert (root / "src/go.mod").read_text() == "module std\n"
    monkeypatch.setenv("GOPROXY", "off")
    assert golang.command(module=module) == command
    assert [path.name for path in cache.folder().iterdir()] == [root.name]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("damage", ["content", "zip"])
def test_what_is_not_the_release_is_not_kept(
    module: Path, proxy: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = next(proxy.rglob("*.zip"))
    if damage == "content":
        with zipfile.ZipFile(archive, "a") as opened:
            opened.writestr(f"{PREFIX}bin/evil", "#!/bin/sh\n")
    else:
        archive.write_bytes(b"<html>a portal of some network</html>")
    monkeypatch.setenv("GOPROXY", proxy.as_uri())
    with pytest.raises(ToolError, match=r"is committed" if damage == "content" else r"not a zip"):
        golang.command(module=module)
    assert list(cache.folder().glob("*")) == []


@pytest.mark.usefixtures("bare")
def test_a_failing_proxy_is_passed_over_only_where_goproxy_says_so(
    module: Path, proxy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = (proxy / "none").as_uri()
    monkeypatch.setenv("GOPROXY", f"{none},{proxy.as_uri()}")
    with pytest.raises(ToolError, match="none"):
        golang.command(module=module)
    monkeypatch.setenv("GOPROXY", f"{none}|{proxy.as_uri()}")
    assert golang.command(module=module).endswith("/bin/go")


@pytest.mark.usefixtures("bare")
def test_a_password_is_not_shown(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPROXY", "https://me:secret@127.0.0.1:1/")
    with pytest.raises(ToolError) as error:
        golang.command(module=module)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://a,direct", [("https://a", False)]),
        ("https://a/|https://b", [("https://a", True), ("https://b", False)]),
        ("https://a,off,https://b", [("https://a", False)]),
        ("direct", []),
        ("", []),
    ],
)
def test_goproxy(text: str, expected: list[tuple[str, bool]]) -> None:
    assert list(golang.proxies(text)) == expected


@pytest.mark.usefixtures("bare")
def test_a_platform_without_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ToolError, match="riscv64"):
        golang.installed()
