# SPDX-License-Identifier: Apache-2.0
"""Reads a kubeconfig with the official client and prints what `access.Access` needs, as JSON. A process of its own.

`python -m driver.kube.loader FILE FOLDER`: the client makes its files in FOLDER. Exit status 0; `access.BAD_CONFIG` when the file is
wrong; 1 when it is right but its credentials could not be had. The last line of stderr is the reason. Nothing but the JSON goes to
stdout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client import rest
from kubernetes.config import config_exception, kube_config

from driver import errors
from driver.kube import access


class _NoCredentialsError(Exception):
    """The file is right, and what it names gave no credentials."""


class _Complaints(logging.Handler):
    """What the client logs instead of raising: a plugin that failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load(path: Path, temporary: str) -> dict[str, Any]:
    """The fields of an Access. `temporary`: where the client makes files. Raises ConfigException, ConfigError or
    _NoCredentialsError.
    """
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    configuration = client.Configuration()
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise config_exception.ConfigException("it is no mapping of clusters, users and contexts")
    reading: Any = kube_config  # untyped
    reader = reading.KubeConfigLoader(
        config_dict=document, config_base_path=str(path.resolve().parent), temp_file_path=temporary
    )
    reader.load_and_set(configuration)
    user = _user(document, reader.current_context)
    authorization = configuration.get_api_key_with_prefix("BearerToken")
    if ("exec" in user or "auth-provider" in user) and not authorization and not configuration.cert_file:
        raise _NoCredentialsError(
            "; ".join(complaints.texts) or "its credential plugin gave neither token nor certificate"
        )
    return (
        {
            "server": configuration.host.rstrip("/"),
            "verify": bool(configuration.verify_ssl),
            "server_name": configuration.tls_server_name,
            "expires_at": expiry.timestamp() if (expiry := getattr(reader, "expiry", None)) is not None else None,
            "proxy": _proxy(configuration),
        }
        | _authorization(authorization, user, path)
        | _authority(configuration, temporary)
        | _certificate(configuration, temporary)
    )


def _user(config: dict[str, Any], context: dict[str, Any]) -> dict[str, Any]:
    name = (context.get("context") or {}).get("user")
    return next((entry.get("user") or {} for entry in config.get("users") or [] if entry.get("name") == name), {})


def _authorization(header: str | None, user: dict[str, Any], path: Path) -> dict[str, Any]:
    # The client reads a token file once; ours is read again as it is renewed. Inline data wins, as it does there.
    if user.get("tokenFile") and not user.get("token"):
        return {"token_file": str((path.parent / user["tokenFile"]).resolve())}
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() == "bearer":
        return {"token": token.strip()}
    return {"authorization": header}


def _authority(configuration: client.Configuration, temporary: str) -> dict[str, Any]:
    authority = configuration.ssl_ca_cert
    if authority is not None and Path(authority).is_relative_to(temporary):
        return {"ca_pem": Path(authority).read_text(encoding="utf-8")}
    return {"ca_file": authority}


def _certificate(configuration: client.Configuration, temporary: str) -> dict[str, Any]:
    certificate, key = configuration.cert_file, configuration.key_file
    if certificate is None:
        return {}
    if any(path is not None and Path(path).is_relative_to(temporary) for path in (certificate, key)):
        return {
            "certificate_pem": "\n".join(Path(path).read_text(encoding="utf-8") for path in (certificate, key) if path)
        }
    return {"certificate_file": certificate, "key_file": key}


def _proxy(configuration: client.Configuration) -> str | None:
    proxy = configuration.proxy
    if not proxy or rest.should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        return None
    return access.proxy_address(proxy)


def main() -> int:
    """Load the file that the command line names, with the folder that it names."""
    try:
        # Plugins and the client itself may print; stdout is for the answer.
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load(Path(sys.argv[1]), sys.argv[2])
    except _NoCredentialsError as error:
        sys.stderr.write(f"{error}\n".replace("\n", " ") + "\n")
        return 1
    except (
        config_exception.ConfigException,
        errors.ConfigError,
        yaml.YAMLError,
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        # A document of another shape makes the client fail in many ways; all of them are the document's fault.
        sys.stderr.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        return access.BAD_CONFIG
    sys.stdout.write(json.dumps(loaded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
