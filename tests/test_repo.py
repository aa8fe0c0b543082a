# SPDX-License-Identifier: Apache-2.0
"""The repository itself: format, lint, types, layers, licences, and nothing of anybody's machine in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    """Run a checker from the root; its output is the failure."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def tracked() -> list[Path]:
    """Every file that git tracks or would track, as paths below the root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def is_generated(path: Path) -> bool:
    return path.parts[0] == "proto" and "_pb2" in path.name


def shell_scripts() -> list[Path]:
    return [
        path
        for path in tracked()
        if path.parts[0] in ("hack", ".ci") and (ROOT / path).read_bytes()[:64].split(b"\n")[0].endswith(b"bash")
    ]


def test_sources_are_formatted() -> None:
    run(BIN / "ruff", "format", "--check", "--quiet", ".")


def test_sources_pass_the_linter() -> None:
    run(BIN / "ruff", "check", "--quiet", ".")


@pytest.mark.timeout(900)
def test_sources_and_tests_are_typed() -> None:
    run(sys.executable, "-m", "mypy")


def test_layers_and_single_importers_hold() -> None:
    run(BIN / "lint-imports", "--no-cache")


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = shell_scripts()
    assert Path("hack/check") in scripts
    run(BIN / "shellcheck", *scripts)


def test_every_source_names_its_licence() -> None:
    missing = [
        str(path)
        for path in tracked()
        if path.suffix in (".py", ".proto") or path.parts[0] in ("hack", ".ci")
        if not is_generated(path) and path.suffix not in (".json", ".md", ".mod", ".sum")
        if "SPDX-License-Identifier: Apache-2.0" not in (ROOT / path).read_text(encoding="utf-8")[:200]
    ]
    assert missing == []


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    assert [str(path) for path in tracked() if path.stem in drawers] == []


def test_no_module_outgrows_a_reader() -> None:
    """500 lines is the hard stop for a module; a table of facts is data and lives in YAML."""
    outgrown = {
        str(path): lines
        for path in tracked()
        if path.suffix == ".py" and path.parts[0] in ("driver", "discovery") and not is_generated(path)
        if (lines := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > 500
    }
    assert outgrown == {}


def test_nothing_names_a_builders_machine() -> None:
    """Paths, hosts and registries of the place where the project was built have no business in it."""
    # Spelt in pieces, so that this file does not match itself.
    foreign = re.compile("|".join(["/wor" + "k/", "/roo" + "t/", "/far" + "m/", r"\.libr" + "ary/", "/tmp/" + "nf"]))
    hits = [
        f"{path}: {match.group(0)}"
        for path in tracked()
        if path.suffix not in (".gz", ".db")
        if (match := foreign.search((ROOT / path).read_text(encoding="utf-8", errors="replace")))
    ]
    assert hits == []


def test_ci_calls_the_documented_test_commands_in_order() -> None:
    commands = ["make test", "make oracle", "make e2e"]
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == commands
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [command for command in commands if command not in readme] == []


def test_every_test_is_part_of_a_documented_command(pytestconfig: pytest.Config) -> None:
    chosen = {path for pattern in pytestconfig.getini("testpaths") for path in ROOT.glob(pattern)}
    run_by_make_test = {test for path in chosen for test in ([path] if path.is_file() else path.rglob("test_*.py"))}
    every = set((ROOT / "tests").rglob("test_*.py"))
    assert every - run_by_make_test == set((ROOT / "tests/e2e").rglob("test_*.py"))


def test_links_between_documents_lead_somewhere() -> None:
    """Relative links of Markdown, to files that a clone has."""
    files = {*tracked(), *(parent for path in tracked() for parent in path.parents)}
    broken = [
        f"{path}: {link}"
        for path in tracked()
        if path.suffix == ".md"
        for link in re.findall(r"\]\(([^)#\s]+)", (ROOT / path).read_text(encoding="utf-8"))
        if "://" not in link and Path(os.path.normpath(path.parent / link)) not in files
    ]
    assert broken == []


def test_every_marker_is_used_or_gone() -> None:
    """No test is skipped or expected to fail: what cannot run here is not written as a test."""
    pattern = re.compile(r"pytest\.(mark\.)?(skip|skipif|xfail)\b")
    here = Path(__file__).relative_to(ROOT)
    hits = [
        str(path)
        for path in tracked()
        if path.parts[0] == "tests" and path.suffix == ".py" and path != here
        if pattern.search((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert hits == []
