# SPDX-License-Identifier: Apache-2.0
"""The project's examples, with an image that is on the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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


def load(name: str, *, replace: Mapping[str, str] | None = None) -> list[Json]:
    """The objects of an example. `replace`: text of it -> what a user puts there."""
    text = (FOLDER / f"{name}.yaml").read_text()
    for old, new in (replace or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    objects: list[Json] = list(yaml.safe_load_all(text))
    for body in objects:
        if body["kind"] == "Pod":
            body["spec"] |= {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
            for container in body["spec"]["containers"]:
                container |= {"image": make.BUSYBOX, "imagePullPolicy": "Never"}
    return objects


@contextlib.contextmanager
def applied(space: Space, name: str, *, replace: Mapping[str, str] | None = None) -> Iterator[None]:
    """The example in a namespace; what belongs to none of it goes at the end."""
    objects = load(name, replace=replace)
    classes = [body for body in objects if body["kind"] == "DeviceClass"]
    try:
        for body in classes:
            space.api.create(body)
        space.create(*(body for body in objects if body["kind"] != "DeviceClass"))
        yield
    finally:
        for body in classes:
            space.api.delete("DeviceClass", body["metadata"]["name"])
