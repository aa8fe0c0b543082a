# SPDX-License-Identifier: Apache-2.0
"""Containers that end when they are told to by a file on the node: without the API server, and whatever signals say."""

from __future__ import annotations

from collections.abc import Mapping

from hack.realnode.layout import Layout
from tests.e2e.kit import make
from tests.e2e.kit.api import Json

FOLDER = "/run/nearfield-e2e-signs"


def pod(name: str, *, claims: Mapping[str, str], ignores_term: bool = False, grace_s: int = 1) -> Json:
    """A pod whose container ends well when it is told to; `ignores_term`: and not before its grace period is over."""
    trap = "trap '' TERM\n" if ignores_term else ""
    container = make.container(
        claims=tuple(claims),
        script=f"{trap}while [ ! -e /signs/{name} ]; do sleep 0.1; done",
        volumeMounts=[{"name": "signs", "mountPath": "/signs"}],
    )
    volume = {"name": "signs", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}
    return make.pod(name, claims=claims, containers=[container], volumes=[volume], grace_s=grace_s)


def give(layout: Layout, name: str) -> None:
    """Tell the pod of this name to end."""
    (layout.host_path(FOLDER) / name).touch()


def take_back(layout: Layout, name: str) -> None:
    """Before a pod of this name is made, whatever an earlier run told it."""
    (layout.host_path(FOLDER) / name).unlink(missing_ok=True)
