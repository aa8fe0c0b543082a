# SPDX-License-Identifier: Apache-2.0
"""A stand-in for nvidia-cuda-mps-control, behind the command line of the real one, in both its protocols.

`install` writes it into the driver root of a mock machine, as two programs of the real names: the kernel calls a process by the name
of its script. Below driver 615 it knows no protocol 3.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from discovery.mock import mpswire

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
SETTING = "mps.json"
FAULTS = "mps-faults"
V3_SINCE = 615
LINGER_S = 20.0

_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - the default that the documents give
_LOG = "/var/log/nvidia-mps"
_USAGE = """Usage: nvidia-cuda-mps-control [options] | <module> <verb> [arguments]
  -h, --help  -d, --daemon  -f, --foreground  -m, --multiuser
  -p, --protocol <2|3>  -q, --quit  -v, --version
Modules: server, namespace, client
"""
_MULTIUSER = ("-m", "--multiuser", "-multiuser-server")


def install(root: Path, node: Path | Mapping[str, Any]) -> Path:
    """Put the programs into a driver root. `node`: the state of a mock machine (nvml.json), or `driverVersion` and `devices`, its UUIDs.
    Where faults are put in: a file that is not there yet.
    """
    folder = root / "usr/bin"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    setting = {"state": str(node.absolute())} if isinstance(node, Path) else dict(node)
    (folder / SETTING).write_text(json.dumps(setting))
    home = str(Path(__file__).resolve().parent.parent.parent)
    for name, function in ((CONTROL, "main"), (SERVER, "server")):
        program = folder / f".{name}.new"
        program.write_text(
            f"#!{sys.executable} -IS\n# -multiuser-server\nimport sys\nsys.path.insert(0, {home!r})\n"
            f"from discovery.mock import mpscontrol\nsys.exit(mpscontrol.{function}(sys.argv))\n"
        )
        program.chmod(0o755)
        program.replace(folder / name)  # in one step: it may be running
    return folder / FAULTS


def main(arguments: Sequence[str]) -> int:
    """The program; its exit status."""
    folder = Path(arguments[0]).resolve().parent
    setting = json.loads((folder / SETTING).read_text())
    try:
        version = next(_texts(_node(setting), "driverVersion"), "0")
    except (OSError, ValueError) as error:
        return _fails(f"The driver is not there: {error}")
    newest = 3 if int(version.partition(".")[0]) >= V3_SINCE else 2
    given = list(arguments[1:])
    protocol = 2
    if given[:1] in (["-p"], ["--protocol"]):
        if newest < 3 or given[1:2] not in (["2"], ["3"]):
            return _fails("Unknown option -p")
        protocol = int(given[1])
        given = given[2:]
    options = {word for word in given if word.startswith("-") and "=" not in word}
    if options & {"-h", "--help"}:
        sys.stdout.write(_USAGE if newest == 3 else "Usage: nvidia-cuda-mps-control [-d | -f]\n")
        return 0
    if options & {"-v", "--version"}:
        sys.stdout.write(f"NVIDIA CUDA MPS Control {version} (stand-in)\n")
        return 0
    if options & {"-d", "-f", "--daemon", "--foreground"}:
        return _daemon(folder, setting, given, protocol if newest == 3 else 2)
    return _tell(given)


def server(arguments: Sequence[str]) -> int:
    """The program of a server, which ends some time after its daemon did, if nobody ends it; its exit status."""
    how, log = arguments[1:]
    with Path(log).open("a") as journal:
        if how != "lives":
            journal.write("[Server] no CUDA-capable device is detected\n")
            return 1
        journal.write("[Server] Ready\n")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    time.sleep(LINGER_S)
    return 0


def _daemon(folder: Path, setting: dict[str, Any], given: Sequence[str], protocol: int) -> int:
    if "-p" in given:
        protocol = int(given[given.index("-p") + 1])
    # A command is a process of its own, and loads nothing of the daemon.
    mpsdaemon = importlib.import_module("discovery.mock.mpsdaemon")
    running = mpsdaemon.Daemon(
        mpsdaemon.Setting(
            pipes=Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _PIPES)),
            log=Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", _LOG)),
            protocol=int(os.environ.get("CUDA_MPS_PROTOCOL_VERSION", protocol)),
            multiuser=any(word in given for word in _MULTIUSER),
            known=lambda: _known(setting),
            faults=folder / FAULTS,
            server=folder / SERVER,
        )
    )
    return int(running.run())


def _tell(given: Sequence[str]) -> int:
    """Send a command to the daemon that runs, whose protocol counts."""
    request: dict[str, Any]
    if given in (["-q"], ["--quit"]):
        request = {"quit": True}
    elif given:
        request = {"arguments": list(given)}
    else:
        request = {"lines": [line.strip() for line in sys.stdin if line.strip()]}
    path = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _PIPES)) / mpswire.SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline())
    except (OSError, ValueError):
        return _fails("Cannot find MPS control daemon process")
    sys.stdout.write(answer["out"])
    sys.stderr.write(answer["err"])
    return int(answer["status"])


def _node(setting: Mapping[str, Any]) -> Any:
    """What is known of the node now."""
    return json.loads(Path(setting["state"]).read_text()) if "state" in setting else setting


def _known(setting: Mapping[str, Any]) -> tuple[str, ...]:
    """The UUIDs of the GPUs and MIG instances of the node."""
    return (*setting.get("devices", ()), *_texts(_node(setting), "uuid"))


def _texts(value: Any, name: str) -> Iterator[str]:
    """Every text of a name in a document."""
    if isinstance(value, dict):
        if isinstance(text := value.get(name), str):
            yield text
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner, name)


def _fails(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1
