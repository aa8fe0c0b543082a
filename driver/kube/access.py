# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and how this process shows who it is: from the pod's service account, or from a kubeconfig.

A kubeconfig may hold exec plugins, provider logins and inline certificates; reading it is left to the official client, in
a child process (`loader`): in this process its import would cost 33 MB and 0.4 s, and a plugin that hangs could not be
ended. The service account's convention is two variables and two files, and is read here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver import errors

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOAD_TIMEOUT_S = 30.0
"""The child takes half a second; the rest is for an exec plugin that asks a cloud."""

CLOSE_S = 1.0
"""How long it takes at most until a reading that was ended is gone."""

MAX_TOKEN_BYTES = 64 * 1024
BAD_CONFIG = 2
"""Exit status of the loader when the file itself is wrong; any other failure may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the API server. PEM texts are inline, paths are read again for every connection, as files rotate."""

    server: str
    """Scheme, host, port and perhaps a path prefix, without a slash at the end."""
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """Read instead of `token`, again and again: kubelet renews it."""
    authorization: str | None = field(default=None, repr=False)
    """The whole header where it is no bearer token (basic authentication)."""
    expires_at: float | None = None
    """Seconds since the epoch after which `token` or the certificate is refused."""
    ca_pem: str | None = None
    ca_file: Path | None = None
    verify: bool = True
    server_name: str | None = None
    """The name in the server's certificate, where it is not the host."""
    certificate_pem: str | None = field(default=None, repr=False)
    """Client certificate and key together."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    proxy: str | None = None
    """`host:port` of an HTTP proxy to tunnel through."""

    def header(self) -> str | None:
        """The Authorization header, from the token file as it is now. Raises OSError when that is not readable."""
        if self.token_file is not None:
            with self.token_file.open(encoding="utf-8", errors="replace") as stream:
                return f"Bearer {stream.read(MAX_TOKEN_BYTES).strip()}"
        return f"Bearer {self.token}" if self.token is not None else self.authorization

    def tls(self) -> ssl.SSLContext:
        """A context of its own for one connection, from the files as they are now. Raises OSError."""
        context = ssl.create_default_context(cafile=self.ca_file, cadata=self.ca_pem)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file is not None:
            context.load_cert_chain(self.certificate_file, self.key_file)
        elif self.certificate_pem is not None:
            _load_inline(context, self.certificate_pem)
        return context


def _load_inline(context: ssl.SSLContext, pem: str) -> None:
    """OpenSSL takes a client key from a file only; this one has no name and never touches a disk."""
    number = os.memfd_create("client-certificate")
    try:
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def in_cluster(environment: Mapping[str, str], *, account: Path = SERVICE_ACCOUNT) -> Access:
    """The pod's own service account. Raises ConfigError outside a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise errors.ConfigError(
            "No API server: --kubeconfig is not given, and this is no pod (KUBERNETES_SERVICE_HOST is not set)"
        )
    token, authority = account / "token", account / "ca.crt"
    for path in (token, authority):
        if not path.is_file():
            raise errors.ConfigError(
                f"The service account of this pod has no {path}: mount its token or give --kubeconfig"
            )
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return Access(server=server, token_file=token, ca_file=authority, proxy=_proxy(environment, host))


def _proxy(environment: Mapping[str, str], host: str) -> str | None:
    """The proxy that the environment asks for, unless it exempts the host: names, suffixes and networks, as Go reads it."""
    url = environment.get("HTTPS_PROXY") or environment.get("https_proxy")
    if not url:
        return None
    for entry in (environment.get("NO_PROXY") or environment.get("no_proxy") or "").split(","):
        exempt = entry.strip().lower().lstrip(".")
        if exempt and (exempt in {"*", host} or host.endswith(f".{exempt}") or _within(host, exempt)):
            return None
    return proxy_address(url)


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def proxy_address(url: str) -> str:
    """`host:port` of a proxy URL. Raises ConfigError for any but a plain HTTP proxy without a login."""
    scheme, separator, place = url.rpartition("://")
    place = place.rstrip("/")
    if (separator and scheme.lower() != "http") or "@" in place or "/" in place:
        raise errors.ConfigError(
            f"The proxy for the API server must be http://HOST:PORT; {scheme or 'this'} is not supported"
        )
    return place if place.rpartition(":")[2].isdecimal() else f"{place}:80"


class Loading:
    """The readings of kubeconfigs that are under way, so that none outlives who asked for it: each has plugins that run, and a
    folder with keys. For any number of threads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._children: set[subprocess.Popen[str]] = set()
        self._under_way = 0
        self._closed = False

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End them, wait until their folders are gone, and begin none any more."""
        with self._changed:
            self._closed = True
            for child in self._children:
                _end(child)
            self._changed.wait_for(lambda: not self._under_way, timeout_s)

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """One reading, its folder included. Raises ApiError after `close`."""
        with self._changed:
            if self._closed:
                raise errors.ApiError("No kubeconfig is read any more", reason=errors.ApiReason.UNAVAILABLE)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def running(self, child: subprocess.Popen[str]) -> Iterator[None]:
        """The process of a reading, ended with the block."""
        with self._changed:
            self._children.add(child)
            if self._closed:
                _end(child)
        try:
            yield
        finally:
            with self._changed:
                self._children.discard(child)
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """End the loader and its plugins, which are its session."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def load_kubeconfig(path: Path, *, loading: Loading | None = None, timeout_s: float = LOAD_TIMEOUT_S) -> Access:
    """What a kubeconfig says, credentials of its plugins included. `loading` can end it.

    Raises ConfigError when the file is wrong, ApiError (retryable) when a plugin did not give credentials.
    """
    if not path.is_file():
        raise errors.ConfigError(f"The kubeconfig {path} is no file")
    loading = loading or Loading()
    with loading.begun():
        code, output, complaints = _run_loader(path, loading, timeout_s)
    said = complaints.strip().splitlines()
    if code == BAD_CONFIG:
        raise errors.ConfigError(f"The kubeconfig {path} is not usable: {said[-1] if said else 'no reason given'}")
    if code != 0:
        raise errors.ApiError(
            f"The kubeconfig {path} gave no credentials: {said[-1] if said else f'status {code}'}",
            reason=errors.ApiReason.UNAVAILABLE,
        )
    return from_json(json.loads(output))


def _run_loader(path: Path, loading: Loading, timeout_s: float) -> tuple[int, str, str]:
    """Exit status, output and complaints of the loader. It has a session of its own, so that its plugins end with it, and a folder
    that goes however it ends, as the client writes inline keys into files.
    """
    import tempfile  # noqa: PLC0415 - in a pod there is no kubeconfig

    try:
        made = tempfile.TemporaryDirectory(prefix="nearfield-", ignore_cleanup_errors=True)
    except OSError as error:
        raise errors.ApiError(
            f"Reading the kubeconfig {path} takes a folder for temporary files: {error}",
            reason=errors.ApiReason.UNAVAILABLE,
        ) from error
    with (
        made as folder,
        subprocess.Popen(
            [sys.executable, "-m", "driver.kube.loader", str(path), folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
        loading.running(child),
    ):
        try:
            output, complaints = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise errors.ApiError(
                f"Reading the kubeconfig {path} took more than {timeout_s:.0f} s: "
                "is a credential plugin waiting for something?",
                reason=errors.ApiReason.UNAVAILABLE,
            ) from error
    return child.returncode, output, complaints


def from_json(loaded: Mapping[str, Any]) -> Access:
    """The Access that the loader printed."""
    fields: dict[str, Any] = dict(loaded)
    for key in ("token_file", "ca_file", "certificate_file", "key_file"):
        if fields.get(key) is not None:
            fields[key] = Path(fields[key])
    return Access(**fields)
