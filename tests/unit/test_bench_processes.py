# SPDX-License-Identifier: Apache-2.0
"""What the benchmark reads of processes.

- smaps: mappings with and without a file; a name that holds colons and numbers is not a size
- memory of a group: shared pages of a file once, private copies for each, anonymous memory for each
- descendants: over several generations, whatever the name of a process
- real ones: this process has memory and CPU time; a child that ends is said with its last words
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hack.bench import processes
from hack.bench.errors import BenchError

SMAPS = """\
55d0c0000000-55d0c0100000 r-xp 00001000 fd:00 4711                       /usr/lib/libx: 12 kB.so
Size:               1024 kB
Rss:                 400 kB
Pss:                 100 kB
Pss_Dirty:             0 kB
Anonymous:             8 kB
VmFlags: rd ex mr mw me
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Size:                132 kB
Rss:                  20 kB
Pss:                  20 kB
Anonymous:            20 kB
THPeligible:           0
"""
LIBRARY = ("fd:00", 4711, 0x1000)


def test_smaps() -> None:
    assert list(processes.parse_smaps(SMAPS)) == [
        processes.MemoryMapping(file=LIBRARY, rss=400 * 1024, pss=100 * 1024, anonymous=8 * 1024),
        processes.MemoryMapping(file=None, rss=20 * 1024, pss=20 * 1024, anonymous=20 * 1024),
    ]


def test_no_smaps() -> None:
    assert list(processes.parse_smaps("")) == []


def _library(*, rss: int, pss: int, anonymous: int) -> processes.MemoryMapping:
    return processes.MemoryMapping(file=LIBRARY, rss=rss, pss=pss, anonymous=anonymous)


def test_memory_of_a_group_has_each_page_once() -> None:
    heap = processes.MemoryMapping(file=None, rss=50, pss=50, anonymous=50)
    first = [_library(rss=100, pss=30, anonymous=10), heap]
    second = [_library(rss=80, pss=25, anonymous=5), heap]
    assert processes.sum_memory([first, second]) == processes.Memory(pss=155, alone=90 + 10 + 5 + 50 + 50)


def test_memory_of_nothing() -> None:
    assert processes.sum_memory([]) == processes.Memory(pss=0, alone=0)


def test_descendants(tmp_path: Path) -> None:
    for pid, parent, name in ((10, 1, "agent"), (11, 10, "probe) R 1 (x"), (12, 11, "deep"), (13, 1, "other")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 10 10 0 -1\n")
    (tmp_path / "14").mkdir()  # ended: its stat is gone
    (tmp_path / "meminfo").write_text("")
    assert processes.descendants(10, proc=tmp_path) == (10, 11, 12)
    assert processes.descendants(13, proc=tmp_path) == (13,)


def test_this_process_can_be_measured() -> None:
    used = processes.memory([os.getpid()])
    assert used.pss > 0
    assert used.alone > 0
    assert processes.cpu_seconds([os.getpid()]) > 0


def test_an_ended_process_is_said_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such machine')"]
    with processes.Process(command, log=tmp_path / "log") as process:
        process.stop()
        with pytest.raises(BenchError, match=r"ended with (1|-15); its last words"):
            process.check()


def test_a_process_is_ended_with_its_context(tmp_path: Path) -> None:
    with processes.Process([sys.executable, "-c", "input()"], log=tmp_path / "log") as process:
        assert process.pid in process.tree()
    with pytest.raises(BenchError, match="ended with"):
        process.check()
