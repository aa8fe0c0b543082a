# SPDX-License-Identifier: Apache-2.0
"""`nearfield` as a process: what every verb shares.

- version, help with examples, help of each verb; the short help of the group is the verb's own
- `--help` imports nothing heavy
- exit status: 0, 1, 2, 130, 141; errors are one sentence on standard error, never a traceback
- standard output that is closed, full, narrow in its encoding
- `config check` and `config schema`
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from driver.cli import main

ROOT = Path(__file__).parents[2]
NEARFIELD = (sys.executable, "-m", "driver.cli")
HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"


def nearfield(
    *arguments: str, stdin: str = "", env: dict[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NEARFIELD, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
    )


def test_the_console_script_is_this_program() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "nearfield", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == nearfield("-V").stdout == "nearfield 0.1.0\n"


def test_help_lists_every_verb_and_examples() -> None:
    done = nearfield("--help")
    assert done.returncode == 0
    for verb, text in main.VERBS.items():
        assert f"\n  {verb} " in done.stdout
        assert text.split()[0] in done.stdout
    assert "Examples:\n    nearfield topo " in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom driver.cli import main\n"
        "try: main.main(['--help'])\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stderr.split()}
    assert (
        imported & {"yaml", "pydantic", "rich", "prometheus_client", "kubernetes", "grpc", "psutil", "pynvml"} == set()
    )


@pytest.mark.parametrize("verb", main.VERBS)
def test_the_group_says_of_a_verb_what_the_verb_says(verb: str) -> None:
    command = importlib.import_module(f"driver.cli.{verb}").command
    assert command.name == verb
    assert (command.help or "").startswith(main.VERBS[verb])
    shown = CliRunner().invoke(main.group, [verb, "--help"], prog_name="nearfield")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: nearfield {verb} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tpo",), "Error: No such command 'tpo'. Did you mean topo?"),
        (("frobnicate",), "Error: No such command 'frobnicate'."),
        (("machines", "--what"), "Error: No such option"),
        (("machines", "-o", "xml"), "'xml' is not one of 'table', 'json', 'yaml'."),
        (("machines", "nosuch"), "Error: nosuch: no machine of the zoo; there are "),
        (("config", "check"), "Error: Missing argument 'FILE'."),
        (("config", "check", "/nonexistent"), "Error: /nonexistent: cannot be read: No such file or directory"),
        (("topo", "--mock", "nosuch"), "Error: --mock nosuch: neither a machine of the zoo ("),
        (("topo", "--mock", "dgx-h100", "--sysfs", "/sys"), "Error: --mock brings its own machine"),
        (("slices", "--node-name", "N", "--mock", "dgx-h100"), "Error: --node-name N: not a node name"),
        (("devices", "--driver-name", "X"), "Error: --driver-name X: a driver name is lower case"),
        (("run",), "Error: --node-name (or NEARFIELD_NODE_NAME) is missing"),
    ],
)
def test_bad_usage_is_status_2_and_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = nearfield(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_is_status_1(tmp_path: Path) -> None:
    done = nearfield("claims", "--state-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: There is no record at {tmp_path}/none")


def test_a_defect_is_a_sentence_that_says_where() -> None:
    code = (
        "import sys\nfrom driver.cli import main\nmain.group.callback = lambda: {}['nothing']\nmain.main(['machines'])"
    )
    quiet = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert quiet.returncode == 1
    assert quiet.stderr.startswith(
        "Error: Internal error: KeyError: 'nothing' (<string>:3). This is a defect of nearfield"
    )
    assert "Traceback" not in quiet.stderr
    env = {**os.environ, "NEARFIELD_LOG_LEVEL": "debug"}
    loud = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" in loud.stderr


def test_a_reader_that_left_is_met_with_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = nearfield("machines", "dgx-h100", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_said() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = nearfield("machines", "dgx-h100", stdout=full.fileno())
    assert done.returncode == 1
    # It shows at the first write or at the last flush, as Python's buffer has it.
    assert done.stderr in (
        "Error: No space left on device\n",
        "Error: The output could not be written: No space left on device\n",
    )


def test_a_narrow_encoding_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("apiVersion: config.nearfield.dev/v1alpha1\nkind: Agent\u2603\n", encoding="utf-8")
    done = nearfield("config", "check", str(file), env={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 2
    assert r"Agent\u2603" in done.stderr


def test_an_interrupt_ends_it_quietly() -> None:
    with subprocess.Popen(
        [*NEARFIELD, "config", "check", "-"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        # It reads what is already there, so once the pipe is empty it waits for more, in the verb.
        fd = process.stdin.fileno()
        os.write(fd, b"#" * 4096)
        while _unread(fd):
            pass
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    assert (process.returncode, errors) == (130, "")


def _unread(fd: int) -> int:
    """How many bytes lie in a pipe."""
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def test_config_check_prints_what_is_in_effect(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(HEAD + "publish: {pcieSwitches: true}\n", encoding="utf-8")
    done = nearfield("config", "check", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    effective = {
        "apiVersion": "config.nearfield.dev/v1alpha1",
        "kind": "AgentConfig",
        "publish": {"numaNode": "scalar", "pcieSwitches": True},
        "topology": {"overlayFile": "", "rails": []},
        "sharing": [],
    }
    assert yaml.safe_load(done.stdout) == effective
    piped = nearfield("config", "check", "-", "-o", "json", stdin=done.stdout)
    assert json.loads(piped.stdout) == effective


def test_config_check_names_every_problem() -> None:
    done = nearfield("config", "check", "-", stdin=HEAD + "publsh: 1\nsharing: [{}]\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "Error: standard input:4: sharing[0].mode: missing",
        "standard input:3: publsh: unknown key; did you mean publish?",
    ]


def test_config_schema_is_the_published_one() -> None:
    done = nearfield("config", "schema")
    assert done.stdout == (ROOT / "docs/configuration.schema.json").read_text(encoding="utf-8")


def test_the_configuration_of_a_claim_is_checked_as_an_agent_would() -> None:
    header = "apiVersion: gpu.nearfield.dev/v1alpha1\nkind: ClaimConfig\n"
    good = nearfield("config", "check", "-", "-o", "json", stdin=header + "memory: {limit: 16Gi}\n")
    assert json.loads(good.stdout)["memory"] == {"limit": "16Gi"}
    bad = nearfield("config", "check", "-", stdin=header + "memory: {limit: 16GB}\n")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith('Error: standard input: ClaimConfig.memory.limit is "16GB", not a quantity of bytes')
    schema = nearfield("config", "schema", "ClaimConfig")
    assert schema.stdout == (ROOT / "docs/claimconfig.schema.json").read_text(encoding="utf-8")
