# SPDX-License-Identifier: Apache-2.0
"""Names of the sockets.

- the plain names without a pod UID, the telling ones with it, the hashed ones where those are too long
- the limit is 107 bytes of the whole path, in bytes and not in characters; too long even so is an error that says what to do
- the hidden name is never longer than the one it stands for, and its own for each
- names that would leave the directory are refused
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.errors import SocketError
from driver.kubelet import sockets

REGISTRY = Path("/var/lib/kubelet/plugins_registry")
PLUGIN = Path("/var/lib/kubelet/plugins/gpu.nearfield.dev")
POD_UID = "7f2c1d0e-5a6b-4c3d-8e9f-0a1b2c3d4e5f"


def paths(
    *, driver: str = "gpu.nearfield.dev", registry: Path = REGISTRY, plugin: Path = PLUGIN, pod_uid: str | None = None
) -> sockets.SocketPaths:
    return sockets.socket_paths(driver_name=driver, registry_dir=registry, plugin_dir=plugin, pod_uid=pod_uid)


def encoded(text: str, size: int) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).decode().rstrip("=")


def test_plain_names() -> None:
    assert paths() == sockets.SocketPaths(
        registration=REGISTRY / "gpu.nearfield.dev-reg.sock",
        service=PLUGIN / "dra.sock",
        lock=PLUGIN / "dra.sock.lock",
    )


def test_names_with_pod_uid() -> None:
    found = paths(pod_uid=POD_UID)
    assert found.registration == REGISTRY / f"gpu.nearfield.dev-{POD_UID}-reg.sock"
    assert found.service == PLUGIN / f"dra-{POD_UID}.sock"


def test_second_form_hashes_the_uid() -> None:
    driver = "d" * 28
    assert len(str(REGISTRY / f"{driver}-{POD_UID}-reg.sock")) == sockets.MAX_PATH_BYTES + 1
    found = paths(driver=driver, pod_uid=POD_UID)
    assert found.registration.name == f"{driver}-{encoded(POD_UID, 8)}-reg.sock"


def test_longest_name_that_fits_is_kept() -> None:
    driver = "d" * 27
    found = paths(driver=driver, pod_uid=POD_UID)
    assert found.registration.name == f"{driver}-{POD_UID}-reg.sock"
    assert len(str(found.registration)) == sockets.MAX_PATH_BYTES


def test_third_form_hashes_driver_and_uid_so_that_every_driver_name_fits() -> None:
    driver = "d" * 63
    plugin = PLUGIN.with_name(driver)
    found = paths(driver=driver, plugin=plugin, pod_uid=POD_UID)
    both = encoded(f"{driver}\0{POD_UID}", 16)
    assert found.registration.name == f"dra-{both}-reg.sock"
    assert found.service == plugin / f"dra-{encoded(POD_UID, 6)}.sock"


def test_service_socket_is_shortened_alike() -> None:
    plugin = Path("/") / ("p" * 70)
    found = paths(plugin=plugin, pod_uid=POD_UID)
    assert found.service == plugin / f"dra-{encoded(POD_UID, 6)}.sock"


@pytest.mark.parametrize("pod_uid", [None, POD_UID])
def test_too_long_names_the_path_its_length_and_the_way_out(pod_uid: str | None) -> None:
    with pytest.raises(SocketError, match=r"/r{100}/.*has \d+ bytes.*107.*--kubelet-dir"):
        paths(registry=Path("/") / ("r" * 100), pod_uid=pod_uid)


def test_length_is_counted_in_bytes() -> None:
    with pytest.raises(SocketError, match="107"):
        paths(plugin=Path("/") / ("é" * 50))


def test_relative_directories_become_absolute() -> None:
    found = paths(registry=Path("run/registry"), plugin=Path("run/../plugins"))
    assert found.registration == Path.cwd() / "run/registry/gpu.nearfield.dev-reg.sock"
    assert found.service == Path.cwd() / "plugins/dra.sock"


@pytest.mark.parametrize("pod_uid", ["", "../x", "a/b", ".hidden", "a\nb", "ü"])
def test_pod_uid_must_be_part_of_a_name(pod_uid: str) -> None:
    with pytest.raises(SocketError, match=r"metadata\.uid"):
        paths(pod_uid=pod_uid)


@pytest.mark.parametrize("driver", ["a/b", "../etc", ".x"])
def test_driver_name_must_be_part_of_a_name(driver: str) -> None:
    with pytest.raises(SocketError, match="Driver name"):
        paths(driver=driver)


@given(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,40}", fullmatch=True), st.uuids())
def test_hidden_names_are_short_hidden_and_apart(driver: str, uid: object) -> None:
    found = [paths(driver=driver, pod_uid=str(uid)), paths(driver=driver)]
    shown = [path for one in found for path in (one.registration, one.service)]
    hidden = [sockets.bind_path(path) for path in shown]
    assert all(h.parent == s.parent for h, s in zip(hidden, shown, strict=True))
    assert all(len(h.name) <= len(s.name) and h.name.startswith(".") for h, s in zip(hidden, shown, strict=True))
    assert len({*hidden, *shown}) == len(set(shown)) * 2
