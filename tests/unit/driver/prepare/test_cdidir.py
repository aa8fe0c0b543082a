# SPDX-License-Identifier: Apache-2.0
"""cdidir: our files in a CDI folder. Aspects: placing, what is noticed of changes, removing, listing, what files give back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import values
from driver.prepare import cdi, cdidir, claims, files, ledger, plan
from tests.fakes import preparing

DIALECT = cdi.Dialect(driver=preparing.DRIVER, mock=True)


def entry(number: int = 1, *, device: int = 0, boot_id: str = preparing.BOOT_ID) -> ledger.Entry:
    result = ledger.Result(request="gpu", pool=preparing.POOL, device=preparing.NAMES[device])
    planned = plan.plan_prepare(
        claims.Allocation(claim=preparing.ref(number), results=(result,)),
        devices=preparing.FixedIndex().devices,
        holders=(),
        dialect=DIALECT,
        boot_id=boot_id,
    )
    assert isinstance(planned, plan.PreparePlan)
    return planned.entry


def path_of(directory: cdidir.CdiDirectory, number: int = 1) -> Path:
    return directory.path / DIALECT.claim_file(preparing.ref(number).uid)


def place(directory: cdidir.CdiDirectory, written: ledger.Entry) -> None:
    directory.write_claim(written, ledger.to_columns(written))


@pytest.fixture
def directory(tmp_path: Path) -> cdidir.CdiDirectory:
    return cdidir.CdiDirectory(tmp_path / "run" / "cdi", dialect=DIALECT)


def test_a_file_is_placed_whole_also_where_the_folder_is_gone(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    assert [path.name for path in directory.path.iterdir()] == [path_of(directory).name]
    assert path_of(directory).read_bytes() == DIALECT.claim_spec(entry())
    assert path_of(directory).stat().st_mode & 0o777 == 0o644


def test_a_left_over_temporary_file_is_no_obstacle(directory: cdidir.CdiDirectory) -> None:
    directory.make()
    (directory.path / f".{path_of(directory).name}.tmp").write_bytes(b"x" * 100_000)
    place(directory, entry())
    assert path_of(directory).read_bytes() == DIALECT.claim_spec(entry())
    assert directory.listing().temporaries == frozenset()


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    directory: cdidir.CdiDirectory, tmp_path: Path
) -> None:
    directory.make()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path_of(directory).symlink_to(victim)
    place(directory, entry())
    assert victim.read_text() == "precious"
    assert not path_of(directory).is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "link"])
def test_a_pipe_or_link_in_the_place_of_any_file_holds_nobody_up_and_is_replaced(
    directory: cdidir.CdiDirectory, make: Callable[[Path], None]
) -> None:
    place(directory, entry())
    good = path_of(directory).read_bytes()
    path_of(directory).unlink()
    make(path_of(directory))
    make(directory.path / files.temporary_name(path_of(directory).name))
    assert list(directory.entries(boot_id=preparing.BOOT_ID)) == []
    assert not directory.verify_claim(entry())
    assert directory.ensure_claim(entry())
    assert path_of(directory).read_bytes() == good
    assert not path_of(directory).is_symlink()
    assert directory.listing().temporaries == frozenset()


def test_a_link_to_the_same_content_is_no_file_of_ours(directory: cdidir.CdiDirectory, tmp_path: Path) -> None:
    # What it leads to may change, and the link would look untouched.
    place(directory, entry())
    path_of(directory).rename(tmp_path / "elsewhere")
    path_of(directory).symlink_to(tmp_path / "elsewhere")
    assert not directory.verify_claim(entry())
    assert directory.ensure_claim(entry())
    assert path_of(directory).is_file()
    assert not path_of(directory).is_symlink()


def test_what_cannot_be_placed_leaves_the_old_file_and_nothing_else(directory: cdidir.CdiDirectory) -> None:
    path_of(directory).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        place(directory, entry())
    assert [path.name for path in directory.path.iterdir()] == [path_of(directory).name]


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "edited": lambda path: path.write_bytes(path.read_bytes().replace(b"GPU-0", b"GPU-9")),
    "cut": lambda path: os.truncate(path, 10),
    "replaced": lambda path: path.write_text("{}"),
    "huge": lambda path: os.truncate(path, 8 << 20),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_changed_file_is_written_again(directory: cdidir.CdiDirectory, change: str, restarted: bool) -> None:
    place(directory, entry())
    if restarted:
        directory = cdidir.CdiDirectory(directory.path, dialect=DIALECT)
    CHANGES[change](path_of(directory))
    assert directory.ensure_claim(entry())
    assert path_of(directory).read_bytes() == DIALECT.claim_spec(entry())
    assert not directory.ensure_claim(entry())


def test_an_untouched_file_is_not_written(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    before = path_of(directory).stat()
    assert not directory.ensure_claim(entry())
    assert directory.verify_claim(entry())
    assert not cdidir.CdiDirectory(directory.path, dialect=DIALECT).ensure_claim(entry())
    assert path_of(directory).stat() == before


def test_a_change_that_left_the_times_as_they_were_is_found_by_reading(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    assert directory.listing().others == {preparing.ref(1).uid}, "written a moment ago, so to be read once more"
    path = path_of(directory)
    changed = path.read_bytes().replace(b"GPU-0", b"GPU-9")
    path.write_bytes(changed)
    directory._known[path.name] = cdidir._seen(path.lstat())
    assert not directory.ensure_claim(entry())
    assert not directory.verify_claim(entry())
    assert directory.place(path.name, DIALECT.claim_spec(entry()))
    assert path.read_bytes() == DIALECT.claim_spec(entry())


def test_a_file_that_was_read_when_it_was_old_is_not_read_again(tmp_path: Path) -> None:
    now_ns = [0]
    directory = cdidir.CdiDirectory(tmp_path, dialect=DIALECT, clock_ns=lambda: now_ns[0])
    place(directory, entry())
    now_ns[0] = path_of(directory).stat().st_mtime_ns + 1
    assert directory.verify_claim(entry())
    assert directory.listing().others == {preparing.ref(1).uid}
    now_ns[0] += 10**9
    assert directory.verify_claim(entry())
    assert directory.listing() == cdidir.Listing(
        untouched=frozenset({preparing.ref(1).uid}), others=frozenset(), temporaries=frozenset()
    )
    os.utime(path_of(directory))
    assert directory.listing().others == {preparing.ref(1).uid}


def test_removing_takes_the_temporary_file_along(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    (directory.path / f".{path_of(directory).name}.tmp").touch()
    assert directory.remove_claim(preparing.ref(1).uid)
    assert list(directory.path.iterdir()) == []
    assert not directory.remove_claim(preparing.ref(1).uid)


def test_removing_from_a_folder_that_is_gone_is_removing_nothing(directory: cdidir.CdiDirectory) -> None:
    assert not directory.remove_claim("a")
    assert directory.listing() == cdidir.Listing(untouched=frozenset(), others=frozenset(), temporaries=frozenset())


def test_where_a_file_is_in_the_place_of_the_folder_there_is_nothing_to_remove(directory: cdidir.CdiDirectory) -> None:
    directory.path.parent.mkdir()
    directory.path.touch()
    assert not directory.remove_claim(preparing.ref(1).uid)


def test_files_of_others_are_not_seen(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    for name in ("nvidia.json", "other_a.json", DIALECT.node_file, f"{DIALECT.driver}_a.yaml", ".x.tmp"):
        (directory.path / name).write_text("{}")
    (directory.path / f".{DIALECT.claim_file('b')}.tmp").touch()
    listing = directory.listing()
    assert listing.others == {preparing.ref(1).uid}
    assert listing.temporaries == {"b"}


def test_files_give_their_entries_back_this_boot_first_and_the_newest_first(directory: cdidir.CdiDirectory) -> None:
    entries = [entry(1), entry(2, boot_id="before"), entry(3), entry(4, boot_id="before")]
    for age, written in enumerate(entries):
        place(directory, written)
        os.utime(path_of(directory, age + 1), ns=(0, 10**9 * (100 - age)))
    assert list(directory.entries(boot_id=preparing.BOOT_ID)) == [entries[0], entries[2], entries[1], entries[3]]


def test_files_give_their_entries_back_also_where_they_are_known_to_be_untouched(tmp_path: Path) -> None:
    # A record is lost while the agent runs, and then its files were all read long ago.
    directory = cdidir.CdiDirectory(tmp_path, dialect=DIALECT, clock_ns=lambda: time.time_ns() + 10**9)
    place(directory, entry())
    assert directory.verify_claim(entry())
    assert directory.listing().untouched == {preparing.ref(1).uid}
    assert list(directory.entries(boot_id=preparing.BOOT_ID)) == [entry()]


def test_a_file_under_the_name_of_another_claim_gives_nothing(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    path_of(directory).rename(path_of(directory, 2))
    with pytest.raises(ledger.DamagedError):
        directory.entry(values.ClaimUid(preparing.ref(2).uid))
    assert list(directory.entries(boot_id=preparing.BOOT_ID)) == []


def test_damaged_files_cost_only_themselves(directory: cdidir.CdiDirectory) -> None:
    place(directory, entry())
    path_of(directory, 2).write_bytes(b"\xff{")
    path_of(directory, 3).mkdir()
    path_of(directory, 4).touch()
    assert list(directory.entries(boot_id=preparing.BOOT_ID)) == [entry()]
