# SPDX-License-Identifier: Apache-2.0
"""The command `hack/e2e`: the scenarios of tests/e2e on a real node, from nothing to nothing.

What it brings up it takes down, however it ends: pytest's fixtures do so, and what they could not do, because they were
killed, is done here afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hack.realnode import binaries, cluster, layout, needs
from hack.realnode.errors import ClusterError

ROOT = Path(__file__).parent.parent
SCENARIO_S = 600
"""pytest's limit for one scenario, clusters included."""

EPILOG = """examples:
  hack/e2e                                       all scenarios on a new node, which is taken down afterwards
  hack/e2e -k one_gpu                            some of them; what is no option of ours goes to pytest
  hack/e2e --cluster dev --keep -k one_gpu       on the cluster `dev`, which stays for the next run
  hack/cluster --name dev down                   and is taken down so
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the scenarios; the exit status is that of pytest, or 1 where it did not come to that."""
    parser = argparse.ArgumentParser(
        prog="hack/e2e",
        description="Run the scenarios of tests/e2e with real pods on a real Kubernetes node on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cluster", default="e2e", metavar="NAME", help="name of the cluster (default: e2e)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running for the next run")
    parser.add_argument(
        "--clusters",
        type=int,
        metavar="N",
        help="share the files among N clusters NAMEa, NAMEb... side by side (default: 2; with --keep the one that is named)",
    )
    parser.add_argument(
        "--image", type=Path, metavar="ARCHIVE", help="the agent's image (default: hack/image makes it)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where logs of failures go (default: a new folder)")
    given, rest = parser.parse_known_args(arguments)
    try:
        return _run(given, rest)
    except ClusterError as error:
        print(f"hack/e2e: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace, rest: Sequence[str]) -> int:
    clusters = given.clusters or (1 if given.keep else 2)
    # A letter for the worker and a digit for clusters of another kind are added to the name.
    layout.Layout(given.cluster + "a0"[: 1 if clusters == 1 else 2])  # says what is wrong with the name
    needs.require_rights()
    needs.install()
    binaries.build()  # a quarter of an hour the first time, which no scenario's limit allows for
    image = given.image or _build_image()
    out = given.out or Path(tempfile.mkdtemp(prefix="nearfield-e2e-"))
    out.mkdir(parents=True, exist_ok=True)
    chosen = [argument for argument in rest if argument.startswith("tests/")]
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:randomly", "--timeout", str(SCENARIO_S), "--durations", "10"),
        *(("-n", str(clusters), "--dist", "loadfile", "--no-loadscope-reorder") if clusters > 1 else ()),
        *(() if chosen else ("tests/e2e",)),
        *rest,
    ]
    with tempfile.NamedTemporaryFile("r", prefix="nearfield-e2e-") as made:
        environment = {
            **os.environ,
            "NEARFIELD_E2E_CLUSTER": given.cluster,
            "NEARFIELD_E2E_KEEP": "1" if given.keep else "0",
            "NEARFIELD_E2E_IMAGE": str(image.absolute()),
            "NEARFIELD_E2E_OUT": str(out.absolute()),
            "NEARFIELD_E2E_MADE": made.name,
        }
        try:
            status = _pytest(command, environment)
        finally:
            _take_down(made.read().split(), kept=given.cluster if given.keep else None)
    if status != 0 and any(out.iterdir()):
        print(f"hack/e2e: the logs of what failed are in {out}", file=sys.stderr)
    elif not any(out.iterdir()):
        out.rmdir()
    return status


def _build_image() -> Path:
    with _started([str(ROOT / "hack/image")], stdout=subprocess.PIPE) as process:
        told, _ = process.communicate()
    if process.returncode != 0:
        raise ClusterError(f"hack/image ended with status {process.returncode}")
    return Path(told.decode().strip().splitlines()[-1])


def _pytest(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs it to its end. The first signal to us interrupts it, so that it takes its clusters down; the second one kills it."""
    with _started(command, environment=environment) as process:
        return process.wait()


@contextlib.contextmanager
def _started(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, to which our signals go."""
    process: subprocess.Popen[bytes] | None = None
    asked = 0

    def forward(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if process is not None:
            process.send_signal(signal.SIGINT if asked == 1 else signal.SIGKILL)

    numbers = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.add(signal.SIGHUP)
    # Before the child starts: where a shell has us ignore interrupts, as in the background, the child would ignore them too.
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, start_new_session=True)
        if asked:
            process.send_signal(signal.SIGINT)
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_down(made: Sequence[str], *, kept: str | None) -> None:
    """What pytest left of the clusters that it made."""
    for name in dict.fromkeys(made):
        if name != kept and name in cluster.names():
            cluster.down(name)


if __name__ == "__main__":
    sys.exit(main())
