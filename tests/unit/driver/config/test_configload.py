# SPDX-License-Identifier: Apache-2.0
"""Reading a configuration file in a process of its own: the same as here, problems and all, also from a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from driver import configfile, configload
from driver.errors import ConfigError

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
FULL = HEAD + (
    "publish: {numaNode: list}\ntopology: {overlayFile: o.yaml, rails: [{nic: 0000:18:00.0, rail: 1}]}\n"
    "sharing: [{match: {address: 0000:1b:00.0, count: 1}, mode: mig-dynamic, profiles: [1g.*]}, {mode: mig-static}]\n"
)


@pytest.mark.parametrize("text", [HEAD, FULL])
def test_it_is_what_would_be_read_here(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    assert configload.load(path) == configfile.load(path)
    monkeypatch.chdir(tmp_path)
    assert configload.load(Path("c.yaml")) == configfile.load(path)


@pytest.mark.parametrize("text", ["", HEAD + "a: 1\nb: 2\n", "\u00e9: [", "\0"])
def test_so_are_its_problems(text: str, tmp_path: Path) -> None:
    path = tmp_path / "d\u00e9j\u00e0.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as here:
        configfile.load(path)
    with pytest.raises(ConfigError) as there:
        configload.load(path)
    assert str(there.value) == str(here.value)


@pytest.mark.parametrize("name", ["nothing.yaml", ".", "a\0b"])
def test_what_is_no_file_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        configload.load(tmp_path / name)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(FULL,))
    writer.start()
    loaded = configload.load(path)
    writer.join()
    assert len(loaded.sharing) == 2


def test_a_process_that_dies_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HEAD, encoding="utf-8")
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho out of memory >&2\nkill -9 $$\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(ConfigError, match=r"c\.yaml: the process that read it ended with status -9: out of memory"):
        configload.load(path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no process could be started"):
        configload.load(path)


def test_the_reader_of_the_agent_takes_no_library_for_documents() -> None:
    """pydantic and yaml would stay in the memory of the agent for good."""
    script = "import sys, driver.configload; print(sorted({'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
