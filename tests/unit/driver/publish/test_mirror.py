# SPDX-License-Identifier: Apache-2.0
"""The mirror of the node's slices: what late and lost news may do to it.

Aspects: own replies before and after their events; deletions that overtake replies; events from before a list; a list
that is older than what was heard meanwhile; reconnects; 410; a server restored from a backup; odd objects; stopping.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from driver import errors
from driver.publish import mirror, pacing
from tests.fakes import publishing

Body = dict[str, Any]
END = object()


def body(uid: str, version: int, name: str = "s") -> Body:
    return {"metadata": {"name": f"{name}-{uid}", "uid": uid, "resourceVersion": str(version)}}


class Watch:
    """A watch whose events the test puts in."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.closed = False

    def __iter__(self) -> Iterator[tuple[str, Body]]:
        while (event := self.events.get()) is not END:
            if isinstance(event, Exception):
                raise event
            yield event

    def close(self) -> None:
        self.closed = True
        self.events.put(END)


class Api:
    """Lists and watches as the test says. `between` runs while a list is under way."""

    def __init__(self) -> None:
        self.version = 10
        self.items: list[Body] = []
        self.watches: list[Watch] = []
        self.asked: list[str] = []
        self.lists = 0
        self.between: Any = None

    def list_slices(self, *, node_name: str, timeout_s: float) -> tuple[str, list[Body]]:
        assert (node_name, timeout_s > 0) == ("n1", True)
        self.lists += 1
        answer = str(self.version), list(self.items)
        if self.between is not None:
            between, self.between = self.between, None
            between()
        return answer

    def watch_slices(self, *, node_name: str, resource_version: str, timeout_s: float, silence_s: float) -> Watch:
        assert (node_name, timeout_s > 0, silence_s > 0) == ("n1", True, True)
        self.asked.append(resource_version)
        self.watches.append(Watch())
        return self.watches[-1]


class Mirrored:
    """A running mirror and its server."""

    def __init__(self) -> None:
        self.api = Api()
        self.changes = 0
        self.mirror = mirror.Mirror(self.api, node_name="n1", changed=self._changed, timing=pacing.Timing())

    def _changed(self) -> None:
        self.changes += 1

    def start(self) -> None:
        self.mirror.start()
        publishing.until(lambda: self.api.watches)

    def hears(self, kind: str, event: Body) -> None:
        """An event, and a bookmark after it that tells us that it was taken in."""
        self.api.watches[-1].events.put((kind, event))
        self.mark()

    def mark(self) -> None:
        watch = self.api.watches[-1]
        publishing.until(watch.events.empty)
        # The iterator asks for the next event only when it is done with the last.
        watch.events.put(("BOOKMARK", {"metadata": {"resourceVersion": "99"}}))
        publishing.until(watch.events.empty)

    def uids(self) -> list[str]:
        view = self.mirror.view()
        assert view is not None
        return [f"{entry['metadata']['uid']}@{entry['metadata']['resourceVersion']}" for entry in view.slices]


@pytest.fixture
def mirrored() -> Iterator[Mirrored]:
    running = Mirrored()
    yield running
    running.mirror.stop()


def test_a_watch_that_is_given_up_is_closed(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.api.watches[0].events.put(("ADDED", "no object"))
    publishing.until(lambda: len(mirrored.api.watches) == 2)
    assert [watch.closed for watch in mirrored.api.watches] == [True, False]
    assert mirrored.api.lists == 2


def test_before_the_first_list_nothing_is_known(mirrored: Mirrored) -> None:
    assert mirrored.mirror.view() is None


def test_lists_and_events_make_the_view_and_others_are_told(mirrored: Mirrored) -> None:
    mirrored.api.items = [body("b", 2), body("a", 3)]
    mirrored.start()
    assert mirrored.uids() == ["a@3", "b@2"]
    before = mirrored.changes
    mirrored.hears("ADDED", body("c", 11))
    mirrored.hears("MODIFIED", body("a", 12))
    mirrored.hears("DELETED", body("b", 13))
    assert mirrored.uids() == ["a@12", "c@11"]
    assert mirrored.changes == before + 3


def test_the_event_of_an_own_write_changes_nothing_more(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.mirror.wrote(body("a", 11))
    before = mirrored.changes
    mirrored.hears("ADDED", body("a", 11))
    assert (mirrored.uids(), mirrored.changes) == (["a@11"], before)


def test_a_late_reply_does_not_undo_a_newer_event(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.hears("ADDED", body("a", 11))
    mirrored.hears("MODIFIED", body("a", 12))
    mirrored.mirror.wrote(body("a", 11))
    assert mirrored.uids() == ["a@12"]


def test_a_deletion_that_overtakes_the_reply_of_a_create_wins(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.hears("DELETED", body("a", 12))
    mirrored.mirror.wrote(body("a", 11))
    assert mirrored.uids() == []


def test_an_own_deletion_is_not_undone_by_a_late_event(mirrored: Mirrored) -> None:
    mirrored.api.items = [body("a", 5)]
    mirrored.start()
    mirrored.mirror.deleted("a")
    mirrored.hears("MODIFIED", body("a", 11))
    assert mirrored.uids() == []


def test_nothing_from_before_the_list_says_anything_new(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.hears("ADDED", body("a", 9))
    mirrored.mirror.wrote(body("b", 8))
    assert mirrored.uids() == []


def test_what_is_heard_while_a_list_is_under_way_stays(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.api.version = 20

    def meanwhile() -> None:
        mirrored.mirror.wrote(body("w", 21))
        mirrored.hears("ADDED", body("h", 22))
        mirrored.hears("DELETED", body("d", 23))

    mirrored.api.items = [body("d", 15)]
    mirrored.api.between = meanwhile
    mirrored.mirror.refresh()
    assert mirrored.uids() == ["h@22", "w@21"]


def test_an_older_list_of_another_thread_is_ignored(mirrored: Mirrored) -> None:
    mirrored.api.items = [body("a", 5)]
    mirrored.start()
    mirrored.api.version, mirrored.api.items = 9, []
    mirrored.mirror.refresh()
    assert mirrored.uids() == ["a@5"]


def test_a_watch_that_ends_well_goes_on_from_where_it_was(mirrored: Mirrored) -> None:
    mirrored.start()
    mirrored.hears("ADDED", body("a", 11))
    mirrored.api.watches[-1].close()
    publishing.until(lambda: len(mirrored.api.watches) == 2)
    assert mirrored.api.asked == ["10", "99"]
    assert mirrored.api.lists == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.ApiError("gone", reason=errors.ApiReason.GONE, status=410),
        errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE),
        KeyError("a bug"),
    ],
)
def test_a_watch_that_breaks_begins_with_a_list_of_a_new_connection(
    mirrored: Mirrored, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    mirrored.start()
    first = mirrored.mirror.view()
    assert first is not None
    mirrored.api.version, mirrored.api.items = 30, [body("n", 25)]
    mirrored.api.watches[-1].events.put(error)
    publishing.until(lambda: len(mirrored.api.watches) == 2)
    assert mirrored.uids() == ["n@25"]
    second = mirrored.mirror.view()
    assert second is not None
    assert second.connection == first.connection + 1
    assert mirrored.mirror.trouble is None
    # That a version gets too old is the course of things, and nothing to tell people.
    assert bool(caplog.records) is not (isinstance(error, errors.ApiError) and error.reason is errors.ApiReason.GONE)


def test_a_server_restored_from_a_backup_tells_the_truth(mirrored: Mirrored) -> None:
    mirrored.api.version, mirrored.api.items = 100, [body("a", 90)]
    mirrored.start()
    mirrored.hears("ADDED", body("b", 101))
    mirrored.api.version, mirrored.api.items = 50, [body("a", 40)]
    mirrored.api.watches[-1].events.put(errors.ApiError("away", reason=errors.ApiReason.UNAVAILABLE))
    publishing.until(lambda: len(mirrored.api.watches) == 2)
    assert mirrored.uids() == ["a@40"]
    mirrored.hears("ADDED", body("c", 51))
    assert mirrored.uids() == ["a@40", "c@51"]


def test_odd_objects_hide_no_other(mirrored: Mirrored) -> None:
    mirrored.api.items = [{}, {"metadata": None}, body("a", 5)]
    mirrored.start()
    mirrored.hears("ADDED", {"metadata": None})
    mirrored.hears("ADDED", body("b", 11))
    assert mirrored.uids() == ["a@5", "b@11"]


def test_stopping_ends_a_watch_that_waits() -> None:
    running = Mirrored()
    running.start()
    running.mirror.stop(timeout_s=40)
    assert not running.mirror._thread.is_alive()
