# SPDX-License-Identifier: Apache-2.0
"""A cluster with the agent on it, as one value; and who brings clusters up and takes them down again."""

from __future__ import annotations

import contextlib
import itertools
import os
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.realnode import cluster as clusters
from tests.e2e.kit.agent import MACHINE, Agent
from tests.e2e.kit.api import Api
from tests.e2e.kit.kubelet import Kubelet
from tests.e2e.kit.node import Disk


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster, and the places from which it is looked at."""

    cluster: clusters.Cluster
    api: Api
    disk: Disk
    kubelet: Kubelet
    agent: Agent

    @property
    def node_name(self) -> str:
        """The Node's."""
        return self.cluster.node_name

    @property
    def pool(self) -> str:
        """The pool of its devices."""
        return self.cluster.node_name


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `hack/e2e` was told. `image`: archive of the agent's image; `out`: for what is collected after failures."""

    name: str
    keep: bool
    image: Path
    out: Path
    made: Path
    """Where the names of clusters are written before they are brought up, for who takes down what is left."""

    @classmethod
    def from_environment(cls) -> Settings:
        """As `hack/e2e` sets it. Each of several pytest processes has a cluster of its own, told apart by a letter."""
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        letter = string.ascii_lowercase[int(worker.removeprefix("gw"))] if worker else ""
        return cls(
            name=os.environ["NEARFIELD_E2E_CLUSTER"] + letter,
            keep=os.environ.get("NEARFIELD_E2E_KEEP") == "1",
            image=Path(os.environ["NEARFIELD_E2E_IMAGE"]),
            out=Path(os.environ["NEARFIELD_E2E_OUT"]),
            made=Path(os.environ["NEARFIELD_E2E_MADE"]),
        )


class Sites:
    """Brings up what is asked for. `up` is a context: the calling thread is in the cluster's network meanwhile."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def default(self) -> Iterator[Site]:
        """The cluster of most tests; with `--keep` it stays, and the next run finds it."""
        with self._up(clusters.Options(name=self.settings.name), keep=self.settings.keep) as site:
            yield site

    @contextlib.contextmanager
    def other(
        self,
        *,
        emulate: str | None = None,
        gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
        machine: str = MACHINE,
        env: Mapping[str, str] | None = None,
        with_agent: bool = True,
        hollow: Sequence[str] = (),
    ) -> Iterator[Site]:
        """A cluster of another kind, for the block. The default one goes on running if it runs."""
        options = clusters.Options(
            name=f"{self.settings.name}{next(self._numbers) % 10}",
            emulate=emulate,
            gates=gates or {},
            runtime_config=runtime_config or {},
            hollow=hollow,
        )
        clusters.down(options.name)  # one that a run has left which was killed
        with self._up(options, keep=False, machine=machine, env=env, with_agent=with_agent) as site:
            yield site

    @contextlib.contextmanager
    def _up(
        self,
        options: clusters.Options,
        *,
        keep: bool,
        machine: str = MACHINE,
        env: Mapping[str, str] | None = None,
        with_agent: bool = True,
    ) -> Iterator[Site]:
        with contextlib.ExitStack() as stack:
            with self.settings.made.open("a") as names:
                names.write(f"{options.name}\n")
            if not keep:
                stack.callback(clusters.down, options.name)
            cluster = clusters.up(options)
            stack.enter_context(cluster.entered())
            api = Api(cluster.kubeconfig)
            disk = Disk(cluster.layout)
            agent = Agent(cluster, api, disk, build=_load(cluster, self.settings.image))
            if with_agent:
                agent.apply(machine=machine, env=env)
            yield Site(cluster=cluster, api=api, disk=disk, kubelet=Kubelet(api, cluster.layout), agent=agent)


def _load(cluster: clusters.Cluster, image: Path) -> str:
    """Bring an image onto a cluster that has not got it yet; what tells it from others."""
    found = image.stat()
    build = f"{found.st_size}-{found.st_mtime_ns}"
    loaded = cluster.layout.root / "agent-image"
    if not loaded.exists() or loaded.read_text() != build:
        cluster.load(image)
        loaded.write_text(build)
    return build
