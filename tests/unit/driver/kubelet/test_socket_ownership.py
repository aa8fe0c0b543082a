# SPDX-License-Identifier: Apache-2.0
"""Who owns a socket, and what may be removed.

- one owner at a time; the second waits, then gets an error that says what to do
- a lock on a file that was removed is no lock, and can be had again
- the sockets of an owner that is gone are removed; those of a live one, and those that somebody serves, are not
- what a lock file lists is not believed beyond our own directories, nor at all when it is odd
- only a free place, or a socket that nobody serves, may be bound over
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.errors import SocketError
from driver.kubelet import sockets
from tests.fakes import kubelet_side


@pytest.fixture
def root() -> Iterator[Path]:
    with kubelet_side.short_directory() as path:
        (path / "registry").mkdir()
        (path / "plugin").mkdir()
        yield path


def paths(root: Path, pod_uid: str | None = None) -> sockets.SocketPaths:
    return sockets.socket_paths(
        driver_name="gpu.nearfield.dev", registry_dir=root / "registry", plugin_dir=root / "plugin", pod_uid=pod_uid
    )


def acquire(lock: sockets.InstanceLock, *, timeout_s: float = 0.0) -> None:
    lock.acquire(timeout_s=timeout_s, stop=threading.Event())


def leave_socket(path: Path) -> None:
    with kubelet_side.listening(path):
        pass


def test_second_instance_of_the_same_name_is_told_what_to_do(root: Path) -> None:
    first, second = sockets.InstanceLock(paths(root)), sockets.InstanceLock(paths(root))
    acquire(first)
    with pytest.raises(SocketError, match=r"dra\.sock belongs to another running instance.*--pod-uid"):
        acquire(second)
    first.release()
    acquire(second)
    assert second.held()
    assert not first.held()
    second.release()


def test_start_waits_for_a_predecessor_that_is_ending(root: Path) -> None:
    first, second = sockets.InstanceLock(paths(root)), sockets.InstanceLock(paths(root))
    acquire(first)
    waiting = threading.Event()

    class Signal(threading.Event):
        """Tells the test that the second instance has met the lock."""

        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    thread = threading.Thread(target=lambda: second.acquire(timeout_s=30, stop=Signal()))
    thread.start()
    assert waiting.wait(40)
    first.release()
    thread.join(40)
    assert second.held()
    second.release()


def test_stop_ends_the_wait(root: Path) -> None:
    first, second = sockets.InstanceLock(paths(root)), sockets.InstanceLock(paths(root))
    acquire(first)
    stop = threading.Event()
    stop.set()
    with pytest.raises(SocketError):
        second.acquire(timeout_s=30, stop=stop)
    first.release()


def test_instances_with_pod_uids_do_not_meet(root: Path) -> None:
    first, second = sockets.InstanceLock(paths(root, "a")), sockets.InstanceLock(paths(root, "b"))
    acquire(first)
    acquire(second)
    assert sockets.siblings(paths(root, "a")) == {"dra-b.sock.lock"}
    first.release()
    second.release()
    assert list((root / "plugin").iterdir()) == []


def test_lock_on_a_removed_file_is_no_lock(root: Path) -> None:
    lock = sockets.InstanceLock(paths(root))
    acquire(lock)
    paths(root).lock.unlink()
    assert not lock.held()
    acquire(lock)
    assert lock.held()
    lock.release()
    lock.release()


def test_lock_file_that_its_owner_removes_meanwhile_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        paths(root).lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = sockets.InstanceLock(paths(root))
    acquire(lock, timeout_s=30)
    assert lock.held()
    lock.release()


def test_directory_that_is_not_there_is_an_error_that_names_the_file(root: Path) -> None:
    (root / "plugin").rmdir()
    with pytest.raises(SocketError, match=r"dra\.sock\.lock"):
        acquire(sockets.InstanceLock(paths(root)))


def test_sockets_of_an_instance_that_is_gone_are_removed(root: Path) -> None:
    gone, ours = paths(root, "gone"), paths(root, "ours")
    lock = sockets.InstanceLock(gone)
    acquire(lock)
    content = gone.lock.read_bytes()
    lock.release()
    gone.lock.write_bytes(content)  # as a kill leaves it: the file, and no lock on it
    left = [gone.registration, sockets.bind_path(gone.registration), gone.service]
    for path in left:
        leave_socket(path)
    assert sorted(sockets.remove_stale(ours)) == sorted(left)
    assert [*(root / "registry").iterdir(), *(root / "plugin").iterdir()] == []


def test_sockets_of_a_live_instance_stay(root: Path) -> None:
    live, ours = paths(root, "live"), paths(root, "ours")
    lock = sockets.InstanceLock(live)
    acquire(lock)
    leave_socket(live.service)  # between bind and listen it looks like this
    assert sockets.remove_stale(ours) == ()
    assert live.service.is_socket()
    assert live.lock.exists()
    lock.release()


def test_socket_that_somebody_serves_stays_though_its_lock_is_free(root: Path) -> None:
    gone, ours = paths(root, "gone"), paths(root, "ours")
    gone.lock.write_text(json.dumps({"sockets": [str(gone.registration), str(gone.service)]}))
    leave_socket(gone.registration)
    with kubelet_side.listening(gone.service):
        assert sockets.remove_stale(ours) == (gone.registration,)
        assert sockets.is_live(gone.service)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"sockets": 1}',
        '{"sockets": [1]}',
        '{"sockets": null}',
        "[" * 3000,
        "\udcff",
        '{"sockets": ["/\\ud800.sock"]}',
    ],
    ids=range(10),
)
def test_odd_lock_file_lists_nothing(root: Path, content: str) -> None:
    gone = paths(root, "gone")
    gone.lock.write_bytes(content.encode("utf-8", "surrogateescape"))
    leave_socket(gone.service)
    assert sockets.remove_stale(paths(root)) == ()
    assert gone.service.is_socket()


def test_lock_file_is_not_believed_about_other_directories_or_files(root: Path) -> None:
    elsewhere, through, file = root / "x.sock", root / "plugin" / ".." / "x.sock", root / "plugin" / "y.sock"
    leave_socket(elsewhere)
    file.write_text("not a socket")
    listed = [str(path) for path in (elsewhere, through, file, root / "plugin" / "missing.sock")]
    listed += [f"{root}/plugin/{odd}.sock" for odd in ("\0", "n" * 300)]
    paths(root, "gone").lock.write_text(json.dumps({"sockets": listed}))
    assert sockets.remove_stale(paths(root)) == ()
    assert elsewhere.is_socket()
    assert file.exists()


def test_lock_that_cannot_be_opened_is_left_alone(root: Path) -> None:
    (root / "plugin" / "odd.lock").mkdir()
    (root / "plugin" / "link.lock").symlink_to("/nowhere")
    assert sockets.remove_stale(paths(root)) == ()


def test_place_may_be_taken_when_free_or_dead(root: Path) -> None:
    path = root / "a.sock"
    sockets.require_free(path)
    with kubelet_side.listening(path), pytest.raises(SocketError, match=r"a\.sock is served by a live process"):
        sockets.require_free(path)
    sockets.require_free(path)


def test_place_of_another_kind_of_file_may_not_be_taken(root: Path) -> None:
    path = root / "a.sock"
    path.write_text("precious")
    with pytest.raises(SocketError, match=r"a\.sock exists and is no socket"):
        sockets.require_free(path)
    with pytest.raises(SocketError, match="cannot be looked at"):
        sockets.require_free(path / "b.sock")


def test_directories_are_made_for_kubelet_alone(root: Path) -> None:
    made = root / "kubelet" / "plugins" / "gpu.nearfield.dev"
    sockets.make_directory(made)
    sockets.make_directory(made)
    assert [oct(path.stat().st_mode & 0o777) for path in (made, made.parent)] == ["0o750", "0o750"]


def test_directory_that_cannot_be_made_is_named(root: Path) -> None:
    (root / "file").write_text("")
    with pytest.raises(SocketError, match=r"file/plugins"):
        sockets.make_directory(root / "file" / "plugins")
