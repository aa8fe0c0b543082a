# SPDX-License-Identifier: Apache-2.0
"""The pod by which an administrator sees whether a share is held (deploy/examples/checks), over a library that stands in for the driver's.

- memory that all processes share a limit of, that each has a limit of its own, that has none; a process that left MPS is refused, or is not
- a program that gets nothing proves nothing
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHECK = Path(__file__).parents[2] / "deploy/examples/checks/memory-of-a-share.yaml"
SHARE_MIB = 20480

CTYPES = '''
"""In the place of ctypes: a libcuda whose memory is counted in a file for all processes together, or for each."""
import os

LIMIT = int(os.environ["FAKE_LIMIT_MIB"]) << 20
FILE = os.environ["FAKE_FILE"] + (str(os.getpid()) if os.environ["FAKE_EACH"] == "1" else "")
LEFT_MPS = "CUDA_MPS_PIPE_DIRECTORY" not in os.environ

c_int = c_void_p = c_uint64 = lambda value=0: value
c_size_t = int
byref = lambda value: value


class Library:
    def __getattr__(self, name):
        refused = LEFT_MPS and os.environ["FAKE_EXCLUSIVE"] == "1" and name == "cuDevicePrimaryCtxRetain"
        return lambda *_: 46 if refused else 0

    def cuMemAlloc_v2(self, _, size):
        used = int(open(FILE).read()) if os.path.exists(FILE) else 0
        if used + size > LIMIT:
            return 2
        open(FILE, "w").write(str(used + size))
        return 0


def CDLL(name):
    assert name == "libcuda.so.1"
    return Library()
'''


def run(tmp_path: Path, *, limit_mib: int, each: bool = False, exclusive: bool = True) -> tuple[int, list[str]]:
    (pod,) = (body for body in yaml.safe_load_all(CHECK.read_text(encoding="utf-8")) if body["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    (share,) = (item["value"] for item in container["env"] if item["name"] == "SHARE_MIB")
    assert int(share) == SHARE_MIB
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "ctypes.py").write_text(CTYPES, encoding="utf-8")
    environment = {
        **os.environ,
        "SHARE_MIB": share,
        "CUDA_MPS_PIPE_DIRECTORY": "/run/x",
        "PYTHONPATH": str(shadow),
        "FAKE_LIMIT_MIB": str(limit_mib),
        "FAKE_FILE": str(tmp_path / "used"),
        "FAKE_EACH": str(int(each)),
        "FAKE_EXCLUSIVE": str(int(exclusive)),
    }
    done = subprocess.run(
        [sys.executable, *container["command"][1:]], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_share_that_is_held(tmp_path: Path) -> None:
    status, lines = run(tmp_path, limit_mib=SHARE_MIB)
    assert lines == [
        "one process: 20480 MiB",
        "a second one beside it: 0 MiB",
        "one without MPS: refused by cuDevicePrimaryCtxRetain with error 46",
        "together 20480 MiB of 20480 MiB: held",
    ]
    assert status == 0


@pytest.mark.parametrize(
    ("limit_mib", "each", "exclusive"), [(SHARE_MIB, True, True), (SHARE_MIB, True, False), (81559, False, True)]
)
def test_a_share_that_is_not_held(tmp_path: Path, limit_mib: int, each: object, exclusive: object) -> None:
    status, lines = run(tmp_path, limit_mib=limit_mib, each=bool(each), exclusive=bool(exclusive))
    assert status == 1
    assert lines[-1].endswith("NOT held")


def test_a_program_that_gets_nothing_proves_nothing(tmp_path: Path) -> None:
    status, lines = run(tmp_path, limit_mib=0)
    assert (status, lines[-1]) == (1, "together 0 MiB of 20480 MiB: NOT held")
