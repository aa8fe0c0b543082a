# SPDX-License-Identifier: Apache-2.0
"""The command `hack/cluster`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hack.realnode import binaries, cluster, components, needs
from hack.realnode.errors import ClusterError

EPILOG = """examples:
  hack/cluster up                               a node of Kubernetes 1.37 in a network of its own
  hack/cluster kubectl get resourceslices
  hack/cluster --name old up --emulate 1.35     another one beside it, which serves the API of 1.35
  hack/cluster load agent.tar                   an image for its pods (docker or OCI archive)
  hack/cluster down                             nothing is left
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 done, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="hack/cluster",
        description="A one-node Kubernetes cluster of upstream components, on this machine, without a container engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="node", help="of the cluster; several can run side by side (default: node)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the components' programs, if these sources have not been built before")
    up = commands.add_parser("up", help="bring the node up, until it is Ready")
    up.add_argument("--emulate", choices=components.EMULATED, help="the release whose API is served")
    up.add_argument(
        "--gates", type=_switches, default={}, metavar="A=true,B=false", help="feature gates of all components"
    )
    up.add_argument(
        "--runtime-config", type=_switches, default={}, metavar="GROUP/VERSION=true,...", help="API groups to serve"
    )
    commands.add_parser("down", help="take it down and leave nothing")
    commands.add_parser("status", help="what runs")
    kubectl = commands.add_parser("kubectl", help="kubectl, as the administrator", add_help=False)
    kubectl.set_defaults(arguments=[])
    load = commands.add_parser("load", help="import an image into the node")
    load.add_argument("image", type=Path, metavar="ARCHIVE", help="a docker or OCI archive")
    logs = commands.add_parser("logs", help="what a component printed")
    logs.add_argument("component", choices=(*components.ORDER, "namespaces"))
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = (
        words[: words.index("kubectl") + 1] if "kubectl" in words else words
    )  # the rest is kubectl's, options included
    given = parser.parse_args(own)
    if given.command == "kubectl":
        given.arguments = words[len(own) :]
    try:
        return _run(given)
    except ClusterError as error:
        print(f"hack/cluster: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    match given.command:
        case "build":
            print(binaries.build())
        case "up":
            standing = cluster.up(
                cluster.Options(
                    name=given.name, emulate=given.emulate, gates=given.gates, runtime_config=given.runtime_config
                )
            )
            print(f"Node {standing.node_name} is Ready; hack/cluster --name {given.name} kubectl get nodes")
        case "down":
            cluster.down(given.name)
        case "status":
            return _status()
        case "kubectl":
            return _kubectl(given.name, given.arguments)
        case "load":
            cluster.attach(given.name).load(given.image)
        case "logs":
            sys.stdout.write(cluster.attach(given.name).log(given.component).read_text(errors="replace"))
    return 0


def _status() -> int:
    """All clusters: which components run, and since when they do not."""
    needs.require_root()
    for name in cluster.names():
        try:
            standing = cluster.attach(name)
        except ClusterError:
            print(f"{name}: not whole; hack/cluster --name {name} up, or down")
            continue
        states = (f"{component} {standing.pid(component) or 'ENDED'}" for component in components.ORDER)
        print(f"{name}: {', '.join(states)}")
    return 0


def _kubectl(name: str, arguments: Sequence[str]) -> int:
    """Becomes kubectl, so that its terminal, signals and exit status are ours."""
    standing = cluster.attach(name)
    with standing.entered():
        program = standing.binaries / "kubectl"
        os.execv(program, [str(program), f"--kubeconfig={standing.kubeconfig}", *arguments])


def _switches(text: str) -> dict[str, bool]:
    """Names and truth values, `A=true,B=false`."""
    switches = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        if not equals or not name or value not in {"true", "false"}:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=true or NAME=false")
        switches[name] = value == "true"
    return switches


if __name__ == "__main__":
    sys.exit(main())
