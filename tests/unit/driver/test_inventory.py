# SPDX-License-Identifier: Apache-2.0
"""The inventory: first probe, rescans, what makes a full probe due, hints, names of NICs, failures, freshness."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from discovery import address, model
from discovery.errors import ProbeError
from driver import inventory, quiet

WAIT_S = 40.0


def function(where: address.PciAddress, class_code: int) -> model.PciFunction:
    return model.PciFunction(address=where, vendor_id=0x10DE, device_id=0x2330, class_code=class_code, driver="nvidia")


def gpu(text: str, state: model.GpuState = model.GpuState.READY) -> model.Gpu:
    return model.Gpu(
        pci=function(address.parse(text), 0x030200),
        state=state,
        uuid=f"GPU-{text}",
    )


def snapshot(*gpus: model.Gpu) -> model.Snapshot:
    return model.Snapshot(origin=model.Origin.RECORDING, taken_at=0.0, host=model.Host(), gpus=gpus)


class FakeProber:
    """Hardware whose facts a test changes; it counts looks and can refuse them."""

    def __init__(self, *gpus: model.Gpu) -> None:
        self.now = snapshot(*gpus)
        self.error: str | None = None
        self.nics: tuple[model.NicReading, ...] = ()
        self.probes = 0
        self.rescans = 0

    def probe(self, *, timeout_s: float) -> model.Snapshot:
        assert timeout_s > 0
        self.probes += 1
        if self.error:
            raise ProbeError(self.error)
        nics = tuple(model.Nic(pci=function(nic.address, 0x020000)) for nic in self.nics)
        return replace(self.now, taken_at=float(self.probes), nics=nics)

    def rescan(self, *, timeout_s: float) -> model.Rescan:
        assert timeout_s > 0
        self.rescans += 1
        if self.error:
            raise ProbeError(self.error)
        return model.Rescan(
            gpus=tuple(
                model.GpuReading(address=g.address, state=g.state, driver=g.pci.driver, uuid=g.uuid)
                for g in self.now.gpus
            ),
            fingerprint=",".join(str(g.address) for g in self.now.gpus),
            nics=self.nics,
        )


class Count:
    def __init__(self) -> None:
        self.seen: list[tuple[bool, str]] = []

    def probe(self, *, seconds: float, ok: bool, reason: str) -> None:
        assert seconds >= 0
        self.seen.append((ok, reason))


@contextmanager
def running(
    prober: FakeProber, interval_s: float = 0.01, elapsed: Callable[[], float] = time.monotonic
) -> Iterator[inventory.Inventory]:
    kept = inventory.Inventory(prober, interval_s=interval_s, observer=Count(), elapsed=elapsed)
    kept.start()
    try:
        yield kept
    finally:
        kept.stop()


def until(kept: inventory.Inventory, holds: Callable[[inventory.InventoryState], bool]) -> inventory.InventoryState:
    """Wait for a state, failing loudly when it never comes."""
    give_up = threading.Event()
    timer = threading.Timer(WAIT_S, give_up.set)
    timer.start()
    try:
        while not give_up.is_set():
            state = kept.state()
            if holds(state):
                return state
            kept.wait(state.changes, 0.05)
    finally:
        timer.cancel()
    raise AssertionError(f"never came: {kept.state()}")


def test_first_look_is_a_full_probe() -> None:
    with running(FakeProber(gpu("0000:1b:00.0")), interval_s=3600) as kept:
        state = until(kept, lambda s: s.generation == 1)
        assert state.snapshot is not None
        assert list(state.readings) == [address.parse("0000:1b:00.0")]
        assert kept.fresh()


def test_quiet_hardware_is_rescanned_but_not_probed_again() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober) as kept:
        first = until(kept, lambda s: s.generation == 1)
        until(kept, lambda _: prober.rescans > 5)
        assert prober.probes == 1
        assert kept.state().changes == first.changes


def test_new_gpu_is_probed_and_raises_the_generation() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.now = snapshot(gpu("0000:1b:00.0"), gpu("0000:43:00.0"))
        state = until(kept, lambda s: s.generation == 2)
        assert state.snapshot is not None
        assert len(state.snapshot.gpus) == 2


def test_change_of_state_alone_is_a_change() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.now = snapshot(gpu("0000:1b:00.0", model.GpuState.LOST))
        state = until(kept, lambda s: s.generation == 2)
        assert state.readings[address.parse("0000:1b:00.0")].state is model.GpuState.LOST


def test_failed_probe_keeps_the_last_good_snapshot_and_says_so() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober) as kept:
        good = until(kept, lambda s: s.generation == 1)
        prober.error = "the child is gone"
        state = until(kept, lambda s: s.error is not None)
        assert state.snapshot == good.snapshot
        assert "the child is gone" in (state.error or "")
        prober.error = None
        assert until(kept, lambda s: s.error is None).generation == 1


def test_request_brings_a_probe_before_the_interval_ends() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober, interval_s=3600) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.now = snapshot(gpu("0000:43:00.0"))
        kept.request_probe()
        until(kept, lambda s: s.generation == 2)


def test_hints_lead_to_one_look_when_they_have_ended() -> None:
    now = [1000.0]
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober, interval_s=3600, elapsed=lambda: now[0]) as kept:
        until(kept, lambda s: s.generation == 1)
        for burst in range(2, 4):
            for _ in range(1000):
                kept.stir()
            now[0] += quiet.QUIET_S
            until(kept, lambda _, burst=burst: prober.rescans == burst)  # type: ignore[misc]
        assert prober.probes == 1
        prober.now = snapshot(gpu("0000:43:00.0"))
        kept.stir()
        now[0] += quiet.QUIET_S
        until(kept, lambda s: s.generation == 2)
        assert (prober.probes, prober.rescans) == (2, 4)


def test_what_changes_between_the_first_probe_and_its_rescan_is_not_missed() -> None:
    later = snapshot(gpu("0000:1b:00.0"), gpu("0000:43:00.0"))

    class Racing(FakeProber):
        def rescan(self, *, timeout_s: float) -> model.Rescan:
            self.now = later
            return super().rescan(timeout_s=timeout_s)

    prober = Racing(gpu("0000:1b:00.0"))
    with running(prober, interval_s=3600) as kept:
        state = until(kept, lambda s: s.generation == 2)
        assert state.snapshot is not None
        assert len(state.snapshot.gpus) == 2
        assert prober.probes == 2


def test_while_hints_come_the_look_of_the_interval_waits() -> None:
    now = [1000.0]
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober, interval_s=0.1, elapsed=lambda: now[0]) as kept:
        until(kept, lambda _: prober.rescans == 1)
        kept.stir()
        now[0] += quiet.QUIET_S / 2  # the interval is over, the burst is not
        kept.stir()
        now[0] += quiet.QUIET_S / 2
        threading.Event().wait(3 * quiet.QUIET_S)
        assert prober.rescans == 1
        now[0] += quiet.QUIET_S
        until(kept, lambda _: prober.rescans == 2)


def test_a_hint_ends_the_pause_after_a_failure() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    with running(prober, interval_s=3600) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.error = "the child is gone"
        kept.stir()
        until(kept, lambda s: s.error is not None)
        prober.error = None
        kept.stir()
        until(kept, lambda s: s.error is None)


def named(rdma: str | None, interface: str | None) -> tuple[model.NicReading, ...]:
    return (model.NicReading(address=address.parse("0000:1a:00.0"), rdma=rdma, interface=interface),)


@pytest.mark.parametrize(
    ("before", "now", "probes"),
    [
        ((None, None), (None, "eth0"), 2),
        ((None, None), ("mlx5_0", None), 2),
        ((None, "eth0"), ("mlx5_0", "eth0"), 2),
        ((None, "eth0"), (None, "eth1"), 2),
        (("mlx5_0", "eth0"), ("mlx5_1", "eth0"), 2),
        (("mlx5_0", "eth0"), ("mlx5_0", "eth1"), 1),
        (("mlx5_0", "eth0"), (None, "eth0"), 1),
        (("mlx5_0", "eth0"), (None, "eth1"), 1),
        (("mlx5_0", "eth0"), ("mlx5_0", None), 1),
        (("mlx5_0", "eth0"), (None, None), 1),
        ((None, "eth0"), (None, None), 1),
    ],
)
def test_a_name_that_a_nic_did_not_have_is_a_reason_to_probe(
    before: tuple[str | None, str | None], now: tuple[str | None, str | None], probes: int
) -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    prober.nics = named(*before)
    with running(prober) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.nics = named(*now)
        seen = prober.rescans
        until(kept, lambda _: prober.rescans > seen + 5)
        assert prober.probes == probes


def test_a_nic_that_comes_back_by_its_name_is_no_reason_to_probe() -> None:
    prober = FakeProber(gpu("0000:1b:00.0"))
    prober.nics = named("mlx5_0", "eth0")
    with running(prober) as kept:
        until(kept, lambda s: s.generation == 1)
        for names in ((None, "eth0"), (None, None), ("mlx5_0", None), ("mlx5_0", "eth0")):
            prober.nics = named(*names)
            seen = prober.rescans
            until(kept, lambda _, seen=seen: prober.rescans > seen + 3)  # type: ignore[misc]
        assert prober.probes == 1


def test_a_gpu_that_its_driver_is_still_waking_is_looked_at_again_soon() -> None:
    prober = FakeProber(gpu("0000:1b:00.0", model.GpuState.UNREADABLE))
    with running(prober, interval_s=3600) as kept:
        until(kept, lambda s: s.generation == 1)
        prober.now = snapshot(gpu("0000:1b:00.0"))
        state = until(kept, lambda s: s.generation == 2)
        assert state.readings[address.parse("0000:1b:00.0")].state is model.GpuState.READY


def test_reading_grows_stale_after_three_intervals_whoever_sets_the_clock() -> None:
    now, wall = [1000.0], [1e9]
    kept = inventory.Inventory(
        FakeProber(gpu("0000:1b:00.0")),
        interval_s=60,
        observer=Count(),
        clock=lambda: wall[0],
        elapsed=lambda: now[0],
    )
    assert not kept.fresh()
    kept.start()
    try:
        until(kept, lambda s: s.generation == 1)
        assert kept.state().read_at == 1e9
        now[0] += 180
        wall[0] += 1e6
        assert kept.fresh()
        now[0] += 1
        wall[0] -= 2e6
        assert not kept.fresh()
    finally:
        kept.stop()
