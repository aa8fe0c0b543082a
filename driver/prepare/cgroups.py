# SPDX-License-Identifier: Apache-2.0
"""Where kubelet keeps the cgroups of pods: found, never assumed.

Kubelet makes the cgroup of a pod before it has its claims prepared (kubelet.go, SyncPod: pcm.EnsureExists comes first). All of them lie
below a folder `kubepods` (node_container_manager_linux.go), wherever that is: below kubelet's --cgroup-root, in the cgroup of a
container that kubelet runs in, in one hierarchy of cgroup v1. There are two spellings, by kubelet's cgroup driver
(cgroup_manager_linux.go): `kubepods/burstable/pod<uid>`, and `kubepods.slice/kubepods-burstable.slice/
kubepods-burstable-pod<uid>.slice` with `_` for the `-` of the UID. Pods of class Guaranteed lie in the outer folder.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_OUTER = "kubepods"
_CLASSES = ("burstable", "besteffort")
_SLICE = ".slice"
_POD = "pod"

_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,62}")
"""UIDs become parts of paths: nothing else is looked for."""

_FOLDERS_MAX = 20_000
_DEPTH_MAX = 16
"""How much of a tree is searched for `kubepods`; below it nothing is, so that pods do not count."""

_SEARCH_AGAIN_S = 1.0
"""How long a search that found nothing new counts: a pod that is waited for is looked for many times a second."""


class Cgroups:
    """Finds the cgroups of pods below `root`. Thread-safe."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._parents: tuple[str, ...] = ()
        self._searched_s = float("-inf")

    def problem(self) -> str | None:
        """Why the cgroups of pods cannot be reached, in a sentence that says what would help; None where they can."""
        if any(os.path.isdir(parent) for parent in self._parents) or self._search():  # noqa: PTH112 - asked every few seconds
            return None
        return (
            f"there is no {_OUTER} below {self.root}, so that the cgroups of pods cannot be reached: a container sees its own alone"
            " unless the node's are mounted, as component cgroups of the deployment does; and see --cgroup-root"
        )

    def find(self, pod_uid: str) -> str | None:
        """The full path of a pod's cgroup, None while there is none."""
        if _UID.fullmatch(pod_uid) is None:
            return None
        return _below(self._parents, pod_uid) or _below(self._search(), pod_uid)

    def pods(self) -> Mapping[str, str]:
        """All pods that have a cgroup, by UID, with the full path of it."""
        found: dict[str, str] = {}
        for parent in self._search():
            for name, path in _folders(parent):
                uid = _uid_of(name, parent)
                if uid is not None:
                    found.setdefault(uid, path)
        return found

    def _search(self) -> tuple[str, ...]:
        """The folders that have those of pods, searched for anew where the last search is long enough ago."""
        with self._lock:
            if self._clock() - self._searched_s >= _SEARCH_AGAIN_S:
                self._parents = tuple(_parents(str(self.root)))
                self._searched_s = self._clock()
            return self._parents


def _below(parents: tuple[str, ...], pod_uid: str) -> str | None:
    for parent in parents:
        path = f"{parent}/{_spelt(pod_uid, parent)}"
        try:
            if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - strings: every Prepare comes by
                return path
        except ValueError:
            continue
    return None


def _parents(root: str) -> Iterator[str]:
    """Every `kubepods` below a folder, and the folders of the classes in it. Links are not followed."""
    pending = deque([(root, 0)])
    seen = 0
    while pending and seen < _FOLDERS_MAX:
        folder, depth = pending.popleft()
        for name, path in _folders(folder):
            seen += 1
            if name == _OUTER or name == _OUTER + _SLICE or name.endswith(f"-{_OUTER}{_SLICE}"):
                yield path
                yield from (inner for inner_name, inner in _folders(path) if _is_class(inner_name))
            elif depth < _DEPTH_MAX:
                pending.append((path, depth + 1))


def _is_class(name: str) -> bool:
    return name in _CLASSES or name.endswith(tuple(f"-{quality}{_SLICE}" for quality in _CLASSES))


def _spelt(pod_uid: str, parent: str) -> str:
    """What the cgroup of a pod is called in one of those folders."""
    stem = _stem(parent)
    return f"{_POD}{pod_uid}" if stem is None else f"{stem}-{_POD}{pod_uid.replace('-', '_')}{_SLICE}"


def _uid_of(name: str, parent: str) -> str | None:
    """The pod whose cgroup has this name in one of those folders."""
    stem = _stem(parent)
    if stem is None:
        uid = name.removeprefix(_POD) if name.startswith(_POD) else ""
    else:
        before = f"{stem}-{_POD}"
        whole = name.startswith(before) and name.endswith(_SLICE)
        uid = name[len(before) : -len(_SLICE)].replace("_", "-") if whole else ""
    return uid if _UID.fullmatch(uid) else None


def _stem(parent: str) -> str | None:
    """What names in a slice begin with (systemd.slice(5)); None where it is no slice."""
    name = parent.rpartition("/")[2]
    return name.removesuffix(_SLICE) if name.endswith(_SLICE) else None


def _folders(path: str) -> Iterator[tuple[str, str]]:
    """The folders in a folder, in order of name; none where it is gone or cannot be read."""
    try:
        with os.scandir(path) as entries:
            yield from sorted((entry.name, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
