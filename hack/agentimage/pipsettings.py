# SPDX-License-Identifier: Apache-2.0
"""How pip reaches its index on this machine (mirror, proxy, certificate), for the pip inside a build.

Both files become secrets of the build: they are mounted for one command and are in no layer. An index's address may hold a password.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CERTIFICATE = "/run/secrets/pip.crt"
"""Where the Containerfile's secret `pip.crt` lies inside the build."""

NETWORK = frozenset(
    {
        "default-timeout",
        "extra-index-url",
        "find-links",
        "index-url",
        "no-index",
        "proxy",
        "retries",
        "timeout",
        "trusted-host",
    }
)
"""Settings that say where packages come from and how to get there. Others are not the build's business."""

BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables by which pip, like most programs, is told of a certificate authority of one's own, in pip's order."""


@dataclass(frozen=True)
class PipSettings:
    """A pip.conf for the build, and the bundle of certificates that it names, or none."""

    text: str
    certificate: Path | None

    def write(self, folder: Path) -> dict[str, Path]:
        """The secrets of a build by their ids, readable by this user only."""
        secrets = {"pip.conf": folder / "pip.conf", "pip.crt": folder / "pip.crt"}
        for path, content in zip(
            secrets.values(),
            (self.text.encode(), self.certificate.read_bytes() if self.certificate else b""),
            strict=True,
        ):
            path.touch(mode=0o600)
            path.write_bytes(content)
        return secrets


def read(listing: str, environment: Mapping[str, str]) -> PipSettings:
    """From what `pip config list` prints (`scope.setting='value'` a line) and the environment's bundles of certificates."""
    settings: dict[str, str] = {}
    for line in sorted(
        listing.splitlines(), key=lambda line: line.startswith(":env:.")
    ):  # a variable wins over any file
        name, _, value = line.partition("=")
        setting = name.rpartition(".")[2]
        if name.startswith((":env:.", "global.", "install.", "download.")) and value:
            settings[setting] = str(ast.literal_eval(value))
    bundle = settings.get("cert") or next((environment[name] for name in BUNDLES if environment.get(name)), None)
    certificate = Path(bundle) if bundle and Path(bundle).is_file() else None
    lines = ["[global]"]
    for setting in sorted(NETWORK & settings.keys()):
        value = settings[setting]
        if setting == "find-links":  # a folder of this machine is not in the build
            value = "\n".join(link for link in value.split() if "://" in link)
        if value:
            lines.append(f"{setting} = " + "\n    ".join(value.split()))
    if certificate:
        lines.append(f"cert = {CERTIFICATE}")
    return PipSettings("\n".join(lines) + "\n", certificate)


def of_this_machine() -> PipSettings:
    """What the pip of this interpreter would use; pip's defaults where it has none."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    return read(listing.stdout if listing.returncode == 0 else "", os.environ)
