# SPDX-License-Identifier: Apache-2.0
"""The command `hack/cluster`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hack.realnode import binaries, cluster, components, hollow, kubectl, needs
from hack.realnode.errors import ClusterError
from hack.realnode.layout import Layout

EPILOG = """examples:
  hack/cluster up                               a node of Kubernetes 1.37 in a network of its own
  hack/cluster kubectl get resourceslices
  hack/cluster --name old up --emulate 1.35     another one beside it, which serves the API of 1.35
  hack/cluster up --hollow 3 --machine dgx-h100 --hollow 1 --machine gb200-tray
                                                with four more nodes, which have an agent and no containers
  hack/cluster load agent.tar                   an image for its pods: an archive, or the name of one that
                                                docker, podman or buildah has
  hack/cluster down                             nothing is left

exit status: 0 done, 1 failed, 2 usage; of status: 0 where the cluster of that name stands, 1 where it does not;
of kubectl: its own
"""

DEFAULT_MACHINE = "dgx-h100"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 done, 1 failed, 2 usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows `kubectl` is kubectl's, options included.
    own = words[: words.index("kubectl") + 1] if "kubectl" in words else words
    known = parser()
    given = known.parse_args(own)
    if given.command in {"up", "hollow"} and len(given.machine) > len(given.hollow):
        known.error("--machine tells the machine of the --hollow before it")
    try:
        return _run(given, words[len(own) :])
    except (ClusterError, OSError) as error:
        print(f"hack/cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    parser = argparse.ArgumentParser(
        prog="hack/cluster",
        description="A one-node Kubernetes cluster of upstream components, on this machine, without a container engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--name", default="node", help="of the cluster; several can run side by side (default: node)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the components' programs, if these sources have not been built before")
    up = commands.add_parser("up", help="bring the node up, until it is Ready", allow_abbrev=False)
    up.add_argument("--emulate", choices=components.EMULATED, help="the release whose API is served")
    up.add_argument(
        "--gates", type=_switches, default={}, metavar="A=true,B=false", help="feature gates of all components"
    )
    up.add_argument(
        "--runtime-config",
        type=_switches,
        default={},
        metavar="GROUP/VERSION=true,...",
        help="API groups to serve; those that a gate of --gates needs are served anyhow",
    )
    up.add_argument("--audit", action="store_true", help="the API server keeps a log of all writes")
    more = commands.add_parser("hollow", help="add hollow nodes to a cluster that stands", allow_abbrev=False)
    for command in (up, more):
        command.add_argument(
            "--hollow",
            type=_count,
            action="append",
            default=[],
            metavar="N",
            help="add N nodes that have a stand-in for kubelet and the agent, but no containers; can be repeated",
        )
        command.add_argument(
            "--machine",
            action="append",
            default=[],
            metavar="M",
            help=f"the mock machine of the --hollow before it (default: {DEFAULT_MACHINE})",
        )
    down = commands.add_parser("down", help="take it down and leave nothing", allow_abbrev=False)
    down.add_argument("--all", action="store_true", help="every cluster of this machine")
    commands.add_parser("status", help="which clusters there are, and what runs of them")
    commands.add_parser("kubectl", help="kubectl, as the administrator", add_help=False)
    load = commands.add_parser("load", help="import an image into the node")
    load.add_argument(
        "image", metavar="IMAGE", help="a docker or OCI archive, or an image of docker, podman or buildah"
    )
    logs = commands.add_parser("logs", help="what a component printed, also where the cluster did not come up")
    logs.add_argument("-f", "--follow", action="store_true", help="and what it will print")
    logs.add_argument("component", metavar="COMPONENT", help=f"{', '.join(components.ORDER)}, agent-N of a hollow node")
    return parser


def _run(given: argparse.Namespace, rest: Sequence[str]) -> int:
    match given.command:
        case "build":
            print(binaries.build())
        case "up":
            _up(given)
        case "hollow":
            needs.require_root()
            for name in cluster.attach(given.name).add_hollow(machines(given) or [DEFAULT_MACHINE]):
                print(name)
        case "down":
            needs.require_root()
            for name in cluster.names() if given.all else (given.name,):
                cluster.down(name)
        case "status":
            return _status(given.name)
        case "kubectl":
            return _kubectl(given.name, rest)
        case "load":
            cluster.attach(given.name).load(given.image)
        case "logs":
            return _logs(given.name, given.component, follow=given.follow)
    return 0


def _up(given: argparse.Namespace) -> None:
    standing = cluster.up(
        cluster.Options(
            name=given.name,
            emulate=given.emulate,
            gates=given.gates,
            runtime_config=given.runtime_config,
            audit=given.audit,
            hollow=machines(given),
        )
    )
    print(f"Node {standing.node_name} is Ready; hack/cluster --name {given.name} kubectl get nodes")


def _status(wanted: str) -> int:
    """Prints what runs of all clusters; 0 where the wanted one stands."""
    needs.require_root()
    Layout(wanted)  # says what is wrong with the name
    whole = {name: _print_status(name) for name in cluster.names()}
    if wanted not in whole:
        print(f"{wanted}: not there")
    return 0 if whole.get(wanted) else 1


def _print_status(name: str) -> bool:
    try:
        standing = cluster.attach(name)
    except ClusterError:
        print(f"{name}: not whole (coming up, going down, or interrupted); hack/cluster --name {name} up, or down")
        return False
    ended = [component for component in standing.components if standing.pid(component) is None]
    release = f" with the API of {standing.options.emulate}" if standing.options.emulate else ""
    state = f"these do not run: {', '.join(ended)}" if ended else "all components run"
    print(f"{name}: Kubernetes {binaries.KUBERNETES}{release}, {state}")
    for component in standing.components:
        print(f"  {component:24} {standing.pid(component) or '-'}")
    for node in hollow.nodes(standing.layout):
        print(f"  hollow node {standing.layout.hollow_name(node.number):12} {node.machine}")
    return not ended


def _kubectl(name: str, arguments: Sequence[str]) -> int:
    """Becomes kubectl, so that its terminal, signals and exit status are ours."""
    standing = cluster.attach(name)
    command = [*kubectl.command(standing.layout, standing.binaries), *arguments]
    with standing.entered():
        os.execve(command[0], command, kubectl.environment(standing.layout))


def _logs(name: str, component: str, *, follow: bool) -> int:
    """Becomes tail. Reads what is there, whether the cluster runs or not."""
    needs.require_root()
    layout = Layout(name)
    for folder in (layout.logs, layout.failed_logs):
        if (folder / f"{component}.log").is_file():
            options = ["--lines=+1", *(["--follow=name"] if follow else [])]
            os.execvp("tail", ["tail", *options, str(folder / f"{component}.log")])
    there = sorted(path.stem for folder in (layout.logs, layout.failed_logs) for path in folder.glob("*.log"))
    have = f"there are {', '.join(there)}" if there else "it has none at all"
    raise ClusterError(f"Cluster {name} has no log of {component}; {have}")


def machines(given: argparse.Namespace) -> tuple[str, ...]:
    """One for each hollow node."""
    each = [*given.machine, *([DEFAULT_MACHINE] * (len(given.hollow) - len(given.machine)))]
    return tuple(machine for count, machine in zip(given.hollow, each, strict=True) for _ in range(count))


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= hollow.NODES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {hollow.NODES_MAX}")
    return int(text)


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
