# SPDX-License-Identifier: Apache-2.0
"""`python -m hack.agentimage.measure [ARCHIVE]`: what the image weighs, whether its commands work, how soon its agent serves.

The image's files are unpacked and entered by chroot in a mount namespace of its own, with a read-only root, as the DaemonSet has
it; no engine takes part. Beside it, turn by turn, the same agent in this tree's venv. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hack.agentimage import build, contents, workspace
from hack.agentimage.errors import ImageError

MACHINE = "dgx-h100"
SHARED = "run/measured"
"""Where the image sees the folder in which its agent puts its sockets and its state."""

COMMANDS = (
    ("nearfield", "--help"),
    ("nearfield", "machines"),
    ("nearfield", "topo", "--mock", MACHINE),
    ("nearfield", "slices", "--mock", MACHINE, "--node-name", "n", "-o", "yaml"),
    ("nearfield", "config", "schema"),
    ("nearfield", "capture", "-o", "/tmp/capture.json.gz"),
    ("python3", "-c", "import driver.kube.loader, driver.standin.apiserver, pynvml, ssl; assert ssl.create_default_context().get_ca_certs()"),
    ("python3", "-c", "from discovery import ncclxml; ncclxml.parse(b'<system version=\"1\"><cpu numaid=\"0\"/></system>', name='n')"),
)  # fmt: skip
"""What has to work in the image; it fails with ImageError where one does not."""

ENTER = """
mount --bind "$1" "$1" && mount --bind "$2" "$1/$3" && mount -o remount,bind,ro "$1" && mount -t proc proc "$1/proc" \
&& mount --rbind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/tmp" || exit 125
root=$1; shift 3; exec chroot "$root" "$@"
"""
"""Arguments: the root, the shared folder, its place in the root, the command."""


def inside(root: Path, shared: Path, command: Sequence[str]) -> list[str]:
    """A command line that runs `command` in the image's root."""
    return [*workspace.ALONE, "sh", "-c", ENTER, "sh", str(root), str(shared), SHARED, *command]


def environment(image: contents.Image) -> dict[str, str]:
    """The variables of a container of the image, and sbin for `chroot`, which is looked up with them."""
    found = dict(variable.split("=", 1) for variable in image.config["config"]["Env"])
    return {**found, "PATH": f"{found['PATH']}:/usr/sbin:/sbin:/bin"}


def check(image: contents.Image, root: Path, shared: Path) -> None:
    """Runs COMMANDS. Raises ImageError."""
    for command in COMMANDS:
        done = subprocess.run(
            inside(root, shared, command), env=environment(image), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ImageError(f"`{' '.join(command)}` fails in the image with {done.returncode}: {done.stderr.strip()}")


def agent(shared: str) -> list[str]:
    """An agent whose every file lies in a folder, without an API server and without ports."""
    return [
        *("nearfield", "run", "--mock", MACHINE, "--node-name", "measured", "--http", "", "--inspect", ""),
        *("--kubelet-dir", shared, "--cdi-dir", f"{shared}/cdi", "--state-dir", f"{shared}/state"),
        *("--kubeconfig", f"{shared}/kubeconfig"),
    ]


def seconds_to_serving(command: Sequence[str], variables: dict[str, str], shared: Path) -> float:
    """From exec until kubelet could connect: the registration socket accepts. Raises ImageError when the agent ends before."""
    path = shared / "plugins_registry/gpu.nearfield.dev-reg.sock"
    with (shared / "log").open("wb") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not _accepts(path):
                if process.poll() is not None:
                    raise ImageError(
                        f"the agent ended with {process.returncode}: {(shared / 'log').read_text()[-2000:]}"
                    )
                time.sleep(0.002)
            return time.perf_counter() - began
        finally:
            _end(process)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(str(path))
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the agent itself, which `unshare` would not pass on."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(children[0]) if children and _is_unshare(process.pid) else process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def _is_unshare(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() == "unshare"


@contextlib.contextmanager
def homes() -> Iterator[Callable[[str], Path]]:
    """Makes folders for agents, short enough for the path of a socket, and removes them."""
    top = Path(tempfile.mkdtemp(prefix="nfi-"))

    def make(name: str) -> Path:
        home = top / name
        for folder in ("plugins", "plugins_registry", "cdi", "state"):
            (home / folder).mkdir(parents=True)
        (home / "kubeconfig").write_text(KUBECONFIG, encoding="utf-8")
        return home

    try:
        yield make
    finally:
        shutil.rmtree(top, ignore_errors=True)


KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: nowhere
clusters: [{name: nowhere, cluster: {server: 'http://127.0.0.1:9'}}]
users: [{name: nobody, user: {}}]
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
"""


def start(image: contents.Image, root: Path, home: Callable[[str], Path], turns: int) -> dict[str, list[float]]:
    """Seconds of each start, by where. The first start of each puts the mock machine up and is dropped."""
    shared, own = home("image"), home("venv")
    bin_folder = build.ROOT / ".venv/bin"
    taken: dict[str, list[float]] = {"image": []}
    if (bin_folder / "nearfield").exists():
        taken["venv"] = []
    for turn in range(turns + 1):
        for where, found in taken.items():
            if where == "image":
                command, variables, folder = inside(root, shared, agent(f"/{SHARED}")), environment(image), shared
            else:
                command, variables, folder = (
                    [str(bin_folder / "nearfield"), *agent(str(own))[1:]],
                    dict(os.environ),
                    own,
                )
            seconds = seconds_to_serving(command, variables, folder)
            if turn:
                found.append(seconds)
    return taken


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 with the reason on stderr when the image does not do what it must."""
    parser = argparse.ArgumentParser(prog="python -m hack.agentimage.measure", description="Measure the agent's image.")
    parser.add_argument("archive", nargs="?", type=Path, help="default: that of this tree, built if need be")
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="starts that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    workspace.end_by_exception_when_told_to()
    try:
        image = contents.Image.open(options.archive or build.archive())
        with workspace.temporary(workspace.images()) as scratch, homes() as home:
            root = scratch / "root"
            root.mkdir()
            image.unpack(root)
            (root / SHARED).mkdir()
            check(image, root, home("commands"))
            print(f"{'unpacked':<32}{sum(entry.size for entry in image.files().values()) / 1e6:8.1f} MB")
            print(f"{'layers, gzip':<32}{image.packed_bytes() / 1e6:8.1f} MB")
            for where, taken in start(image, root, home, options.turns).items():
                spread = f"(of {len(taken)}: {min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f})"
                print(f"{f'exec to serving, {where}':<32}{statistics.median(taken) * 1e3:8.0f} ms {spread}")
    except (ImageError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
