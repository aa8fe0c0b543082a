# SPDX-License-Identifier: Apache-2.0
"""A driver root on the node, with stand-ins for NVIDIA's programs that act on the agent's mock machine. A pod makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from driver import values
from tests.e2e.kit import agent as agents
from tests.e2e.kit import make
from tests.e2e.kit.api import Json
from tests.e2e.kit.space import Space

ROOT = "/var/lib/e2e-programs"
"""On the node."""

MOUNT = "/driver-root"
"""In a container that uses it."""

MACHINE = f"/var/lib/kubelet/plugins/{values.DRIVER_NAME}/state/mock"
"""The machine of the agent, on the node and in the agent's container."""

ENV = {"NEARFIELD_DRIVER_ROOT": ROOT, "NEARFIELD_DRIVER_ROOT_MOUNT": MOUNT}


def mount(template: Json) -> None:
    """The driver root in the agent's container, as the base has it."""
    container = agents.agent_container(template)
    container["volumeMounts"].append({"name": "e2e-programs", "mountPath": MOUNT, "readOnly": True})
    template["spec"]["volumes"].append({"name": "e2e-programs", "hostPath": {"path": ROOT, "type": "Directory"}})


INSTALL = """
import glob, os, re, shutil, sys
from discovery.mock import programs
machine = sys.argv[1]
version = re.search("[0-9]+[.][0-9]+[.][0-9]+", open(machine + "/proc/driver/nvidia/version").read())[0]
source = min((path for path in glob.glob("/lib/*-linux-gnu/lib*.so.*") if "/libc.so" not in path), key=os.path.getsize)
folder = "/root-of-driver/usr/lib/" + source.split("/")[2]
os.makedirs(folder, exist_ok=True)
for stem in ("libcuda", "libnvidia-ml"):
    shutil.copyfile(source, f"{folder}/{stem}.so.{version}")
    for link in (f"{folder}/{stem}.so.1", f"{folder}/{stem}.so"):
        if not os.path.lexists(link):
            os.symlink(f"{stem}.so.{version}", link)
sys.exit(programs.main(["/root-of-driver", machine]))
"""
"""The programs, and libraries of the version that the machine has loaded, without which no container gets a GPU."""

REMOVE = """
import os, shutil
for name in os.listdir("/root-of-driver"):
    shutil.rmtree("/root-of-driver/" + name)
"""


@contextlib.contextmanager
def installed(space: Space) -> Iterator[None]:
    """It is there for the block; the agent has its machine before."""
    _run(space, "install", INSTALL)
    try:
        yield
    finally:
        _run(space, "remove", REMOVE)


def _run(space: Space, name: str, code: str) -> None:
    volumes = [
        {"name": "folder", "hostPath": {"path": ROOT, "type": "DirectoryOrCreate"}},
        {"name": "machine", "hostPath": {"path": MACHINE, "type": "Directory"}},
    ]
    container = make.container(
        image=make.AGENT_IMAGE,
        command=["python3", "-c", code, MACHINE],
        volumeMounts=[
            {"name": "folder", "mountPath": "/root-of-driver"},
            {"name": "machine", "mountPath": MACHINE, "readOnly": True},
        ],
    )
    space.create(make.pod(name, containers=[container], volumes=volumes))
    space.succeeded(name)
    space.delete("Pod", name)
