# SPDX-License-Identifier: Apache-2.0
"""The MPS supervisor with real sockets and processes, against the stand-in control program: shares come and go, their limits are
those of their namespaces, and what ends is started again.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from driver.errors import MpsError
from driver.mps import control, keeper, running, shares, shm, supervisor, values
from driver.prepare import rootfs
from tests.fakes import mps
from tests.fakes.publishing import until

LEGACY = shares.Protocol.LEGACY


def wait_for(node: mps.Node, device: str, state: values.DaemonState, *, restarts: int = 0) -> values.Daemon:
    """The daemon of a device once it is in a state."""
    client, seen = node.client, None
    deadline = time.monotonic() + mps.PATIENCE_S
    while time.monotonic() < deadline:
        seen = client.wait(seen, timeout_s=mps.PATIENCE_S)
        found = seen.daemons.get(device)
        if found is not None and found.state is state and found.restarts >= restarts:
            return found
    raise AssertionError(f"{device} is not {state}: {seen}")


def place(node: mps.Node, *wanted: shares.Share) -> None:
    for share in wanted:
        node.client.place(share, timeout_s=mps.PATIENCE_S)


def test_a_program_has_the_limits_of_its_share_and_no_others() -> None:
    small, large = mps.share(1), mps.share(2, memory=40 * mps.GIB, compute=50, below_normal=True)
    free = mps.share(3, memory=None, compute=None)
    with mps.node() as node:
        place(node, small, large, free)
        told = [node.use(share)[1] for share in (small, large, free)]
        assert [(one["memory"], one["threads"], one["priority"]) for one in told] == [
            (20 * mps.GIB, 25.0, 0),
            (40 * mps.GIB, 50.0, 1),
            (None, None, 0),
        ]
        assert {one["devices"] for one in told} == {mps.UUID}
        assert [one["namespace"] for one in told] == [small.namespace, large.namespace, free.namespace]


def test_memory_alone_or_compute_alone_is_limited() -> None:
    with mps.node() as node:
        place(node, mps.share(1, memory=None), mps.share(2, compute=None, memory=3 * mps.GIB + 7))
        assert node.use(mps.share(1))[1]["memory"] is None
        told = node.use(mps.share(2))[1]
        # Whole MiB, and never more than the share has.
        assert (told["memory"], told["threads"]) == (3 * mps.GIB, None)


def test_a_share_is_placed_again_with_other_limits() -> None:
    with mps.node() as node:
        place(node, mps.share(1), mps.share(1), mps.share(1, memory=mps.GIB, compute=5))
        told = node.use(mps.share(1))[1]
        assert (told["memory"], told["threads"]) == (mps.GIB, 5.0)
        place(node, mps.share(1, memory=None, compute=5))
        told = node.use(mps.share(1))[1]
        assert (told["memory"], told["threads"]) == (None, 5.0)


def test_a_share_that_goes_ends_its_programs_and_no_others() -> None:
    with mps.node() as node:
        place(node, mps.share(1), mps.share(2))
        (first, _), (second, _) = node.use(mps.share(1)), node.use(mps.share(2))
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        assert first.wait(mps.PATIENCE_S) == 3
        assert second.poll() is None
        assert node.use(mps.share(1))[1] == {}
        assert not (node.pipes() / shares.SERVER / mps.share(1).namespace).exists()
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        node.client.remove("gpu-1", "share-1", timeout_s=mps.PATIENCE_S)


def test_the_last_share_takes_the_daemon_and_its_folder_with_it() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        pid = node.pid()
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons == {}
        assert not Path(f"/proc/{pid}").exists()
        assert not node.pipes().parent.exists()
        place(node, mps.share(2))
        assert node.use(mps.share(2))[1]["threads"] == 25.0


def test_every_device_has_a_daemon_of_its_own() -> None:
    with mps.node(devices=(mps.UUID, mps.OTHER)) as node:
        other = mps.share(2, device="gpu-1", uuid=mps.OTHER)
        failed = node.client.place_all([mps.share(1), other], timeout_s=mps.PATIENCE_S)
        assert failed == {}
        assert node.use(other)[1]["devices"] == mps.OTHER
        assert node.pid("gpu-0") != node.pid("gpu-1")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_is_started_again_with_its_shares(number: signal.Signals) -> None:
    with mps.node() as node:
        place(node, mps.share(1), mps.share(2))
        folder = node.pipes() / shares.SERVER / mps.share(1).namespace
        inode = folder.stat().st_ino
        server = int(node.control("server", "get", shares.SERVER, "pid").stdout)
        client, _ = node.use(mps.share(1))
        os.kill(node.pid(), number)
        found = wait_for(node, "gpu-0", values.DaemonState.RUNNING, restarts=1)
        assert found.error is not None
        assert "the end of its log" in found.error
        assert client.wait(mps.PATIENCE_S) == 3
        # The server of the dead daemon held the GPU; a container that runs has the folder mounted.
        until(lambda: not Path(f"/proc/{server}").exists())
        assert folder.stat().st_ino == inode
        told = node.use(mps.share(1))[1]
        assert (told["memory"], told["threads"]) == (20 * mps.GIB, 25.0)


def test_a_server_that_dies_is_noticed_and_comes_again() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        os.kill(int(node.control("server", "get", shares.SERVER, "pid").stdout), signal.SIGKILL)
        found = wait_for(node, "gpu-0", values.DaemonState.RUNNING, restarts=1)
        assert found.error is not None
        assert re.search("its server is gone|Server 'shares' not found", found.error)
        assert node.use(mps.share(1))[1]["threads"] == 25.0


def test_namespaces_that_are_forgotten_are_made_again() -> None:
    with mps.node() as node:
        place(node, mps.share(1), mps.share(2))
        node.faults.write_text("forgets")
        client, seen = node.client, None
        while seen is None or seen.daemons["gpu-0"].error is None:
            seen = client.wait(seen, timeout_s=mps.PATIENCE_S)
        assert "is not there any more" in seen.daemons["gpu-0"].error
        place(node, mps.share(1), mps.share(2))
        assert node.use(mps.share(2))[1]["threads"] == 25.0
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons["gpu-0"].restarts == 0


def test_limits_that_are_not_kept_are_an_error_and_no_share() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        node.faults.write_text("refuses")
        with pytest.raises(MpsError, match="memory of share share-2 reads '-' after it was set to") as raised:
            node.client.place(mps.share(2), timeout_s=mps.PATIENCE_S)
        assert raised.value.retryable
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons["gpu-0"].state is values.DaemonState.WAITING
        node.faults.unlink()
        wait_for(node, "gpu-0", values.DaemonState.RUNNING)
        assert node.use(mps.share(2))[1]["threads"] == 25.0


def test_who_connects_before_the_limits_are_in_place_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has the folder of its namespace from before the daemon died."""
    early: list[tuple[subprocess.Popen[str], dict[str, object]]] = []
    asked = control.asked

    def hurried(ask: control.Ask, *arguments: str, **options: Any) -> running.Result:
        if arguments[:3] == ("namespace", "set", mps.share(1).namespace):
            early.append(node.use(mps.share(1)))
        return asked(ask, *arguments, **options)

    with mps.node() as node:
        place(node, mps.share(1))
        monkeypatch.setattr(control, "asked", hurried)
        os.kill(node.pid(), signal.SIGKILL)
        wait_for(node, "gpu-0", values.DaemonState.RUNNING, restarts=1)
        ((client, told),) = early
        assert told["memory"] is None
        assert client.wait(mps.PATIENCE_S) == 3
        assert node.use(mps.share(1))[1]["memory"] == 20 * mps.GIB


def test_a_share_whose_limits_are_not_kept_after_a_restart_lets_nobody_in() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        node.faults.write_text("refuses")
        os.kill(node.pid(), signal.SIGKILL)
        wait_for(node, "gpu-0", values.DaemonState.WAITING, restarts=1)
        # It is tried again and again; who comes just then does not stay.
        client, _ = node.use(mps.share(1))
        assert client.wait(mps.PATIENCE_S) in {1, 3}


def test_limits_that_are_changed_are_set_again_and_the_programs_of_others_stay() -> None:
    with mps.node() as node:
        place(node, mps.share(1), mps.share(2))
        (first, _), (second, _) = node.use(mps.share(1)), node.use(mps.share(2))
        name = mps.share(1).namespace
        node.control("namespace", "set", name, f"--server={shares.SERVER}", "--pinned-memory-limit=70G")
        assert first.wait(mps.PATIENCE_S) == 3
        told = node.control("namespace", "get", name, shares.SERVER, "pinned-memory-limit").stdout.strip()
        assert told == "20G"
        place(node, mps.share(1), mps.share(2))
        assert second.poll() is None


def test_a_gpu_that_is_not_there_is_no_share_although_its_server_was_accepted() -> None:
    with mps.node() as node:
        with pytest.raises(MpsError, match=r"its server is gone .*no CUDA-capable device is detected") as raised:
            node.client.place(mps.share(1, uuid=mps.OTHER), timeout_s=mps.PATIENCE_S)
        assert raised.value.retryable
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons == {}
        assert not node.pipes().parent.exists()


def test_a_daemon_that_does_not_start_says_why_and_is_tried_again() -> None:
    with mps.node() as node:
        node.faults.write_text("no-start")
        with pytest.raises(MpsError, match=r"ended with status 1; the end of its log: .*the driver said no"):
            node.client.place(mps.share(1), timeout_s=mps.PATIENCE_S)
        wait_for(node, "gpu-0", values.DaemonState.WAITING, restarts=2)
        node.faults.unlink()
        place(node, mps.share(1))
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons["gpu-0"].state is values.DaemonState.RUNNING


def test_a_daemon_that_hangs_holds_nobody_up_for_longer_than_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.mps.daemon.END_S", 0.3)
    with mps.node() as node:
        place(node, mps.share(1))
        pid = node.pid()
        node.faults.write_text("hangs")
        with pytest.raises(MpsError) as raised:
            node.client.place(mps.share(2), timeout_s=0.5)
        assert raised.value.retryable
        node.client.status(timeout_s=mps.PATIENCE_S)
        # What hangs is ended and started again.
        client, seen = node.client, None
        while seen is None or seen.daemons["gpu-0"].state is values.DaemonState.RUNNING:
            seen = client.wait(seen, timeout_s=mps.PATIENCE_S)
        node.faults.unlink()
        wait_for(node, "gpu-0", values.DaemonState.RUNNING, restarts=1)
        assert node.pid() != pid
        place(node, mps.share(2))


def test_logs_do_not_fill_the_memory_in_which_they_lie() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        log = node.pipes().parent / "log/control.log"
        with log.open("ab") as file:
            file.write(b"x" * (2 << 20))
        deadline = time.monotonic() + mps.PATIENCE_S
        while log.stat().st_size > 1 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert node.use(mps.share(1))[1]["threads"] == 25.0


def test_legacy_programs_have_the_limits_of_their_environment() -> None:
    share = mps.share(1, protocol=LEGACY, below_normal=True)
    with mps.node(version="535.104.05") as node:
        place(node, share, mps.share(2, protocol=LEGACY, memory=None, compute=None))
        told = node.use(share)[1]
        assert (told["memory"], told["threads"]) == (20 * mps.GIB, 25.0)
        told = node.use(mps.share(2, protocol=LEGACY, memory=None, compute=None))[1]
        assert (told["memory"], told["threads"]) == (None, None)
        found = wait_for(node, "gpu-0", values.DaemonState.RUNNING)
        assert found.protocol is LEGACY
        assert stat.S_IMODE((node.pipes().parent / shares.SHM).stat().st_mode) == 0o1777
        os.kill(node.pid(), signal.SIGKILL)
        wait_for(node, "gpu-0", values.DaemonState.RUNNING, restarts=1)
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        node.client.remove("gpu-0", "share-2", timeout_s=mps.PATIENCE_S)
        assert not node.pipes().parent.exists()


def test_a_mig_instance_is_shared_by_legacy_mps_alone() -> None:
    instance = "MIG-11111111-2222-3333-4444-555555555555"
    with mps.node(devices=(instance,)) as node:
        place(node, mps.share(1, uuid=instance, protocol=LEGACY))
        with pytest.raises(MpsError, match="which MPS v3 does not limit") as raised:
            node.client.place(mps.share(2, uuid=instance, device="gpu-1"), timeout_s=mps.PATIENCE_S)
        assert not raised.value.retryable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "../gpu"}, "is no name of a device"),
        ({"device": "-d"}, "is no name of a device"),
        ({"uuid": "--force"}, "is no UUID"),
        ({"uuid": "GPU-1,GPU-2"}, "is no UUID"),
        ({"compute": 0}, "MPS takes 1 to 100"),
        ({"compute": 101}, "MPS takes 1 to 100"),
        ({"memory": 1000}, "MPS limits it in MiB"),
        ({"device": "d" * 63}, "take a shorter --mps-dir"),
    ],
)
def test_what_no_daemon_could_do_is_refused(changes: dict[str, object], words: str) -> None:
    with mps.node() as node:
        if "shorter" in words:
            node.stop()
            node.directory = node.directory.parent / ("r" * 20)
            node.start()
        with pytest.raises(MpsError, match=words) as raised:
            node.client.place(mps.share(1, **changes), timeout_s=mps.PATIENCE_S)
        assert not raised.value.retryable
        assert node.client.status(timeout_s=mps.PATIENCE_S).daemons == {}


def test_another_device_under_the_same_name_waits_until_its_shares_are_gone() -> None:
    with mps.node(devices=(mps.UUID, mps.OTHER)) as node:
        place(node, mps.share(1))
        with pytest.raises(MpsError, match=f"is shared as {mps.UUID} by MPS v3, and not as {mps.OTHER}"):
            node.client.place(mps.share(2, uuid=mps.OTHER), timeout_s=mps.PATIENCE_S)
        node.client.remove("gpu-0", "share-1", timeout_s=mps.PATIENCE_S)
        place(node, mps.share(2, uuid=mps.OTHER))
        assert node.use(mps.share(2, uuid=mps.OTHER))[1]["devices"] == mps.OTHER


def test_an_old_driver_has_legacy_mps_alone_and_says_what_would_help() -> None:
    with mps.node(version="535.104.05") as node:
        ability = node.client.ability()
        assert ability is not None
        assert ability.protocols == {LEGACY}
        assert "update the driver" in ability.reasons[shares.Protocol.V3]
        with pytest.raises(MpsError, match="does not know MPS v3, which came with driver 615") as raised:
            node.client.place(mps.share(1), timeout_s=mps.PATIENCE_S)
        assert not raised.value.retryable


def test_the_program_may_come_later() -> None:
    with mps.node() as node:
        program = node.root / "usr/bin/nvidia-cuda-mps-control"
        aside = program.with_name("aside")
        program.rename(aside)
        ability = node.client.ability()
        assert ability is not None
        assert ability.protocols == frozenset()
        assert "is not in the driver root" in ability.reasons[shares.Protocol.V3]
        with pytest.raises(MpsError, match="is not in the driver root") as raised:
            node.client.place(mps.share(1), timeout_s=mps.PATIENCE_S)
        assert raised.value.retryable
        aside.rename(program)
        place(node, mps.share(1))


def test_a_new_instance_knows_nothing_and_ends_what_was_left() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        first = node.client.status(timeout_s=mps.PATIENCE_S)
        stale = node.directory / "gpu-7"
        stale.mkdir()
        node.stop()
        # The folder stays for containers that run.
        assert (node.pipes() / shares.SERVER / mps.share(1).namespace).is_dir()
        node.start()
        second = node.client.wait(first, timeout_s=mps.PATIENCE_S)
        assert (second.instance != first.instance, second.daemons) == (True, {})
        place(node, mps.share(1))
        assert node.use(mps.share(1))[1]["threads"] == 25.0
        assert node.supervisor is not None
        node.supervisor.sweep()
        assert not stale.exists()
        assert node.pipes().exists()


def test_one_supervisor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOCK_S", 0.0)
    with mps.node() as node:
        place(node, mps.share(1))
        other = supervisor.Supervisor(node.directory, rootfs.DriverRoot(Path("/"), mount=node.root), shm_at=shm.plain)
        with pytest.raises(MpsError, match=rf"Another MPS supervisor \(process {os.getpid()}\) works in"):
            other.begin(threading.Event())
        other.stop()
        assert node.use(mps.share(1))[1]["threads"] == 25.0


def test_nobody_but_root_reaches_what_lies_there() -> None:
    with mps.node() as node:
        place(node, mps.share(1))
        assert stat.S_IMODE(node.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((node.directory / shares.SOCKET).stat().st_mode) == 0o600
        folder = node.pipes() / shares.SERVER / mps.share(1).namespace
        # In a container of any user, by a mount.
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert stat.S_IMODE((folder / "control").stat().st_mode) == 0o666


def test_a_client_knows_when_nobody_is_there() -> None:
    with mps.node(start=False) as node:
        client = node.client
        assert client.ability() is None
        with pytest.raises(MpsError, match="does `nearfield mps` run on this node") as raised:
            client.place(mps.share(1), timeout_s=1)
        assert raised.value.retryable


def test_shares_come_and_go_from_many_sides_at_once() -> None:
    with mps.node(pace=keeper.Pace(first=0.05, last=0.2, steady=3600.0, check=3600.0)) as node:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                place(node, mps.share(number))
                node.client.remove("gpu-0", f"share-{number}", timeout_s=mps.PATIENCE_S)
                place(node, mps.share(number))
            except BaseException as error:  # noqa: BLE001 - shown below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        found = node.client.status(timeout_s=mps.PATIENCE_S).daemons["gpu-0"]
        assert sorted(found.shares) == [f"share-{number}" for number in range(3)]
        names = node.control("namespace", "list", f"--server={shares.SERVER}", "--format=csv,noheader").stdout
        assert len(names.splitlines()) == 4


def test_daemons_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    with mps.node(start=False) as node:
        command = [
            *(sys.executable, "-m", "driver.cli"),
            "mps",
            f"--mps-dir={node.directory}",
            "--driver-root=/",
            f"--driver-root-mount={node.root}",
        ]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            while node.client.ability() is None:
                time.sleep(0.05)
            place(node, mps.share(1))
            daemon = node.pid()
            status = subprocess.run(
                [sys.executable, "-m", "driver.cli", "mps", "status", f"--mps-dir={node.directory}"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            assert "gpu-0" in status
            assert "running" in status
        finally:
            process.kill()
            process.wait()
        handle = None
        try:
            handle = os.pidfd_open(daemon)
            assert select.select([handle], [], [], mps.PATIENCE_S)[0]
        except ProcessLookupError:
            pass
        finally:
            if handle is not None:
                os.close(handle)
        # Its server may be left, until there is a supervisor again.
        node.start()
        place(node, mps.share(1))
        assert node.use(mps.share(1))[1]["threads"] == 25.0


def test_a_supervisor_that_is_told_to_end_takes_its_daemons_with_it(tmp_path: Path) -> None:
    with mps.node(start=False) as node:
        command = [
            sys.executable,
            "-m",
            "driver.cli",
            "mps",
            "run",
            f"--mps-dir={node.directory}",
            f"--driver-root-mount={node.root}",
        ]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            while node.client.ability() is None:
                time.sleep(0.05)
            place(node, mps.share(1))
            daemon = node.pid()
            process.terminate()
            assert process.wait(mps.PATIENCE_S) == 0, (tmp_path / "log").read_text()
            assert not Path(f"/proc/{daemon}").exists()
            assert not (node.directory / shares.SOCKET).exists()
        finally:
            process.kill()
            process.wait()


def test_the_state_of_affairs_is_shown_to_people_and_programs() -> None:
    def shown(node: mps.Node, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "driver.cli", "mps", "status", f"--mps-dir={node.directory}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=mps.PATIENCE_S, check=False)

    with mps.node() as node:
        assert "No device is shared by MPS." in shown(node).stdout
        place(node, mps.share(1))
        told = json.loads(shown(node, "-o", "json").stdout)
        assert (told["apiVersion"], told["kind"]) == ("output.nearfield.dev/v1alpha1", "MpsStatus")
        assert (told["protocols"], told["reasons"]) == (["legacy", "v3"], {})
        (daemon,) = told["daemons"]
        assert daemon.pop("since") >= 0
        daemon.pop("clients", None)
        assert daemon == {
            "device": "gpu-0",
            "uuid": mps.UUID,
            "protocol": "v3",
            "state": "running",
            "restarts": 0,
            "shares": ["share-1"],
        }
        assert re.search(r"^gpu-0 +v3 +running for \d+ s +1 ", shown(node).stdout, re.MULTILINE)
        node.stop()
        gone = shown(node)
        assert (gone.returncode, gone.stdout) == (1, "")
        assert "does `nearfield mps` run on this node?" in gone.stderr
