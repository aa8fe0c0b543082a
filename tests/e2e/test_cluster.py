# SPDX-License-Identifier: Apache-2.0
"""hack/cluster itself, as people run it: killed at any point, two side by side, nothing left; and components that come and go.

The clusters of this file have no agent, so the checks of conftest.py that look at one are not made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.realnode import cluster as clusters
from hack.realnode import components, images, mounts
from hack.realnode.layout import Layout
from tests.e2e.kit import make
from tests.e2e.kit.sites import Settings

COMMAND = Path(__file__).parent.parent.parent / "hack/cluster"
CGROUPS = Path("/sys/fs/cgroup")
SEED = 20261129
LIMIT_S = 300.0

POD = (f"--image={make.BUSYBOX}", "--image-pull-policy=Never", "--restart=Never")
OUTSIDE = (
    *("/run/containerd", "/run/runc", "/run/cni", "/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet"),
    *("/var/log/pods", "/var/log/containers", "/etc/cdi", "/run/cdi", "/opt/containerd", "/opt/cni"),
    *("/etc/cni", "/etc/containerd", "/etc/kubernetes", "/usr/libexec/kubernetes", "/run/kubernetes"),
)
"""Where the components write on a node of their own."""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In the place of conftest's, which brings up a cluster with the agent."""


@dataclass(frozen=True)
class Pair:
    """A cluster that two commands were asked for at the same time, and what each of them said."""

    cluster: clusters.Cluster
    said: tuple[str, str]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Most tests of this file are about it."""
    name = named(8)
    clusters.down(name)
    commands = [
        subprocess.Popen([COMMAND, "--name", name, "up"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = ["".join(command.communicate()) for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said
    cluster = clusters.attach(name)
    cluster.kubectl("run", "first", *POD, "--command", "--", "sh", "-c", make.STUBBORN)
    wait_running(cluster, "first")
    yield Pair(cluster, (said[0], said[1]))
    cluster.down()
    require_nothing(name)


def test_a_second_up_waits_for_the_first(pair: Pair) -> None:
    assert any("Waiting for another command" in said for said in pair.said)
    assert all(f"Node {pair.cluster.node_name} is Ready" in said for said in pair.said)


@pytest.mark.parametrize("component", components.ORDER)
def test_a_component_comes_back(pair: Pair, component: str) -> None:
    cluster = pair.cluster
    before = cluster.pid(component)
    cluster.restart(component)
    between = cluster.pid(component)
    cluster.start(component)  # it runs: nothing to do
    assert cluster.pid(component) == between
    cluster.kill(component)
    assert cluster.pid(component) is None
    cluster.start(component)
    cluster.wait_ready(component)
    assert len({before, between, cluster.pid(component)}) == 3
    cluster.kubectl("run", f"after-{component}", *POD, "--command", "--", "sh", "-c", make.WAIT)
    wait_running(cluster, f"after-{component}")


def test_kubectl_has_its_terminal_its_input_and_its_status(pair: Pair) -> None:
    ours, theirs = pty.openpty()
    command = [str(COMMAND), "--name", pair.cluster.name, "kubectl", "exec", "-it", "first", "--", "tty"]
    done = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        assert done.returncode == 0, done.stderr
        assert terminal.read1().startswith(b"/dev/pts/")
    config_map = '{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"given"},"data":{"a":"b"}}'
    said = run(pair.cluster.name, "kubectl", "-n", "default", "create", "-f", "-", given=config_map)
    assert said == "configmap/given created\n"
    gone = subprocess.run(
        [COMMAND, "--name", pair.cluster.name, "kubectl", "exec", "first", "--", "sh", "-c", "exit 7"],
        capture_output=True,
        check=False,
    )
    assert gone.returncode == 7


def test_an_archive_is_loaded(pair: Pair, tmp_path: Path) -> None:
    archive = tmp_path / "busybox.tar"
    archive.write_bytes(images.archive("localhost/nearfield/other:e2e", images.busybox_layer(), entrypoint=[]))
    run(pair.cluster.name, "load", str(archive))
    pair.cluster.kubectl(
        "run", "other", *POD[1:], "--image=localhost/nearfield/other:e2e", "--command", "--", "sleep", "600"
    )
    wait_running(pair.cluster, "other")


def test_what_a_component_says_against_an_option_reaches_the_user() -> None:
    name = named(9)
    done = subprocess.run(
        [COMMAND, "--name", name, "up", "--gates", "NoSuchGate=true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unrecognized feature gate: NoSuchGate" in done.stderr
    assert "NoSuchGate" in run(name, "logs", "kube-apiserver")
    run(name, "down")
    require_nothing(name)


def test_killed_while_coming_up_or_going_down_it_leaves_nothing_in_the_way() -> None:
    """Each `up` begins with what the one before it, killed a little further on, has left; then each `down` likewise."""
    name = named(9)
    layout = Layout(name)
    outside, links, kernel = existing(OUTSIDE), network_links(), kernel_settings()
    chance = random.Random(SEED)
    for reached in points_up(layout):
        killed_at([name, "up"], reached, delay_s=chance.uniform(0, 0.3))
    run(name, "down")
    require_nothing(name)
    run(name, "up")
    assert f"{name}: Kubernetes v1.37.2, all components run" in run(name, "status")
    cluster = clusters.attach(name)
    cluster.kubectl("run", "stubborn", *POD, "--command", "--", "sh", "-c", make.STUBBORN)
    wait_running(cluster, "stubborn")
    freeze(layout)
    for reached in points_down(layout):
        killed_at([name, "down"], reached, delay_s=chance.uniform(0, 0.1))
    run(name, "down")
    require_nothing(name)
    assert (existing(OUTSIDE), network_links(), kernel_settings()) == (outside, links, kernel)


def test_an_up_that_is_interrupted_takes_down_what_it_has_brought_up() -> None:
    name = named(9)
    layout = Layout(name)
    with subprocess.Popen([COMMAND, "--name", name, "up"]) as command:
        while command.poll() is None and not (layout.pids / "kube-apiserver").exists():
            time.sleep(0.002)
        command.send_signal(signal.SIGINT)
    assert command.returncode == 130
    run(name, "down")  # its logs stay until then, as after any failure
    require_nothing(name)


def test_a_component_is_started_while_the_old_one_drains(pair: Pair) -> None:
    cluster = pair.cluster
    old = cluster.pid("kube-apiserver")
    stopping = threading.Thread(target=cluster.stop, args=("kube-apiserver",))
    stopping.start()
    while cluster.pid("kube-apiserver") is not None:
        time.sleep(0.002)
    cluster.start("kube-apiserver")
    stopping.join()
    cluster.wait_ready("kube-apiserver")
    assert cluster.pid("kube-apiserver") not in {old, None}


def test_the_older_of_two_goes_down_and_the_younger_does_not_notice(pair: Pair) -> None:
    """The last test of its file: the others' cluster is the older one."""
    older, younger = pair.cluster, clusters.up(clusters.Options(name=named(9)))
    try:
        before = {component: younger.pid(component) for component in components.ORDER}
        younger.kubectl("run", "second", *POD, "--command", "--", "sh", "-c", make.STUBBORN)
        wait_running(younger, "second")
        assert "pod/first\n" in older.kubectl("get", "pods", "-o", "name")
        assert younger.kubectl("get", "pods", "-o", "name") == "pod/second\n"
        older.down()
        require_nothing(older.name)
        assert {component: younger.pid(component) for component in components.ORDER} == before
        status = json.loads(younger.kubectl("get", "pod", "second", "-o", "json"))["status"]
        assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
        assert younger.kubectl("exec", "second", "--", "hostname") == "second\n"
    finally:
        younger.down()
    require_nothing(younger.name)


def freeze(layout: Layout) -> None:
    """Stops all containers, as runc does while it kills one. A kernel without a freezer has nothing to show here."""
    cgroup = layout.cgroup.lstrip("/")
    for file in CGROUPS.glob(f"freezer/{cgroup}/kubepods/freezer.state"):
        file.write_text("FROZEN")
    for file in CGROUPS.glob(f"{cgroup}/kubepods/cgroup.freeze"):
        file.write_text("1")


def named(number: int) -> str:
    """A cluster of ours; its name tells hack/e2e to take it down should we not come to it."""
    return f"{Settings.from_environment().name}{number}"


def wait_running(cluster: clusters.Cluster, pod: str) -> None:
    """Waits until a pod in the namespace `default` runs."""
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=240s")


def points_up(layout: Layout) -> Sequence[Callable[[], bool]]:
    """Places on the way up, in their order."""
    cgroup = layout.cgroup.lstrip("/")
    return (
        layout.config.exists,
        (layout.config / "tokens.csv").exists,
        layout.namespace_file.exists,
        lambda: any(CGROUPS.glob(f"{cgroup}/")) or any(CGROUPS.glob(f"*/{cgroup}/")),
        (layout.pids / "namespaces").exists,
        (layout.pids / "containerd").exists,
        (layout.certificates / "apiserver.crt").exists,
        (layout.pids / "kube-scheduler").exists,
        (layout.pids / "kubelet").exists,
        (layout.kubelet_dir / "plugins_registry").exists,
    )


def points_down(layout: Layout) -> Sequence[Callable[[], bool]]:
    """Places on the way down."""
    return (
        lambda: not layout.options.exists(),
        lambda: not (layout.pids / "kubelet").exists(),
        lambda: not (layout.pids / "kube-apiserver").exists(),
        lambda: not layout.namespace_file.exists(),
    )


def killed_at(words: Sequence[str], reached: Callable[[], bool], *, delay_s: float) -> None:
    """Runs a command and kills it a little after it has come so far; one that ends before that fails the test, if it failed."""
    process = subprocess.Popen(
        [COMMAND, "--name", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    with process:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and not reached() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
    assert process.returncode in {0, -signal.SIGKILL}, said.decode()


def run(name: str, *words: str, given: str = "") -> str:
    """What the command prints, which succeeds."""
    command = [str(COMMAND), "--name", name, *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def require_nothing(name: str) -> None:
    """No file, mount, namespace, cgroup or process of a cluster is there."""
    layout = Layout(name)
    cgroup = layout.cgroup.lstrip("/")
    left = [str(path) for path in (layout.root, layout.failed_logs, layout.namespace_file) if path.exists()]
    left += [str(path) for path in (*CGROUPS.glob(f"{cgroup}/"), *CGROUPS.glob(f"*/{cgroup}/"))]
    theirs = re.compile(rf"{re.escape(str(layout.root))}(/|\b)|\b{re.escape(layout.namespace)}\b".encode())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue  # dead; its parent, which may be the machine's init, has not collected it yet
            for file in ("cmdline", "cgroup", "mountinfo"):
                if process.name != str(os.getpid()) and theirs.search((process / file).read_bytes()):
                    left.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r} ({file})")
    assert left == []


def existing(paths: Sequence[str]) -> set[str]:
    """Those that are there."""
    return {path for path in paths if Path(path).exists()}


def network_links() -> set[str]:
    """The interfaces of the machine's own network."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def kernel_settings() -> dict[str, str]:
    """Those that kubelet would change."""
    return {name: Path(name).read_text() for name in mounts.KERNEL_SETTINGS if Path(name).exists()}
