# SPDX-License-Identifier: Apache-2.0
"""The agent's image as built: what is in it, what is not, and that its commands work in a pod.

Tests of the archive need no node; they stand here because here an archive has been built.
"""

from __future__ import annotations

import json
import stat
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import pytest

from driver import version
from hack.agentimage import contents, measure, pipsettings
from tests.e2e.kit import make
from tests.e2e.kit.sites import Sites
from tests.e2e.kit.space import Space

SITE_PACKAGES = "site-packages"

RUN_ALL = """
import json, subprocess, sys
for command in json.loads(sys.argv[1]):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}: {done.returncode}: {done.stderr}")
print("all of them")
"""


@pytest.fixture(scope="module")
def image(sites: Sites) -> contents.Image:
    """The image that the cluster has."""
    return contents.Image.open(sites.settings.image)


@pytest.fixture(scope="module")
def files(image: contents.Image) -> frozenset[PurePosixPath]:
    """Everything in it."""
    return frozenset(image.files())


def test_it_runs_the_agent_as_root_and_says_what_it_is(image: contents.Image) -> None:
    config = image.config["config"]
    assert image.tags == (make.AGENT_IMAGE,)
    assert (config["Entrypoint"], config["Cmd"], config["User"]) == (["nearfield"], ["run"], "0:0")
    assert config["Labels"]["org.opencontainers.image.version"] == version.VERSION
    assert sorted(variable.split("=")[0] for variable in config["Env"]) == ["LANG", "PATH", "PYTHONDONTWRITEBYTECODE"]


def test_it_has_no_shell_no_package_manager_and_nothing_to_build_with(files: frozenset[PurePosixPath]) -> None:
    programs = {path.name for path in files if path.parent.name in {"bin", "sbin"}}
    assert {name for name in programs if not name.startswith("python")} == {"nearfield"}
    modules = {path.name.split("-")[0] for path in files if path.parent.name == SITE_PACKAGES}
    assert not {"pip", "setuptools", "wheel", "pkg_resources"} & modules
    assert {"driver", "discovery", "proto", "grpc"} <= modules


def test_nothing_of_the_builders_network_is_in_it(image: contents.Image) -> None:
    """No index, proxy or certificate of the machine that built it, in no layer and not in its history."""
    settings = pipsettings.of_this_machine()
    hosts = {urlsplit(word).hostname for word in settings.text.split() if "://" in word} - {None, "pypi.org"}
    told = json.dumps(image.config)
    assert [word for word in ("PIP_", "pip.conf", "proxy", "secret", *filter(None, hosts)) if word in told] == []
    bundle = settings.certificate.read_bytes() if settings.certificate else None
    for path, content in image.contents():
        assert path.name not in {"pip.conf", ".netrc", "pip.crt", "sources.list", "resolv.conf"}, path
        assert bundle is None or bundle not in content, path
        assert [host for host in hosts if host and host.encode() in content] == [], path


def test_every_module_is_compiled_and_is_loaded_without_a_look_at_its_source(image: contents.Image) -> None:
    """PEP 552: the second word of such a file is 1, a hash that nobody compares."""
    compiled: dict[PurePosixPath, bytes] = {}
    sources: set[PurePosixPath] = set()
    for path, content in image.contents():
        if path.suffix == ".pyc":
            compiled[path.parent.parent / (path.name.split(".")[0] + ".py")] = content[4:8]
        elif path.suffix == ".py":
            sources.add(path)
    assert sources - compiled.keys() == set()
    assert {path for path, flags in compiled.items() if flags != b"\1\0\0\0"} == set()


def test_no_file_runs_with_the_rights_of_another_user(image: contents.Image) -> None:
    special = stat.S_ISUID | stat.S_ISGID
    assert [path for path, entry in image.files().items() if entry.isfile() and entry.mode & special] == []


def test_its_commands_work_in_a_pod_with_a_read_only_root(space: Space) -> None:
    container = make.container(
        image=make.AGENT_IMAGE,
        command=["python3", "-c", RUN_ALL, json.dumps(measure.COMMANDS)],
        securityContext={
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    space.create(make.pod("commands", containers=[container], volumes=[{"name": "tmp", "emptyDir": {}}]))
    space.succeeded("commands", timeout_s=120)
    assert space.logs("commands") == "all of them\n"


def test_its_entry_point_is_the_agents_command(space: Space) -> None:
    """As `kubectl run --image ... -- machines` would have it: arguments only."""
    container = {name: value for name, value in make.container(image=make.AGENT_IMAGE).items() if name != "command"}
    space.create(make.pod("machines", containers=[{**container, "args": ["machines"]}]))
    space.succeeded("machines")
    assert "dgx-h100" in space.logs("machines")
