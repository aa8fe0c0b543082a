# SPDX-License-Identifier: Apache-2.0
"""What the prober sees of each machine of the zoo, for all tests here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from discovery import model
from discovery.mock import render, zoo
from tests.fakes import mockmachine


class Seen(dict[str, model.Snapshot]):
    """Looked at when first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> model.Snapshot:
        tree = render.render(zoo.load(name), self._factory.mktemp(name))
        return self.setdefault(name, mockmachine.probed(tree))


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, model.Snapshot]:
    return Seen(tmp_path_factory)
