# SPDX-License-Identifier: Apache-2.0
"""`python -m hack.bench`: run the parts, print a table, write JSON. Exit status 1 when a part failed; a missed target is a
finding, not a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hack.bench import apiserver, bench, machine, peer, report
from hack.bench.errors import BenchError
from hack.bench.parts import eight, growth, idle, loss, memory, prepare, probe, repair, startup, throughput

PARTS: Mapping[str, Callable[[bench.Bench], report.Part]] = {
    "prepare": prepare.run,
    "eight": eight.run,
    "throughput": throughput.run,
    "growth": growth.run,
    "startup": startup.run,
    "memory": memory.run,
    "idle": idle.run,
    "repair": repair.run,
    "loss": loss.run,
    "probe": probe.run,
}

LONGEST_BASE = 107 - len("/nfb-12345678/throughput/agent-100/plugins_registry/gpu.nearfield.dev-reg.sock")
"""sun_path of unix(7) takes 107 bytes and a NUL."""


def main(arguments: Sequence[str]) -> int:
    """Everything that was asked for, in the order of PARTS."""
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench", description="Measure the agent; see docs/performance.md."
    )
    parser.add_argument("--only", metavar="PART[,PART]", type=_parts, default=tuple(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few turns: shows that everything works, not how fast")
    parser.add_argument(
        "--rounds", metavar="N", type=_positive, help="turns of each latency (default: 200; 20 with --quick)"
    )
    parser.add_argument(
        "--idle", metavar="SECONDS", type=_positive, help="the window without work (default: 60; 10 with --quick)"
    )
    parser.add_argument(
        "--lean-peer", action="store_true", help="a Go driver that writes CDI files itself, not with the CDI library"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report, with every value, as JSON")
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, help="where records and CDI files lie (default: a temporary one)"
    )
    parser.add_argument("--keep", action="store_true", help="leave that directory, with the logs, in place")
    asked = parser.parse_args(arguments)
    base = Path(asked.directory or tempfile.gettempdir()).absolute()
    if not base.is_dir():
        parser.error(f"{base} is no directory")
    if len(os.fsencode(base)) > LONGEST_BASE:
        parser.error(f"{base} is too long for the sockets below it: at most {LONGEST_BASE} bytes")
    options = bench.QUICK if asked.quick else bench.Options()
    options = dataclasses.replace(
        options,
        rounds=asked.rounds or options.rounds,
        idle_s=asked.idle or options.idle_s,
        lean_peer=asked.lean_peer,
    )
    directory = Path(tempfile.mkdtemp(prefix="nfb-", dir=base))
    try:
        found, failed = _run(asked.only, options, directory)
    finally:
        if asked.keep:
            print(f"Everything is in {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.to_json(found), indent=1) + "\n")
    print(report.to_table(found), end="")
    return 1 if failed else 0


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _run(names: Sequence[str], options: bench.Options, directory: Path) -> tuple[report.Report, bool]:
    started = dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")
    print("Building the Go driver, if it is not there yet", file=sys.stderr)
    yardstick = peer.build()
    facts = machine.facts(directory, go=yardstick.go)
    parts = []
    failed = False
    for name, run in PARTS.items():
        if name not in names:
            continue
        print(f"Measuring: {name}", file=sys.stderr)
        # Every part has a server of its own: none inherits what another left in it.
        home = directory / name
        home.mkdir()
        try:
            with apiserver.ApiServer(home / "api") as server:
                parts.append(run(bench.Bench(options, home, server, yardstick)))
        except BenchError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
            parts.append(report.Part(name=name, left_out=(f"the rest of this part, as it failed: {error}",)))
    return (
        report.Report(started=started, machine=facts, options=dataclasses.asdict(options), parts=tuple(parts)),
        failed,
    )


def _terminated(number: int, _: object) -> None:
    """End as if by an error, so that everything started is ended too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main(sys.argv[1:]))
