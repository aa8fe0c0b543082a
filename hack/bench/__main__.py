# SPDX-License-Identifier: Apache-2.0
"""`python -m hack.bench`: run the parts, print a table, write JSON. Exit status 1 when a part failed; a missed target is a
finding, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hack.bench import bench, machine, peer, realnode, report, standin
from hack.bench.errors import BenchError
from hack.bench.parts import (
    change,
    eight,
    growth,
    idle,
    impossible,
    loss,
    memory,
    mig,
    pods,
    prepare,
    probe,
    repair,
    rest,
    shares,
    sizes,
    startup,
    throughput,
)
from hack.realnode import binaries, cluster
from hack.realnode.errors import ClusterError

PARTS: Mapping[str, Callable[[bench.Bench], report.Part]] = {
    "prepare": prepare.run,
    "eight": eight.run,
    "mig": mig.run,
    "shares": shares.run,
    "throughput": throughput.run,
    "growth": growth.run,
    "startup": startup.run,
    "memory": memory.run,
    "idle": idle.run,
    "repair": repair.run,
    "loss": loss.run,
    "change": change.run,
    "probe": probe.run,
    "sizes": sizes.run,
}
"""Parts that run in any environment."""

REAL_PARTS: Mapping[str, Callable[[realnode.NodeBench], report.Part]] = {
    "pods": pods.run,
    "impossible": impossible.run,
    "rest": rest.run,
}
"""Parts that need a real node."""

STAND_IN = tuple(PARTS)
REAL = tuple(name for name in (*PARTS, *REAL_PARTS) if name not in {"throughput", "idle", "sizes"})
"""What runs when nothing is chosen. On a real node `rest` is a longer `idle`, and the size of a mock changes nothing."""

CLUSTER = "bench"
STAND_INS = "between stand-ins"
REAL_NODE = f"a real node, Kubernetes {binaries.KUBERNETES}"

LONGEST_BASE = 107 - len("/nfb-12345678/throughput/agent-100/plugins_registry/gpu.nearfield.dev-reg.sock")
"""sun_path of unix(7) takes 107 bytes and a NUL."""


def main(arguments: Sequence[str]) -> int:
    """Everything that was asked for, in the order of PARTS."""
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench", description="Measure the agent; see docs/performance.md."
    )
    parser.add_argument("--only", metavar="PART[,PART]", type=_parts, help=", ".join((*PARTS, *REAL_PARTS)))
    parser.add_argument("--real", action="store_true", help="on a real node (hack/cluster); it takes root")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        default=CLUSTER,
        help=f"of the real node (default: {CLUSTER}); one that stands is used and left standing",
    )
    parser.add_argument("--quick", action="store_true", help="few turns: shows that everything works, not how fast")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=_positive,
        help="turns of each latency (default: 200, on a real node 150; 20 with --quick)",
    )
    parser.add_argument(
        "--idle",
        metavar="SECONDS",
        type=_positive,
        help="the window without work (default: 60, on a real node 600; 10 and 20 with --quick)",
    )
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the targets as a table for the docs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report, with every value, as JSON")
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, help="where records and CDI files lie (default: a temporary one)"
    )
    parser.add_argument("--keep", action="store_true", help="leave that directory, with the logs, in place")
    asked = parser.parse_args(arguments)
    names = asked.only or (REAL if asked.real else STAND_IN)
    if not asked.real and not REAL_PARTS.keys().isdisjoint(names):
        parser.error(f"{', '.join(REAL_PARTS)} need --real")
    base = Path(asked.directory or tempfile.gettempdir()).absolute()
    if not base.is_dir():
        parser.error(f"{base} is no directory")
    if len(os.fsencode(base)) > LONGEST_BASE:
        parser.error(f"{base} is too long for the sockets below it: at most {LONGEST_BASE} bytes")
    options = bench.QUICK if asked.quick else bench.REAL if asked.real else bench.Options()
    options = dataclasses.replace(
        options,
        rounds=asked.rounds or options.rounds,
        idle_s=asked.idle or options.idle_s,
        rest_s=asked.idle or options.rest_s,
    )
    directory = Path(tempfile.mkdtemp(prefix="nfb-", dir=base))
    try:
        with contextlib.ExitStack() as stack:
            node = stack.enter_context(_real_node(asked.cluster)) if asked.real else None
            found, failed = _run(names, options, directory, node)
    except (BenchError, ClusterError) as error:
        print(f"python -m hack.bench: {error}", file=sys.stderr)
        return 1
    finally:
        if asked.keep:
            print(f"Everything is in {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.to_json(found), indent=1) + "\n")
    if asked.markdown is not None:
        asked.markdown.write_text(report.to_markdown(found))
    print(report.to_table(found), end="")
    return 1 if failed else 0


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in {*PARTS, *REAL_PARTS}:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join((*PARTS, *REAL_PARTS))}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@contextlib.contextmanager
def _real_node(name: str) -> Iterator[realnode.RealNode]:
    """The cluster of that name, brought up if it does not stand, and then taken down again."""
    stood = name in cluster.names()
    print(f"Bringing up the real node {name}, if it does not stand", file=sys.stderr)
    standing = cluster.up(cluster.Options(name=name, audit=True))
    try:
        with realnode.RealNode(standing) as node:
            yield node
    finally:
        if not stood:
            standing.down()


def _run(
    names: Sequence[str], options: bench.Options, directory: Path, node: realnode.RealNode | None
) -> tuple[report.Report, bool]:
    started = dt.datetime.now(tz=dt.UTC)
    print("Building the Go driver, if it is not there yet", file=sys.stderr)
    yardstick = peer.build()
    facts = machine.facts(directory, go=yardstick.go, environment=STAND_INS if node is None else REAL_NODE)
    parts = []
    failed = False
    for name in (*PARTS, *REAL_PARTS):
        if name not in names:
            continue
        passed = dt.datetime.now(tz=dt.UTC) - started
        print(f"{passed.total_seconds():6.0f} s: measuring {name}", file=sys.stderr, flush=True)
        home = directory / name
        home.mkdir()
        try:
            parts.append(_part(name, options, home, node, yardstick))
        except (BenchError, ClusterError) as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
            parts.append(report.Part(name=name, left_out=(f"the rest of this part, as it failed: {error}",)))
    return (
        report.Report(
            started=started.isoformat(timespec="seconds"),
            machine=facts,
            options=dataclasses.asdict(options),
            parts=tuple(parts),
        ),
        failed,
    )


def _part(
    name: str, options: bench.Options, home: Path, node: realnode.RealNode | None, yardstick: peer.Peer
) -> report.Part:
    """One part, which inherits nothing that another left in its server."""
    if node is None:
        with standin.StandIn(home / "api") as server:
            return PARTS[name](bench.Bench(options, home, server, yardstick))
    try:
        setting = realnode.NodeBench(options, home, node, yardstick)
        return PARTS[name](setting) if name in PARTS else REAL_PARTS[name](setting)
    finally:
        node.remove_traces()


def _terminated(number: int, _: object) -> None:
    """End as if by an error, so that everything started is ended too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main(sys.argv[1:]))
