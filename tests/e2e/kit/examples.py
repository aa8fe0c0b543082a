# SPDX-License-Identifier: Apache-2.0
"""The project's examples, with an image that is on the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.e2e.kit import make
from tests.e2e.kit.api import Json
from tests.e2e.kit.space import Space

FOLDER = Path(__file__).parents[3] / "deploy/examples"


def names() -> tuple[str, ...]:
    """Of all of them, without `.yaml`."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def comment(name: str) -> str:
    """What an example says of itself."""
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line.removeprefix("# ") for line in lines[1:] if line.startswith("#"))


def load(name: str) -> list[Json]:
    """The objects of an example."""
    objects: list[Json] = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    for body in objects:
        if body["kind"] == "Pod":
            body["spec"] |= {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
            for container in body["spec"]["containers"]:
                container |= {"image": make.BUSYBOX, "imagePullPolicy": "Never"}
    return objects


@contextlib.contextmanager
def applied(space: Space, name: str) -> Iterator[None]:
    """The example in a namespace; what belongs to none of it goes at the end."""
    classes = [body for body in load(name) if body["kind"] == "DeviceClass"]
    try:
        for body in classes:
            space.api.create(body)
        space.create(*(body for body in load(name) if body["kind"] != "DeviceClass"))
        yield
    finally:
        for body in classes:
            space.api.delete("DeviceClass", body["metadata"]["name"])
