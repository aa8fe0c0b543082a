# SPDX-License-Identifier: Apache-2.0
"""The libraries of an NVIDIA driver reach a container so that a program finds them as it does on any machine: by dlopen, without
a cache, a path variable or a hook.

The driver root is made up: real shared libraries of glibc under the names of NVIDIA's. A pod of the node makes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.e2e.kit import agent, make
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

ROOT = "/var/lib/e2e-driver"
MOUNT = "/driver-root"

INSTALL = """
import ctypes, glob, os, shutil, sys
version = sys.argv[1]
libraries = [path for path in glob.glob("/lib/*-linux-gnu/lib*.so.*") if "/libc.so" not in path]
source = min(libraries, key=os.path.getsize)
folder = "/root-of-driver/usr/lib/" + source.split("/")[2]
os.makedirs(folder)
os.makedirs("/root-of-driver/usr/bin")
ctypes.CDLL(source)
for stem in ("libcuda", "libnvidia-ml"):
    shutil.copyfile(source, f"{folder}/{stem}.so.{version}")
    os.symlink(f"{stem}.so.{version}", f"{folder}/{stem}.so.1")
    os.symlink(f"{stem}.so.1", f"{folder}/{stem}.so")
with open("/root-of-driver/usr/bin/nvidia-smi", "w") as program:
    program.write(f"#!{sys.executable}\\nimport sys\\nprint('made-up driver', sys.argv[0])\\n")
os.chmod("/root-of-driver/usr/bin/nvidia-smi", 0o755)
"""

OPEN = """
import ctypes, json, os, subprocess
names = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]
opened = [name for name in names if ctypes.CDLL(name)]
maps = open("/proc/self/maps").read().split()
print(json.dumps({
    "opened": opened,
    "mapped": sorted({word for word in maps if "libcuda" in word or "libnvidia-ml" in word}),
    "path": os.environ.get("LD_LIBRARY_PATH"),
    "smi": subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout,
}))
"""

REFUSED = """
import ctypes
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(error)
"""


def python(name: str, code: str, *arguments: str, **more: object) -> Json:
    """A container that runs a program with glibc."""
    command = ["python3", "-c", code, *arguments]
    return make.container(name, image=make.AGENT_IMAGE, command=command, **more)  # type: ignore[arg-type]


def with_driver_root(template: Json) -> None:
    """The agent, told of a driver root, as the base has it."""
    container = agent.agent_container(template)
    container["volumeMounts"].append({"name": "driver-root", "mountPath": MOUNT, "readOnly": True})
    template["spec"]["volumes"].append({"name": "driver-root", "hostPath": {"path": ROOT, "type": "Directory"}})


@pytest.fixture
def installed(site: Site, space: Space) -> Iterator[str]:
    """The version of a made-up driver that is installed on the node, that of the mock machine's kernel module."""
    loaded = (site.disk.machine / "proc/driver/nvidia/version").read_text()
    version = next(word for word in loaded.split() if re.fullmatch(r"\d+\.\d+\.\d+", word))
    folder = {"name": "folder", "hostPath": {"path": ROOT, "type": "DirectoryOrCreate"}}
    mount = {"name": "folder", "mountPath": "/root-of-driver"}
    remove = "import shutil, os; [shutil.rmtree('/root-of-driver/' + name) for name in os.listdir('/root-of-driver')]"
    space.create(
        make.pod("install", containers=[python("main", INSTALL, version, volumeMounts=[mount])], volumes=[folder])
    )
    space.succeeded("install")
    site.agent.apply(env={"NEARFIELD_DRIVER_ROOT": ROOT, "NEARFIELD_DRIVER_ROOT_MOUNT": MOUNT}, edit=with_driver_root)
    yield version
    space.create(make.pod("remove", containers=[python("main", remove, volumeMounts=[mount])], volumes=[folder]))
    space.succeeded("remove")
    site.agent.apply()


def test_a_program_finds_the_libraries_of_the_driver(site: Site, space: Space, installed: str) -> None:
    space.create(
        make.template("one"),
        make.pod(
            "p",
            claims={"gpu": "template:one"},
            containers=[python("with", OPEN, claims=["gpu"]), python("without", REFUSED)],
        ),
    )
    space.succeeded("p")
    told = json.loads(space.logs("p", "with"))
    assert told["opened"] == ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]
    assert len(told["mapped"]) == 2
    assert told["path"] is None
    assert "made-up driver" in told["smi"]
    assert "libcuda.so.1: cannot open shared object file" in space.logs("p", "without")

    space.create(make.pod("q", claims={"gpu": "template:one"}))
    space.running("q")
    mounted = {point for point in space.look("q").mounts if installed in point}
    names = {f"{stem}.so.{installed}" for stem in ("libcuda", "libnvidia-ml")}
    assert {point.rpartition("/")[2] for point in mounted} == names
    assert len({point.rpartition("/")[0] for point in mounted}) == 2, "glibc searches two folders"
