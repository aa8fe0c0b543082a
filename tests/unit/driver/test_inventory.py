# SPDX-License-Identifier: Apache-2.0
"""The inventory: first probe, rescans, what makes a full probe due, failures, freshness."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from discovery import address, model
from discovery.errors import ProbeError
from driver import inventory

WAIT_S = 10.0


def gpu(text: str, state: model.GpuState = model.GpuState.READY) -> model.Gpu:
    return model.Gpu(
        pci=model.PciFunction(
            address=address.parse(text), vendor_id=0x10DE, device_id=0x2330, class_code=0x030200, driver="nvidia"
        ),
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
        self.probes = 0
        self.rescans = 0

    def probe(self, *, timeout_s: float) -> model.Snapshot:
        assert timeout_s > 0
        self.probes += 1
        if self.error:
            raise ProbeError(self.error)
        return replace(self.now, taken_at=float(self.probes))

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
        )


class Count:
    def __init__(self) -> None:
        self.seen: list[tuple[bool, str]] = []

    def probe(self, *, seconds: float, ok: bool, reason: str) -> None:
        assert seconds >= 0
        self.seen.append((ok, reason))


@contextmanager
def running(prober: FakeProber, interval_s: float = 0.01) -> Iterator[inventory.Inventory]:
    kept = inventory.Inventory(prober, interval_s=interval_s, observer=Count())
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
