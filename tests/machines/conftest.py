# SPDX-License-Identifier: Apache-2.0
"""What the prober sees of each machine of the zoo, for all tests here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from discovery import model, options, probe, sysfs
from discovery.mock import library, render, zoo


class Seen(dict[str, model.Snapshot]):
    """Looked at when first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> model.Snapshot:
        tree = render.render(zoo.load(name), self._factory.mktemp(name))
        machine = probe.Machine(
            files=sysfs.Sysfs(sys=tree.sys, proc=tree.proc),
            dev=tree.dev,
            library=library.Library(tree.directory),
            origin=model.Origin.RECORDING,
            options=options.ProbeOptions(),
            clock=lambda: 0.0,
        )
        try:
            return self.setdefault(name, machine.probe())
        finally:
            machine.close()


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, model.Snapshot]:
    return Seen(tmp_path_factory)
