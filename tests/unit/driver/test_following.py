# SPDX-License-Identifier: Apache-2.0
"""The configuration file while the agent runs, with real files and a clock that the test turns.

- edits, renames and the link of a ConfigMap are seen, once they have settled; what did not change is not read again
- a file that is not valid, huge, gone, a folder or a pipe changes nothing, is told of once, and is over when it is
- what takes a restart is said; what does not is in effect
- asked again, it reads at once, and says what came of it
- the thread: it ends when told, and a storm of requests is one
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from discovery import document
from driver import config, configfile
from driver.app import following
from driver.errors import ConfigError
from driver.sharing.rules import Mode, Rule

HEAD = "apiVersion: config.nearfield.dev/v1alpha1\nkind: AgentConfig\n"
STATIC = HEAD + "sharing: [{mode: mig-static}]\n"
DYNAMIC = HEAD + "sharing: [{mode: mig-dynamic}]\n"
BROKEN = HEAD + "sharing: [{mode: mig}]\n"
MARGIN_S = 0.1


class Follower:
    """What follows a file, and what it told."""

    def __init__(self, path: Path | None, text: str | None = HEAD) -> None:
        if path is not None and text is not None:
            path.write_text(text, encoding="utf-8")
        self.path = path
        self.time = 1000.0
        self.reads = 0
        self.changes: list[tuple[Mode, ...]] = []
        self.told: list[str] = []
        self.following = following.Following(
            path,
            running=config.AgentConfig() if path is None or text is None else configfile.load(path),
            load=self._load,
            changed=lambda: self.changes.append(self.modes()),
            refused=self.told.append,
            clock=lambda: self.time,
        )

    def _load(self, path: Path) -> config.AgentConfig:
        self.reads += 1
        return configfile.load(path)

    def modes(self) -> tuple[Mode, ...]:
        return tuple(rule.mode for rule in self.following.in_effect.sharing)

    def settle(self) -> None:
        """Look as often as it wants to, until it has nothing in hand."""
        for _ in range(100):
            pause_s = self.following.look()
            if pause_s in (None, following.WATCH_S):
                return
            assert pause_s is not None
            assert 0 < pause_s <= following.SETTLE_S
            self.time += pause_s
        raise AssertionError("it never settles")

    def write(self, text: str) -> None:
        assert self.path is not None
        self.path.write_text(text, encoding="utf-8")
        self.settle()

    def codes(self) -> list[str]:
        return [finding.code for finding in self.following.findings()]


@pytest.fixture(name="follower")
def fixture_follower(tmp_path: Path) -> Follower:
    made = Follower(tmp_path / "c.yaml")
    made.settle()
    return made


def test_a_file_that_stays_is_read_once(follower: Follower) -> None:
    for _ in range(5):
        follower.settle()
    assert (follower.reads, follower.changes, follower.codes()) == (1, [], [])


def test_a_change_before_the_first_look_is_not_missed(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "c.yaml")
    follower.write(STATIC)
    assert follower.changes == [(Mode.MIG_STATIC,)]


def test_an_edit_takes_effect_when_it_has_settled(follower: Follower) -> None:
    assert follower.path is not None
    follower.path.write_text(STATIC, encoding="utf-8")
    assert follower.following.look() == pytest.approx(following.SETTLE_S)
    follower.time += following.SETTLE_S - MARGIN_S
    assert follower.modes() == ()
    # Still being written: the time begins anew.
    follower.path.write_text(STATIC + "publish: {pcieSwitches: true}\n", encoding="utf-8")
    follower.following.look()
    follower.time += following.SETTLE_S - MARGIN_S
    assert follower.following.look() == pytest.approx(MARGIN_S)
    assert follower.reads == 1
    follower.time += MARGIN_S
    assert follower.following.look() == following.WATCH_S
    assert follower.changes == [(Mode.MIG_STATIC,)]
    assert follower.following.in_effect.publish.pcie_switches


def test_a_rename_is_seen(follower: Follower) -> None:
    assert follower.path is not None
    beside = follower.path.with_suffix(".new")
    beside.write_text(STATIC, encoding="utf-8")
    beside.replace(follower.path)
    follower.settle()
    assert follower.changes == [(Mode.MIG_STATIC,)]


def config_map(folder: Path, generation: int, text: str) -> None:
    """As kubelet writes one (volume/util/atomic_writer.go): a folder of this time, and a link that is renamed over the last."""
    data = folder / f"..2026_{generation}"
    data.mkdir(parents=True)
    (data / "agent.yaml").write_text(text, encoding="utf-8")
    (folder / "..data_tmp").symlink_to(data.name)
    before = (folder / "..data").readlink() if (folder / "..data").exists() else None
    (folder / "..data_tmp").replace(folder / "..data")
    if before is None:
        (folder / "agent.yaml").symlink_to("..data/agent.yaml")
    else:
        (folder / before / "agent.yaml").unlink()
        (folder / before).rmdir()


def test_the_link_that_kubelet_swaps_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    config_map(folder, 1, HEAD)
    follower = Follower(folder / "agent.yaml", text=None)
    follower.settle()
    for generation, text, modes in ((2, STATIC, (Mode.MIG_STATIC,)), (3, DYNAMIC, (Mode.MIG_DYNAMIC,)), (4, HEAD, ())):
        config_map(folder, generation, text)
        follower.settle()
        assert follower.modes() == modes
    assert (follower.codes(), follower.told) == ([], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BROKEN, "c.yaml:3: sharing[0].mode: must be 'exclusive', 'mig-static', 'mig-dynamic' or 'shares', not 'mig'"),
        ("", "c.yaml:1: expected apiVersion"),
        (STATIC[:-5], "not YAML"),
        ("\0", "not allowed"),
        ("#" * (document.MAX_BYTES + 1), "larger than"),
        (HEAD + "sharing:\n" + "- {mode: mig-static}\n" * 3, "sharing[1]: has no effect"),
    ],
)
def test_what_is_not_valid_changes_nothing(tmp_path: Path, text: str, said: str) -> None:
    follower = Follower(tmp_path / "c.yaml", STATIC)
    follower.settle()
    follower.write(text)
    assert follower.modes() == (Mode.MIG_STATIC,)
    assert follower.codes() == ["config-refused"]
    assert follower.following.refused
    (told,) = follower.told
    assert said in told
    assert told == follower.following.findings()[0].message
    follower.write(DYNAMIC)
    assert follower.modes() == (Mode.MIG_DYNAMIC,)
    assert (follower.codes(), follower.following.refused, follower.told) == ([], False, [told])


def test_it_is_over_when_the_file_is_as_it_was(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        follower.write(BROKEN)
        follower.write(HEAD)
    assert (follower.codes(), follower.changes) == ([], [])
    assert "The configuration file is valid again" in caplog.text


def test_many_problems_are_counted_for_a_finding_and_listed_in_the_log(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    follower.write(HEAD + "a: 1\nb: 1\nc: 1\nd: 1\n")
    (told,) = follower.told
    assert told.endswith("; and 1 more")
    assert "c.yaml:6: d: unknown key" in caplog.text


def test_a_file_that_is_away_for_a_moment_is_none(follower: Follower) -> None:
    assert follower.path is not None
    text = follower.path.read_text(encoding="utf-8")
    follower.path.unlink()
    follower.following.look()
    follower.time += following.GONE_S - MARGIN_S
    follower.following.look()
    assert follower.codes() == []
    follower.path.write_text(text, encoding="utf-8")
    follower.settle()
    assert (follower.codes(), follower.told) == ([], [])
    follower.path.unlink()
    follower.settle()
    assert follower.codes() == ["config-refused"]
    assert "c.yaml: No such file or directory" in follower.told[0]
    follower.write(STATIC)
    assert (follower.codes(), follower.changes) == ([], [(Mode.MIG_STATIC,)])


def test_what_is_no_file_any_more_is_not_opened(follower: Follower) -> None:
    assert follower.path is not None
    for make in (Path.mkdir, os.mkfifo):
        follower.path.unlink()
        make(follower.path)
        follower.settle()
        assert "is no regular file" in follower.following.findings()[0].message
        follower.path.rmdir() if follower.path.is_dir() else follower.path.unlink()
        follower.write(HEAD)
        assert follower.codes() == []


def test_a_pipe_of_the_start_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    follower = Follower(path, text=None)
    assert follower.following.look() is None
    path.unlink()
    assert follower.following.look() is None
    assert follower.following.look(asked=True) is None
    assert f"SIGHUP: {path} was a pipe at the start" in caplog.text
    assert (follower.reads, follower.codes()) == (0, [])


def test_without_a_file_there_is_nothing_to_do_but_to_say_so(caplog: pytest.LogCaptureFixture) -> None:
    follower = Follower(None)
    assert follower.following.look() is None
    assert caplog.text == ""
    assert follower.following.look(asked=True) is None
    assert "SIGHUP: there is no configuration file to read again" in caplog.text
    assert follower.following.findings() == ()


def test_another_section_takes_a_restart(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    rails = "topology: {rails: [{nic: 0000:18:00.0, rail: 0}]}\n"
    follower.write(STATIC + rails)
    assert follower.changes == [(Mode.MIG_STATIC,)]
    assert follower.following.in_effect.topology == config.TopologyConfig()
    assert follower.codes() == ["config-restart-needed"]
    follower.write(DYNAMIC + rails)
    assert caplog.text.count("takes a restart of the agent") == 1
    # A file that is broken meanwhile does not hide it.
    follower.write(BROKEN)
    assert follower.codes() == ["config-refused", "config-restart-needed"]
    follower.write(HEAD)
    assert (follower.codes(), follower.modes()) == ([], ())


def test_asked_it_reads_at_once_and_says_what_came_of_it(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    assert follower.path is not None
    with caplog.at_level(logging.INFO):
        follower.following.look(asked=True)
        assert "SIGHUP: the configuration file was read again, and changes nothing" in caplog.text
        follower.path.write_text(STATIC, encoding="utf-8")
        assert follower.following.look(asked=True) == following.WATCH_S
        assert follower.changes == [(Mode.MIG_STATIC,)]
        assert "section sharing" in caplog.text
        follower.path.write_text(BROKEN, encoding="utf-8")
        follower.following.look(asked=True)
        caplog.clear()
        follower.following.look(asked=True)
        assert "SIGHUP: The configuration file is not valid" in caplog.text
    assert len(follower.told) == 1


def test_a_defect_in_reading_is_no_end(tmp_path: Path) -> None:
    def load(_: Path) -> config.AgentConfig:
        raise RuntimeError("a defect")

    path = tmp_path / "c.yaml"
    path.write_text(HEAD, encoding="utf-8")
    told: list[str] = []
    made = following.Following(
        path, running=config.AgentConfig(sharing=(Rule(),)), load=load, changed=lambda: None, refused=told.append
    )
    made.look(asked=True)
    assert "RuntimeError: a defect" in told[0]
    assert made.in_effect.sharing == (Rule(),)


def test_the_thread_reads_when_asked_and_ends_when_told(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(STATIC, encoding="utf-8")
    changed = threading.Event()
    reads: list[Path] = []
    hold = threading.Event()

    def load(given: Path) -> config.AgentConfig:
        reads.append(given)
        hold.wait(40)
        return configfile.load(given)

    made = following.Following(
        path, running=config.AgentConfig(), load=load, changed=changed.set, refused=lambda message: None
    )
    made.start()
    for _ in range(1000):
        made.again()
    hold.set()
    assert changed.wait(40)
    made.stop()
    made.stop()
    assert made.in_effect.sharing == (Rule(mode=Mode.MIG_STATIC),)
    # One read that was under way when the others asked, and one for all of those; a look of its own may have come before.
    assert len(reads) <= 3


def test_a_path_that_is_none_is_an_error_of_the_file() -> None:
    with pytest.raises(ConfigError):
        configfile.load(Path("a\0b"))
    follower = Follower(Path("a\0b"), text=None)
    follower.settle()
    assert follower.codes() == ["config-refused"]
