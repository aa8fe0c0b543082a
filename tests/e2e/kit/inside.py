# SPDX-License-Identifier: Apache-2.0
"""What a container sees of its GPUs: environment, device nodes, mounts. `SCRIPT` prints it, `parse` reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MARK = "=====nearfield "

SCRIPT = f"""
echo '{MARK}env'; env
echo '{MARK}nodes'; ls -l /dev | grep nvidia || true
echo '{MARK}caps'; ls /dev/nvidia-caps 2>/dev/null || true
echo '{MARK}mounts'; cat /proc/self/mountinfo
echo '{MARK}end'
"""
"""For a shell. A container that ends by itself (an init container) runs it and is read by its log."""

_NODE = re.compile(r"^c\S+ +\d+ +\S+ +\S+ +(?P<major>\d+), +(?P<minor>\d+) .* (?P<name>nvidia\S*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class View:
    """What one container sees."""

    env: Mapping[str, str]
    nodes: Mapping[str, tuple[int, int]]
    """Path -> major and minor number, of everything that begins with /dev/nvidia."""
    caps: tuple[str, ...]
    """The nodes below /dev/nvidia-caps, by which MIG instances are used."""
    mounts: Mapping[str, str]
    """Mount point -> what is mounted there, as mountinfo's root."""

    @property
    def gpu_nodes(self) -> tuple[str, ...]:
        """The nodes of single GPUs."""
        return tuple(sorted(path for path in self.nodes if re.fullmatch(r"/dev/nvidia\d+", path)))

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The UUIDs that its environment names."""
        return tuple(sorted(value for value in self.env.values() if value.startswith("GPU-")))

    @property
    def mig_uuids(self) -> tuple[str, ...]:
        """Those of MIG instances."""
        return tuple(sorted(value for value in self.env.values() if value.startswith("MIG-")))


def parse(text: str) -> View:
    """The view that `SCRIPT` printed."""
    parts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith(MARK):
            current = parts.setdefault(line.removeprefix(MARK), [])
        else:
            current.append(line)
    assert "end" in parts, f"not the whole view: {text!r}"
    env = dict(line.split("=", 1) for line in parts["env"] if "=" in line)
    nodes = {
        f"/dev/{match['name']}": (int(match["major"]), int(match["minor"]))
        for match in _NODE.finditer("\n".join(parts["nodes"]))
    }
    caps = tuple(sorted(f"/dev/nvidia-caps/{name}" for line in parts["caps"] for name in line.split()))
    mounts = {fields[4]: fields[3] for fields in (line.split() for line in parts["mounts"]) if len(fields) > 4}
    return View(env=env, nodes=nodes, caps=caps, mounts=mounts)
