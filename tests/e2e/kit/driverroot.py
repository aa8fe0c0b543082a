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


@contextlib.contextmanager
def installed(space: Space) -> Iterator[None]:
    """It is there for the block."""
    _run(
        space,
        "install",
        "from discovery.mock import programs; sys.exit(programs.main(['/root-of-driver', sys.argv[1]]))",
    )
    try:
        yield
    finally:
        remove = "[shutil.rmtree('/root-of-driver/' + name) for name in os.listdir('/root-of-driver')]"
        _run(space, "remove", remove)


def _run(space: Space, name: str, code: str) -> None:
    folder = {"name": "folder", "hostPath": {"path": ROOT, "type": "DirectoryOrCreate"}}
    container = make.container(
        image=make.AGENT_IMAGE,
        command=["python3", "-c", f"import os, shutil, sys; {code}", MACHINE],
        volumeMounts=[{"name": "folder", "mountPath": "/root-of-driver"}],
    )
    space.create(make.pod(name, containers=[container], volumes=[folder]))
    space.succeeded(name)
    space.delete("Pod", name)
