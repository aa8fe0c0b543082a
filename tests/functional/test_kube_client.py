# SPDX-License-Identifier: Apache-2.0
"""The client of the API server over real sockets.

Aspects: every call; reasons and texts of errors; time and size limits; kept connections; renewed credentials (token
file, exec plugin, 401); kubeconfigs through the official client; TLS, names, client certificates, proxies; watches and
how they end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import stat
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from driver import errors
from driver.kube import access, client, connections
from driver.standin import apiserver, apiserver_faults
from tests.fakes import raw_server
from tests.fakes.publishing import until

TLS = Path(__file__).parent.parent / "fakes" / "tls"
FILES = apiserver.Tls(certificate=TLS / "server.pem", key=TLS / "server.key", authority=TLS / "ca.pem")
T = 30.0


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.ApiServer() as running:
        yield running


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[client.KubeClient]:
    opened = client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="tests/0")
    yield opened
    opened.close()


def a_slice(name: str = "s0", node: str = "n1") -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.nearfield.dev",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        },
    }


def claim(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {}}


def test_claims_and_nodes_are_read_as_they_are(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    odd = server.seed("resourceclaims", claim("c") | {"fromTheFuture": {"x": [1]}})
    assert kube.get_claim("ml", "c", timeout_s=T) == odd
    server.seed("nodes", {"metadata": {"name": "n1"}})
    assert kube.get_node("n1", timeout_s=T)["metadata"]["name"] == "n1"


def test_all_claims_are_read_in_pages(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    for index in range(client.CLAIMS_A_PAGE * 2 + 1):
        server.seed("resourceclaims", claim(f"c{index}"))
    assert len(kube.list_claims(timeout_s=T)) == client.CLAIMS_A_PAGE * 2 + 1
    assert server.count("list", "resourceclaims") == 3
    one = kube.list_claims(timeout_s=T, keep=lambda body: bool(body["metadata"]["name"] == "c7"))
    assert [body["metadata"]["name"] for body in one] == ["c7"]


def test_slices_are_created_replaced_and_deleted(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    kube.create_slice(a_slice(), dry_run=True, timeout_s=T)
    created = kube.create_slice(a_slice(), timeout_s=T)
    created["spec"]["pool"]["generation"] = 2
    kube.replace_slice(created, dry_run=True, timeout_s=T)
    replaced = kube.replace_slice(created, timeout_s=T)
    kube.create_slice(a_slice("s1", "n2"), timeout_s=T)
    version, listed = kube.list_slices(node_name="n1", timeout_s=T)
    assert listed == [replaced]
    assert int(version) >= int(replaced["metadata"]["resourceVersion"])
    metadata = replaced["metadata"]
    with pytest.raises(errors.ApiError) as caught:
        kube.delete_slice("s0", uid="other", resource_version=None, timeout_s=T)
    assert caught.value.reason is errors.ApiReason.CONFLICT
    kube.delete_slice("s0", uid=metadata["uid"], resource_version=metadata["resourceVersion"], timeout_s=T)
    kube.delete_slices(node_name="n2", driver="gpu.nearfield.dev", timeout_s=T)
    assert server.objects("resourceslices") == []


def test_events_are_created_and_counted_up(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    kube.create_event("ml", {"metadata": {"name": "e"}, "count": 1}, timeout_s=T)
    kube.patch_event("ml", "e", {"count": 2}, timeout_s=T)
    assert server.objects("events")[0]["count"] == 2


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (404, "NotFound", errors.ApiReason.NOT_FOUND),
        (409, "Conflict", errors.ApiReason.CONFLICT),
        (409, "AlreadyExists", errors.ApiReason.ALREADY_EXISTS),
        (401, "Unauthorized", errors.ApiReason.FORBIDDEN),
        (403, "Forbidden", errors.ApiReason.FORBIDDEN),
        (422, "Invalid", errors.ApiReason.INVALID),
        (410, "Expired", errors.ApiReason.GONE),
        (429, "TooManyRequests", errors.ApiReason.UNAVAILABLE),
        (500, "InternalError", errors.ApiReason.UNAVAILABLE),
        (503, "ServiceUnavailable", errors.ApiReason.UNAVAILABLE),
        (418, "Teapot", errors.ApiReason.OTHER),
    ],
)
def test_a_refusal_has_a_reason_and_names_verb_object_and_server(
    server: apiserver.ApiServer, kube: client.KubeClient, code: int, kind: str, reason: errors.ApiReason
) -> None:
    server.faults.inject(apiserver_faults.Refuse(code, kind, "because"))
    with pytest.raises(errors.ApiError) as caught:
        kube.get_claim("ml", "c", timeout_s=T)
    assert (caught.value.reason, caught.value.status) == (reason, code)
    said = f"GET ResourceClaim ml/c on {server.url}: because"
    if code == 401:
        assert str(caught.value).startswith(f"{said}; the server does not accept our credentials")
    else:
        assert str(caught.value) == said


def test_a_server_that_is_away_is_said_so(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    server.stop()
    with pytest.raises(errors.ApiError, match=r"GET Node n1 on http://127\.0\.0\.1:.*refused") as caught:
        kube.get_node("n1", timeout_s=T)
    assert caught.value.retryable
    assert caught.value.status is None


def test_a_server_that_never_answers_costs_the_time_limit(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    server.faults.inject(apiserver_faults.Hang())
    with pytest.raises(errors.ApiError, match="no answer in time") as caught:
        kube.get_claim("ml", "c", timeout_s=0.2)
    assert caught.value.retryable


@contextlib.contextmanager
def reaching(url: str, **more: Any) -> Iterator[client.KubeClient]:
    opened = client.KubeClient(access.Access(server=url, **({"token": "t"} | more)), user_agent="tests/0")
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("length", [2000, 1_000_000])
def test_a_server_that_drips_does_not_outlive_the_limit(length: int) -> None:
    def drip(connection: socket.socket, _number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
        gate = threading.Event()
        while not gate.wait(0.02):
            connection.sendall(b" ")

    with (
        raw_server.playing(drip) as url,
        reaching(url) as kube,
        pytest.raises(errors.ApiError, match="no answer in time"),
    ):
        kube.get_claim("ml", "c", timeout_s=0.3)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "too long"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + b" " * 0x100000 + b"\r\n" + b"",
            "",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200000, "no JSON object"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>", "HTTP status 502"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", "HTTP status 302"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH"),
        (b"", "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n{" + b" " * 100_000, "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", "headers"),
    ],
)
def test_an_answer_no_api_server_gives_is_an_error_in_words(answer: bytes, words: str) -> None:
    with (
        raw_server.playing(lambda connection, _number: connection.sendall(answer)) as url,
        reaching(url) as kube,
        pytest.raises(errors.ApiError, match=f"GET ResourceClaim ml/c on {url}: .*{words}"),
    ):
        kube.get_claim("ml", "c", timeout_s=T)


def test_an_endless_answer_is_cut() -> None:
    def endless(connection: socket.socket, _number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")

    with raw_server.playing(endless) as url, reaching(url) as kube, pytest.raises(errors.ApiError, match="too long"):
        kube.get_claim("ml", "c", timeout_s=T)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_server_behind_a_path_is_asked_there() -> None:
    asked: list[bytes] = []

    def script(connection: socket.socket, _number: int) -> None:
        connection.sendall(OK)

    with raw_server.playing(script, heard=asked.append) as url, reaching(f"{url}/k8s/clusters/c1/") as kube:
        kube.get_node("n1", timeout_s=T)
        with pytest.raises(StopIteration):
            next(kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60))
    assert asked[0].startswith(b"GET /k8s/clusters/c1/api/v1/nodes/n1 HTTP/1.1")
    assert asked[1].startswith(b"GET /k8s/clusters/c1/apis/resource.k8s.io/v1/resourceslices?")


def test_one_connection_serves_many_calls_and_a_closed_one_is_replaced() -> None:
    served: list[int] = []

    def script(connection: socket.socket, number: int) -> None:
        served.append(number)
        connection.sendall(OK)
        # A second request on the same connection, as far as one comes.
        if b"\r\n\r\n" in connection.recv(65536):
            served.append(number)
            connection.sendall(OK)

    with raw_server.playing(script) as url, reaching(url) as kube:
        for _ in range(3):
            kube.get_claim("ml", "c", timeout_s=T)
    assert served == [0, 0, 1]


@pytest.mark.parametrize("size", [2, 64 * 1024, 200_000])
def test_a_connection_is_kept_whatever_the_size_of_the_answer(size: int) -> None:
    served: list[int] = []

    def script(connection: socket.socket, number: int) -> None:
        served.append(number)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{%s}" % (size, b" " * (size - 2)))
        if b"\r\n\r\n" in connection.recv(65536):
            served.append(number)
            connection.sendall(OK)

    with raw_server.playing(script) as url, reaching(url) as kube:
        for _ in range(2):
            assert kube.get_claim("ml", "c", timeout_s=T) == {}
    assert served == [0, 0]


def test_a_kept_connection_that_breaks_under_a_get_is_replaced_once_and_under_a_write_is_not() -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.sendall(OK)
        if number < 2:
            connection.recv(65536)

    with raw_server.playing(script) as url, reaching(url) as kube:
        kube.get_claim("ml", "c", timeout_s=T)
        kube.get_claim("ml", "c", timeout_s=T)
        with pytest.raises(errors.ApiError) as caught:
            kube.create_slice(a_slice(), timeout_s=T)
        assert caught.value.reason is errors.ApiReason.UNAVAILABLE


def test_calls_go_on_after_a_restart_of_the_server(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    server.seed("resourceclaims", claim("c"))
    kube.get_claim("ml", "c", timeout_s=T)
    server.stop()
    server.start()
    server.learn_rights()
    kube.get_claim("ml", "c", timeout_s=T)
    kube.create_slice(a_slice(), timeout_s=T)


def test_a_renewed_token_file_is_used_when_the_old_token_is_refused(
    server: apiserver.ApiServer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(server.token)
    kube = client.KubeClient(access.Access(server=server.url, token_file=token), user_agent="tests/0")
    kube.create_slice(a_slice(), timeout_s=T)
    server.token = "rotated"
    with pytest.raises(errors.ApiError, match="Unauthorized"):
        kube.list_slices(node_name="n1", timeout_s=T)
    token.write_text("rotated")
    kube.create_slice(a_slice("s1"), timeout_s=T)
    token.unlink()
    server.token = "again"
    with pytest.raises(errors.ApiError, match="token file"):
        kube.list_slices(node_name="n1", timeout_s=T)
    kube.close()


def write_kubeconfig(path: Path, server: apiserver.ApiServer, user: dict[str, Any], **cluster: Any) -> Path:
    document = json.loads(server.write_kubeconfig(path).read_text())
    document["users"][0]["user"] = user
    document["clusters"][0]["cluster"].update(cluster)
    path.write_text(json.dumps(document))
    return path


def test_a_kubeconfig_leads_to_its_server(server: apiserver.ApiServer, tmp_path: Path) -> None:
    kube = client.KubeClient.load(server.write_kubeconfig(tmp_path / "kubeconfig"), user_agent="tests/0")
    kube.create_slice(a_slice(), timeout_s=T)
    assert kube.server == server.url
    kube.close()


def test_a_kubeconfig_with_a_token_file_has_it_read_again(server: apiserver.ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(server.token)
    opened = access.load_kubeconfig(write_kubeconfig(tmp_path / "kubeconfig", server, {"tokenFile": "token"}))
    assert opened.token_file == tmp_path / "token"


def test_a_kubeconfig_with_a_password_shows_it(server: apiserver.ApiServer, tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "kubeconfig", server, {"username": "u", "password": "p"})
    assert access.load_kubeconfig(path).header() == "Basic dTpw"


def plugin(path: Path, body: str) -> dict[str, Any]:
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(path), "interactiveMode": "Never"}}


CREDENTIAL = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"%s}}'


def test_an_exec_plugin_is_asked_again_when_its_token_is_refused(server: apiserver.ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(server.token)
    user = plugin(tmp_path / "plugin", f"printf '{CREDENTIAL % ('%s', '')}' \"$(cat {token})\"")
    kube = client.KubeClient.load(write_kubeconfig(tmp_path / "kubeconfig", server, user), user_agent="tests/0")
    kube.create_slice(a_slice(), timeout_s=T)
    server.token = "rotated"
    token.write_text("rotated")
    kube.create_slice(a_slice("s1"), timeout_s=T)
    kube.close()


def test_an_exec_plugin_says_until_when_its_token_is_good(server: apiserver.ApiServer, tmp_path: Path) -> None:
    expiry = ',"expirationTimestamp":"2030-01-02T03:04:05Z"'
    user = plugin(tmp_path / "plugin", f"echo '{CREDENTIAL % ('t', expiry)}'")
    opened = access.load_kubeconfig(write_kubeconfig(tmp_path / "kubeconfig", server, user))
    assert (opened.header(), opened.expires_at) == ("Bearer t", 1893553445.0)


def test_a_plugin_that_fails_makes_calls_fail_until_it_works(server: apiserver.ApiServer, tmp_path: Path) -> None:
    good = tmp_path / "good"
    user = plugin(
        tmp_path / "plugin",
        f"test -e {good} || {{ echo no cloud >&2; exit 1; }}; echo '{CREDENTIAL % (server.token, '')}'",
    )
    path = write_kubeconfig(tmp_path / "kubeconfig", server, user)
    kube = client.KubeClient.load(path, user_agent="tests/0")
    with pytest.raises(errors.ApiError, match="no cloud") as caught:
        kube.create_slice(a_slice(), timeout_s=T)
    assert caught.value.retryable
    kube.close()
    good.touch()
    assert access.load_kubeconfig(path).header() == f"Bearer {server.token}"


def test_a_plugin_that_hangs_is_ended_and_leaves_no_files(
    server: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # As long as this machine takes to start a plugin, and more.
    began = time.monotonic()
    with pytest.raises(errors.ApiError, match="process returned 3"):
        access.load_kubeconfig(
            write_kubeconfig(tmp_path / "kubeconfig", server, plugin(tmp_path / "plugin", "exit 3")), timeout_s=T
        )
    enough_s = 2.0 + 3 * (time.monotonic() - began)
    number = tmp_path / "pid"
    path = write_kubeconfig(
        tmp_path / "kubeconfig", server, plugin(tmp_path / "plugin", f"echo $$ > {number}; exec sleep 600")
    )
    with pytest.raises(errors.ApiError, match="waiting for something"):
        access.load_kubeconfig(path, timeout_s=enough_s)
    until(lambda: not Path(f"/proc/{number.read_text().strip()}/cmdline").exists())
    assert list(temporary.iterdir()) == []
    temporary.rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(errors.ApiError, match="takes a folder for temporary files"):
        access.load_kubeconfig(path)


def test_a_reading_that_is_given_up_leaves_neither_plugin_nor_files(
    server: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    number = tmp_path / "pid"
    path = write_kubeconfig(
        tmp_path / "kubeconfig", server, plugin(tmp_path / "plugin", f"echo $$ > {number}; exec sleep 600")
    )
    loading = access.Loading()
    with futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(access.load_kubeconfig, path, loading=loading, timeout_s=600.0)
        until(lambda: number.exists() and number.read_text().strip())
        assert list(temporary.iterdir()) != []
        loading.close(T)
        assert list(temporary.iterdir()) == []
        assert isinstance(reading.exception(T), errors.ApiError)
    until(lambda: not Path(f"/proc/{number.read_text().strip()}/cmdline").exists())
    with pytest.raises(errors.ApiError, match="No kubeconfig is read any more"):
        access.load_kubeconfig(path, loading=loading)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "a: b",
        "current-context: x\ncontexts: []\n",
        "current-context: x\ncontexts: [{name: x, context: {cluster: none}}]\nclusters: []\n",
        "current-context: x\ncontexts: 7\nclusters: 8\n",
    ],
)
def test_a_wrong_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=f"{path} is not usable: "):
        client.KubeClient.load(path, user_agent="tests/0")


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="nowhere is no file"):
        client.KubeClient.load(tmp_path / "nowhere", user_agent="tests/0")


def test_tls_is_verified_against_the_authority_of_the_kubeconfig(tmp_path: Path) -> None:
    with apiserver.ApiServer(tls=FILES) as server:
        path = server.write_kubeconfig(tmp_path / "kubeconfig")
        kube = client.KubeClient.load(path, user_agent="tests/0")
        kube.create_slice(a_slice(), timeout_s=T)
        kube.close()
        with reaching(server.url) as stranger, pytest.raises(errors.ApiError, match="not trusted") as caught:
            stranger.list_slices(node_name="n1", timeout_s=T)
        assert not caught.value.retryable
        access_to_other: dict[str, Any] = {"ca_file": TLS / "ca.pem", "server_name": "other.test"}
        with reaching(server.url, **access_to_other) as misnamed, pytest.raises(errors.ApiError, match=r"other\.test"):
            misnamed.list_slices(node_name="n1", timeout_s=T)
        with reaching(server.url, token=server.token, verify=False) as careless:
            careless.list_slices(node_name="n1", timeout_s=T)


def test_the_certificate_may_bear_another_name_than_the_address() -> None:
    with apiserver.ApiServer(tls=FILES, host="127.0.0.2") as server:
        named: dict[str, Any] = {"ca_file": TLS / "ca.pem", "server_name": "apiserver.test"}
        with reaching(server.url, token=server.token, **named) as kube:
            kube.list_slices(node_name="n1", timeout_s=T)


@pytest.mark.parametrize("inline", [True, False])
def test_a_client_certificate_is_shown(tmp_path: Path, inline: bool) -> None:
    files = {"client-certificate": TLS / "server.pem", "client-key": TLS / "server.key"}
    user: dict[str, Any] = (
        {f"{key}-data": base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
        if inline
        else {key: str(path) for key, path in files.items()}
    )
    strict = apiserver.Tls(certificate=FILES.certificate, key=FILES.key, authority=FILES.authority, clients_too=True)
    with apiserver.ApiServer(tls=strict) as server:
        path = write_kubeconfig(tmp_path / "kubeconfig", server, user | {"token": server.token})
        kube = client.KubeClient.load(path, user_agent="tests/0")
        kube.list_slices(node_name="n1", timeout_s=T)
        kube.close()
        held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any("client-certificate" in name for name in held)
        with reaching(server.url, ca_file=TLS / "ca.pem") as nobody, pytest.raises(errors.ApiError):
            nobody.list_slices(node_name="n1", timeout_s=T)


def test_a_proxy_is_tunnelled_through() -> None:
    asked: list[bytes] = []

    with apiserver.ApiServer(tls=FILES) as server:

        def tunnel(connection: socket.socket, _number: int) -> None:
            asked.append(b"CONNECT")
            port = int(server.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as onward:
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")

                def back() -> None:
                    with contextlib.suppress(OSError):
                        while part := onward.recv(65536):
                            connection.sendall(part)

                returning = threading.Thread(target=back)
                returning.start()
                # A client that closes with an answer unread resets the connection: an end as good as any.
                with contextlib.suppress(OSError):
                    while part := connection.recv(65536):
                        onward.sendall(part)
                with contextlib.suppress(OSError):
                    onward.shutdown(socket.SHUT_RDWR)
                returning.join()

        with (
            raw_server.playing(tunnel) as proxy,
            reaching(
                server.url, token=server.token, ca_file=TLS / "ca.pem", proxy=proxy.removeprefix("http://")
            ) as kube,
        ):
            kube.list_slices(node_name="n1", timeout_s=T)
    assert asked == [b"CONNECT"]


def test_a_watch_tells_changes_and_ends_when_the_server_says_so(
    server: apiserver.ApiServer, kube: client.KubeClient
) -> None:
    version, _ = kube.list_slices(node_name="n1", timeout_s=T)
    created = kube.create_slice(a_slice(), timeout_s=T)
    events = kube.watch_slices(node_name="n1", resource_version=version, timeout_s=60)
    assert next(events) == ("ADDED", created)
    server.remove("resourceslices", "s0")
    kind, gone = next(events)
    assert kind == "DELETED"
    events.close()
    assert list(events) == []
    after = kube.watch_slices(node_name="n1", resource_version=gone["metadata"]["resourceVersion"], timeout_s=1)
    assert {kind for kind, _ in after} <= {"BOOKMARK"}


def test_a_watch_of_a_claim_begins_with_what_is_there_and_tells_of_no_other(
    server: apiserver.ApiServer, kube: client.KubeClient
) -> None:
    there = server.seed("resourceclaims", claim("c"))
    server.seed("resourceclaims", claim("d"))
    events = kube.watch_claim("ml", "c", timeout_s=60)
    assert next(events) == ("ADDED", there)
    server.edit("resourceclaims", "ml/d", lambda body: body.update(status={"x": 1}))
    server.edit("resourceclaims", "ml/c", lambda body: body.update(status={"reservedFor": []}))
    kind, changed = next(events)
    assert (kind, changed["status"]) == ("MODIFIED", {"reservedFor": []})
    server.remove("resourceclaims", "ml/c")
    assert next(events)[0] == "DELETED"
    events.close()
    assert list(events) == []
    assert {kind for kind, _ in kube.watch_claim("ml", "c", timeout_s=1)} <= {"BOOKMARK"}


def test_a_watch_from_a_compacted_version_is_gone(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    version, _ = kube.list_slices(node_name="n1", timeout_s=T)
    server.compact("resourceslices")
    with pytest.raises(errors.ApiError, match="too old resource version") as caught:
        next(kube.watch_slices(node_name="n1", resource_version=version, timeout_s=60))
    assert caught.value.reason is errors.ApiReason.GONE
    server.faults.inject(apiserver_faults.Refuse(410, "Expired", "gone at once"), verb="watch")
    with pytest.raises(errors.ApiError) as caught:
        kube.watch_slices(node_name="n1", resource_version=version, timeout_s=60)
    assert caught.value.reason is errors.ApiReason.GONE


def test_a_watch_of_a_server_that_falls_silent_ends_with_an_error(
    server: apiserver.ApiServer, kube: client.KubeClient
) -> None:
    server.faults.silent_watches = True
    with pytest.raises(errors.ApiError, match="no answer in time"):
        next(kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60, silence_s=0.3))


def test_a_watch_of_a_server_that_dies_ends_with_an_error(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    events = kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60)
    server.stop()
    with pytest.raises(errors.ApiError) as caught:
        next(events)
    assert caught.value.retryable


@pytest.mark.parametrize("tls", [None, FILES])
def test_a_watch_ends_at_once_when_the_client_closes(tls: apiserver.Tls | None) -> None:
    with (
        apiserver.ApiServer(tls=tls) as server,
        reaching(server.url, token=server.token, ca_file=TLS / "ca.pem") as kube,
    ):
        events = kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60)
        seen: list[object] = []
        iterating = threading.Thread(target=lambda: seen.extend(events))
        iterating.start()
        kube.close()
        iterating.join(timeout=T)
        assert not iterating.is_alive()
        assert seen == []


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_watch_that_nobody_reads_any_more_is_closed(server: apiserver.ApiServer) -> None:
    before = _open_files()
    with reaching(server.url, token=server.token) as kube:
        created = kube.create_slice(a_slice(), timeout_s=T)
        read = kube.watch_slices(node_name="n1", resource_version="0", timeout_s=60)
        assert next(read) == ("ADDED", created)
        read.close()
        assert list(read) == []
        left = [kube.watch_slices(node_name="n1", resource_version="0", timeout_s=60) for _ in range(2)]
        assert next(left[0]) == ("ADDED", created)
        kube.close()
        assert [list(one) for one in left] == [[], []]
        late = kube.watch_slices(node_name="n1", resource_version="0", timeout_s=60)
        assert list(late) == []
    until(lambda: _open_files() == before)


def test_a_watch_whose_server_says_that_it_closes_the_connection_ends_at_once_as_well() -> None:
    answered = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        answered.set()
        connection.recv(1)

    with raw_server.playing(script) as url, reaching(url) as kube:
        events = kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60)
        iterating = threading.Thread(target=lambda: list(events))
        iterating.start()
        assert answered.wait(T)
        kube.close()
        iterating.join(timeout=T)
        assert not iterating.is_alive()


@pytest.mark.parametrize("line", [b"nope\n", b"[]\n", b'{"type":1}\n', b"[" * 100_000 + b"\n"])
def test_a_watch_that_sends_no_events_ends_with_an_error(line: bytes) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(line), line))
        connection.recv(1)

    with raw_server.playing(script) as url, reaching(url) as kube, pytest.raises(errors.ApiError, match="WATCH"):
        next(kube.watch_slices(node_name="n1", resource_version="1", timeout_s=60))


def test_many_threads_share_a_client(server: apiserver.ApiServer, kube: client.KubeClient) -> None:
    for index in range(8):
        server.seed("resourceclaims", claim(f"c{index}"))
    names: list[str] = []

    def read(index: int) -> None:
        names.extend(kube.get_claim("ml", f"c{index}", timeout_s=T)["metadata"]["name"] for _ in range(20))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == sorted(f"c{index}" for index in range(8) for _ in range(20))


def test_idle_connections_are_not_kept_without_end(server: apiserver.ApiServer) -> None:
    opened = connections.Connections(access.Access(server=server.url, token=server.token))
    ask = connections.Ask(method="GET", path="/healthz", headers={}, max_bytes=100)
    gate = threading.Barrier(connections.MAX_IDLE + 4)

    def read() -> None:
        gate.wait()
        opened.request(ask, timeout_s=T)

    threads = [threading.Thread(target=read) for _ in range(connections.MAX_IDLE + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.close()
