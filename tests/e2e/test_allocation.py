# SPDX-License-Identifier: Apache-2.0
"""GPUs are given out by the scheduler and reach the container.

- one GPU
"""

from __future__ import annotations

from tests.e2e.kit import make
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space


def test_one_gpu(site: Site, space: Space) -> None:
    space.create(make.template("one"), make.pod("p", claims={"gpu": "template:one"}))
    space.running("p")
    (device,) = space.devices("p")
    gpu = site.disk.gpu(device)
    seen = space.look("p")
    assert seen.gpu_nodes == (gpu.node,)
    assert seen.gpu_uuids == (gpu.uuid,)
